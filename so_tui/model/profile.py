"""A model as numbers, worked out once: architecture, parameter layouts, FLOPs, activations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.model.flops import Flops, flops_for
from so_tui.model.shape import Architecture, architecture
from so_tui.model.sharding import (
    PERSISTENCE_THRESHOLD,
    gpu_sub_groups,
    partition_numel,
    sub_group_slices,
)
from so_tui.spec.errors import reject
from so_tui.spec.run_spec import ModelSpec, OffloadSpec, ParameterBlock, Policy, RunSpec, Tensor

# Where a rank's optimizer states are stored: which parameter in which sub-group, on which device,
# in how many bytes. The planner and the engine that trains use the same arithmetic.
# ``_sub_groups_on_gpu`` repeats what DeepSpeed decides by itself, for the modes in which its code
# runs.
#
# P is a model's parameter count and n = ceil(p / ranks) the part of one parameter on one rank. A
# sub-group is a run of such parts that is stepped together. All sizes are per rank unless they say
# otherwise.


Device = Literal["gpu", "cpu"]
DeviceRule = Literal["so-tui", "deepspeed", "gpu"]
"""How many sub-groups stay on the GPU: by ``gpu_sub_groups``, as DeepSpeed does, or all of
them.
"""
Span = tuple[float, float]
"""Shares of a forward pass over the blocks: how much is done before the first parameter is needed,
and after the last was used.
"""

WEIGHT_BYTES = 2


class Parameter(Struct, frozen=True):
    """A trainable parameter as the optimizer sees it; ``numel`` counts all ranks."""

    name: str
    numel: int
    decay: bool


_UnplacedSubGroup = tuple[bool, tuple[str, ...], int]
"""The first fields of a sub-group that has no device yet."""


class _SubGroup(Struct, frozen=True):
    decay: bool
    """Whether it is of the parameter group with weight decay."""
    names: tuple[str, ...]
    numel: int
    """Parameters of one rank, padding included."""
    index: int
    device: Device


class StateLayout(Struct, frozen=True):
    """The model states of one rank: bf16 weights, everything else fp32. Bytes are exact."""

    ranks: int
    sub_groups: tuple[_SubGroup, ...]
    numel: int
    """Parameters of one rank, padding included."""
    gpu_numel: int
    """Parameters of one rank whose optimizer states stay on the GPU."""
    largest_sub_group: int

    @property
    def cpu_numel(self) -> int:
        return self.numel - self.gpu_numel

    @property
    def cpu_groups(self) -> tuple[_SubGroup, ...]:
        return tuple(group for group in self.sub_groups if group.device == "cpu")

    def largest_on(self, device: Device) -> int:
        """Parameters of the largest sub-group on a device."""
        return max((group.numel for group in self.sub_groups if group.device == device), default=0)


def _with_storage(blocks: Sequence[ParameterBlock]) -> Iterator[Tensor]:
    """Yield every tensor that has storage of its own in the order of the model's parameter list,
    with ``{i}`` replaced by the layer's index.
    """
    for block in blocks:
        for index in range(block.first, block.first + block.repeat):
            for tensor in block.tensors:
                if not tensor.tied:
                    yield replace(tensor, name=tensor.name.replace("{i}", str(index)))


def _sub_groups_on_gpu(numels: Sequence[int], ratio: float, rule: DeviceRule) -> int:
    """Return how many of the first sub-groups stay on the GPU.

    DeepSpeed 0.19.8 decides by count, rounded down (``stage3.py``, ``subgroup_to_device``). At
    ratio 0.9 ten sub-groups leave none on the GPU, since ``(1 - 0.9) * 10`` is less than 1 in
    floating point.
    """
    if rule == "so-tui":
        return gpu_sub_groups(numels, ratio)
    return len(numels) if rule == "gpu" else int((1 - ratio) * len(numels))


# Bytes that a forward pass stores for backward, per token, by what is recomputed. Pure numbers.
#
# Symbols: h hidden width, q and kv widths of queries and of keys (values), f feed-forward width
# that one token uses.


POLICIES: tuple[Policy, ...] = ("none", "selective", "attention", "full")
"""The fastest first."""

MLP_TILE_TOKENS = 8192

SINKS = frozenset({"gpt_oss"})
"""Model types whose attention has sinks: backward briefly holds one more tensor of the size of a
layer's attention result. The gate of their experts is clamped and shifted, and each of these
operations stores a copy where they are not one kernel.
"""
_ROTATED_AS_THEY_COME = frozenset({"gpt_oss", "llama", "mistral", "qwen2", "seed_oss"})
"""Model types whose queries and keys are not stored before rotation: no norm comes before it, and
values do not share their memory.
"""


def offloaded_bytes(shape: Architecture, model: ModelSpec) -> int:
    """Return what all layers keep in host memory between forward and backward, per token."""
    inputs = shape.input_bytes * shape.layers if model.offloads_inputs else 0
    attending = shape.layers - shape.other_layers if model.offloads_results else 0
    return inputs + sum(shape.result_bytes) * attending


def in_tiles(spec: RunSpec, shape: Architecture) -> bool:
    """Return whether dense feed-forward blocks compute a micro-batch in more than one tile."""
    tiled = spec.model.tiles_mlp and not shape.experts
    return tiled and spec.micro_batch_tokens > MLP_TILE_TOKENS


_ROUTER_BYTES = 8


_MOST_LAYOUTS = 1024
"""Entries of one cache."""


@dataclass(frozen=True, eq=False)
class ModelProfile:
    """What planning needs to know of a model, whatever the run's other settings. Computed on demand
    and shared.
    """

    blocks: tuple[ParameterBlock, ...]
    architecture: Architecture
    fused: bool
    """Whether norms, rotary positions and gates are one kernel each."""
    eager_attention: bool
    """Whether attention scores exist as whole matrices."""

    @cached_property
    def key(self) -> str:
        """Name of the model's shape, whatever its weights: a digest of its parameter table."""
        digest = hashlib.sha256(msgspec.json.encode(self.blocks)).hexdigest()
        return f"{self.architecture.model_type}-{digest[:12]}"

    @cached_property
    def flops(self) -> Flops:
        return flops_for(self.blocks, self.architecture)

    @cached_property
    def trainable(self) -> tuple[Parameter, ...]:
        """Parameters in the optimizer's order: those with weight decay, then those without. Tied
        tensors have no states.
        """
        own = (Parameter(each.name, each.numel, each.decay) for each in _with_storage(self.blocks))
        return tuple(sorted(own, key=lambda parameter: not parameter.decay))

    @cached_property
    def parameters(self) -> int:
        """Trainable parameters, tied ones counted once."""
        return sum(parameter.numel for parameter in self.trainable)

    @cached_property
    def largest_parameter(self) -> int:
        return max(parameter.numel for parameter in self.trainable)

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest repeated block; 0 where no block repeats."""
        return max(
            (sum(tensor.numel for tensor in block.tensors) for block in self._layers()),
            default=0,
        )

    @cached_property
    def largest_layer_tensor(self) -> int:
        """Elements of the largest tensor in a repeated block."""
        return max(
            (tensor.numel for block in self._layers() for tensor in block.tensors), default=0
        )

    @cached_property
    def small_parameters(self) -> int:
        """Parameters in tensors so small that ZeRO-3 stores them whole on every rank."""
        return sum(
            block.repeat * tensor.numel
            for block in self.blocks
            for tensor in block.tensors
            if not tensor.tied and tensor.numel < PERSISTENCE_THRESHOLD
        )

    @cached_property
    def tied_head(self) -> bool:
        """Whether the output head is the embedding, whose gradient is complete only at the end of
        backward.
        """
        return any(tensor.tied for block in self.blocks for tensor in block.tensors)

    def stored_bytes(self, policy: Policy) -> int:
        """Return what one layer stores per token for backward, in bf16.

        full: its input. attention: that, and attention's result with 4 B a head (its log-sum-exp).
        selective: that, and the results of matmuls: 2 B for every element of q, k, v, the
        attention's result, the output projection, gate and up (those of experts with fused kernels
        only). none: 2 (4 h + 3 q + 3 kv + 3 f), which are the inputs of the block, of its norms and
        of its products, queries and keys before and after rotation, values, the attention's result,
        gate, up and their product; experts by those that a token uses (see
        ``_expert_stored_bytes``). Where queries and keys are not stored before rotation it is
        2 (q + kv) less. Fused experts store 16 B for each expert that a token uses whatever the
        policy: the index of its row in both directions.
        """
        shape, f = self.architecture, self.architecture.active_intermediate
        h, q, kv = shape.hidden, shape.query_width, shape.key_value_width
        stored = shape.input_bytes + (16 * shape.experts_per_token if self.fused else 0)
        if policy == "full":
            return stored
        if policy == "attention":
            return stored + sum(shape.result_bytes)
        stored += 4 * shape.heads
        if policy == "selective":
            gate_and_up = 0 if shape.experts and not self.fused else 2 * f
            return stored + 2 * (2 * q + 2 * kv + h + gate_and_up)
        feed_forward = self._expert_stored_bytes if shape.experts else 6 * f
        before_rotation = 0 if shape.model_type in _ROTATED_AS_THEY_COME else q + kv
        return stored + 2 * (3 * h + 2 * (q + kv) + before_rotation) + feed_forward

    @property
    def _expert_stored_bytes(self) -> int:
        """What a layer's experts store per token where nothing is recomputed, k of them of width
        f / k.

        2 k h + 6 f with fused kernels (rows, first products, second products' inputs), 4 k h + 8 f
        in transformers' path, 14 f with gpt-oss's clamped gate. The router stores its logits in
        bf16, their softmax and its fp32 copy, 8 B an expert. transformers' figures are what torch's
        memory profiler shows.
        """
        rows, f = self._expert_rows, self.architecture.active_intermediate
        own = 2 * rows + 6 * f if self.fused else 4 * rows + self._plain_gate_bytes
        return own + _ROUTER_BYTES * self.architecture.experts

    @property
    def _expert_peak_bytes(self) -> int:
        """The most that a layer's experts hold per token in backward, recomputation included.

        Fused: in the second product's backward 4 k h + 8 f (rows and their gradient; products,
        inputs and the gradient of these), or in the gate's 2 k h + 10 f, once the products'
        gradient has arrived. In transformers' path 6 k h on top of what is stored, as torch's
        memory profiler shows.
        """
        rows, f = self._expert_rows, self.architecture.active_intermediate
        own = max(4 * rows + 8 * f, 2 * rows + 10 * f)
        if not self.fused:
            own = 10 * rows + self._plain_gate_bytes
        return own + _ROUTER_BYTES * self.architecture.experts

    @property
    def _expert_rows(self) -> int:
        return self.architecture.experts_per_token * self.architecture.hidden

    @property
    def _plain_gate_bytes(self) -> int:
        shape = self.architecture
        return (14 if shape.model_type in SINKS else 8) * shape.active_intermediate

    @cached_property
    def block_bytes(self) -> int:
        """Bytes per token that recomputation and backward of one layer hold besides its input, at
        the end of the feed-forward's backward.

        With fused kernels 10 h + 6 (q + kv) + 10 f: what the block stores, the gradients of gate,
        up and their product (itself freed by then), and two of width h. That is what torch's memory
        history shows on an H200. Without, norms store fp32 copies: 24 h + 6 (q + 2 kv) + 12 f. With
        experts ``_expert_peak_bytes`` in the place of the last.
        """
        shape = self.architecture
        norms, feed_forward = (10, 10) if self.fused else (24, 12)
        sinks = 2 * shape.query_width if shape.model_type in SINKS else 0
        inner = self._expert_peak_bytes if shape.experts else feed_forward * shape.intermediate
        return norms * shape.hidden + self._head_bytes + inner + sinks

    @property
    def tiled_block_bytes(self) -> int:
        """What ``block_bytes`` is where feed-forward block and norms are cut into tiles, without
        one tile's ``tile_bytes``.

        Then attention's backward holds the most: 6 h + 14 q + 10 kv, which are queries, keys and
        values before and after rotation, the result, the gradients of all these, and a kernel's
        fp32 sum of the queries' gradient. Derived, not measured. Norms that are not one kernel hold
        no more than fused ones outside their tile: 10 h, which counting live tensors on a CPU
        confirms.
        """
        shape, h = self.architecture, self.architecture.hidden
        attention = 6 * h + 14 * shape.query_width + 10 * shape.key_value_width
        return max(10 * h + self._head_bytes, attention)

    @property
    def tile_bytes(self) -> int:
        """The most that backward of a tile holds per token of it: in the feed-forward block, or
        28 h in a norm of several kernels.

        The norm's is what counting live tensors on a CPU shows.
        """
        shape = self.architecture
        if self.fused:
            return 10 * shape.intermediate
        return max(12 * shape.intermediate, 28 * shape.hidden)

    @property
    def _head_bytes(self) -> int:
        """The part of ``block_bytes`` that queries, keys and values take."""
        q, kv = self.architecture.query_width, self.architecture.key_value_width
        return 6 * (q + kv if self.fused else q + 2 * kv)

    @property
    def norm_bytes(self) -> int:
        """The part of ``elementwise_bytes`` that the two norms of a block move: 8 h, or 68 h
        without fused kernels.
        """
        return (8 if self.fused else 68) * self.architecture.hidden

    @cached_property
    def elementwise_bytes(self) -> int:
        """GPU memory traffic per token of one block's forward pass outside matmuls: norms,
        residuals, rotary positions, SwiGLU.

        20 h + 8 (q + kv) + 6 f with fused kernels, each reading and writing once; 80 h + 30 (q +
        kv) + 10 f without. For each expert that a token uses 6 h: its row is read and written, and
        the result is read; 20 h without.
        """
        shape = self.architecture
        per_h, per_row, per_head, per_f = (20, 6, 8, 6) if self.fused else (80, 20, 30, 10)
        return (
            (per_h + per_row * shape.experts_per_token) * shape.hidden
            + per_head * (shape.query_width + shape.key_value_width)
            + per_f * shape.active_intermediate
        )

    def layout(self, ranks: int, offload: OffloadSpec) -> StateLayout:
        """Return the optimizer states of each of ``ranks`` ranks under these offload settings."""
        return _layout(self, ranks, offload.sub_group_size, offload.ratio, _device_rule(offload))

    def gpu_numel(self, ranks: int, offload: OffloadSpec, ratio: float) -> int:
        """Return ``layout(...).gpu_numel`` at another offload ratio, without making that layout."""
        numels = [numel for _, _, numel in _sub_groups(self, ranks, offload.sub_group_size)]
        return sum(numels[: _sub_groups_on_gpu(numels, ratio, _device_rule(offload))])

    @cached_property
    def tensor_spans(self) -> dict[str, Span]:
        """When a forward pass uses each tensor, by the matmuls before it. Embeddings take
        no time.
        """
        tensors = tuple(_with_storage(self.blocks))
        products = [
            tensor.numel if tensor.kind in ("linear", "expert") else 0 for tensor in tensors
        ]
        whole = sum(products) or 1
        return {
            tensor.name: ((done - product) / whole, done / whole)
            for tensor, product, done in zip(tensors, products, accumulate(products), strict=True)
        }

    def _layers(self) -> Iterator[ParameterBlock]:
        return (block for block in self.blocks if block.repeat > 1)


def _device_rule(offload: OffloadSpec) -> DeviceRule:
    """Return the rule of an offload mode; ``auto`` counts as ``superoffload``, which it becomes
    where states are offloaded.
    """
    if offload.mode == "gpu":
        return "gpu"
    deepspeed = offload.mode == "zerooffload" or offload.engine == "deepspeed"
    return "deepspeed" if deepspeed else "so-tui"


# A search over GPU counts, ratios and sub-group sizes asks for the same layouts again. The caches
# are bounded, since a screen may stay open for days.


@lru_cache(maxsize=_MOST_LAYOUTS)
def _sub_groups(
    profile: ModelProfile, ranks: int, sub_group_size: int
) -> tuple[_UnplacedSubGroup, ...]:
    """Return the sub-groups of one rank in the optimizer's order; none spans the two parameter
    groups.
    """
    rows: list[_UnplacedSubGroup] = []
    for decay in (True, False):
        members = [parameter for parameter in profile.trainable if parameter.decay == decay]
        names = tuple(parameter.name for parameter in members)
        numels = [partition_numel(parameter.numel, ranks) for parameter in members]
        rows += [
            (decay, names[start:stop], sum(numels[start:stop]))
            for start, stop in sub_group_slices(numels, sub_group_size)
        ]
    return tuple(rows)


@lru_cache(maxsize=_MOST_LAYOUTS)
def _layout(
    profile: ModelProfile, ranks: int, sub_group_size: int, ratio: float, rule: DeviceRule
) -> StateLayout:
    """Return the layout of one rank: the first sub-groups stay on the GPU, as ``rule`` says."""
    rows = _sub_groups(profile, ranks, sub_group_size)
    numels = [numel for _, _, numel in rows]
    on_gpu = _sub_groups_on_gpu(numels, ratio, rule)
    return StateLayout(
        ranks=ranks,
        sub_groups=tuple(
            _SubGroup(*row, index, "gpu" if index < on_gpu else "cpu")
            for index, row in enumerate(rows)
        ),
        numel=sum(numels),
        gpu_numel=sum(numels[:on_gpu]),
        largest_sub_group=max(numels),
    )


@lru_cache(maxsize=_MOST_LAYOUTS)
def compute_spans(profile: ModelProfile, ranks: int, sub_group_size: int) -> tuple[Span, ...]:
    """Return when a forward pass uses each sub-group."""
    spans = profile.tensor_spans
    # Names are in the model's order.
    return tuple(
        (spans[names[0]][0], spans[names[-1]][1])
        for _, names, _ in _sub_groups(profile, ranks, sub_group_size)
    )


def profile_of(model: ModelSpec) -> ModelProfile:
    """Return the profile of a model.

    Raises:
        InputError: The model has no parameter table (``missing-parameter-table``), or its shape is
            not described (see ``architecture``).
    """
    if not model.parameters:
        raise reject(
            "missing-parameter-table",
            "model.parameters",
            "",
            "the ordered parameter list of this model is not known",
            "`python -m so_tui_trainer.tools.presets FILE` writes it from "
            "`[model.config]`; built-in presets have it",
        )
    return _profile(
        model.parameters,
        architecture(model.config),
        model.kernels == "auto",
        model.attention == "eager",
    )


# The screen plans a spec again at every key press: expanding a table of a thousand tensors each
# time would be felt.
_profile = lru_cache(maxsize=32)(ModelProfile)
