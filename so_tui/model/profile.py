"""A model as numbers, worked out once: architecture, parameter layouts, FLOPs, activations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import prod
from typing import TypeVar

import msgspec
from msgspec import Struct

from so_tui.model.activations import (
    POLICIES,
    Policy,
    block_bytes,
    elementwise_bytes,
    fused_kernels,
    score_bytes,
    stored_bytes,
)
from so_tui.model.architecture import Architecture, architecture
from so_tui.model.flops import Flops, flops_for, idle_parameters
from so_tui.model.layout import (
    Parameter,
    Span,
    StateLayout,
    UnplacedSubGroup,
    assign_devices,
    cut,
    device_rule,
    sub_groups_on_gpu,
    tensor_spans,
    trainable,
)
from so_tui.model.loss import loss_bytes, recomputed_logits
from so_tui.model.sharding import PERSISTENCE_THRESHOLD
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.sections.model import ModelSpec
from so_tui.spec.sections.offload import OffloadSpec
from so_tui.spec.sections.parameters import ParameterBlock

_K = TypeVar("_K")
_V = TypeVar("_V")
_MOST_LAYOUTS = 1024
"""Entries of one cache of a profile, which is emptied when it has as many."""


class ActivationSizes(Struct, frozen=True, kw_only=True):
    """Bytes per token of one layer."""

    stored: int
    """Stored by forward for backward."""
    block: int
    """Held by recomputation and backward of the layer, beside its input."""


class ModelProfile:
    """What planning needs to know of a model, whatever the run's other settings. Computed on demand and shared; nothing here changes."""

    def __init__(
        self,
        blocks: tuple[ParameterBlock, ...],
        shape: Architecture,
        *,
        fused: bool,
        eager_attention: bool,
    ) -> None:
        self.blocks = blocks
        self.architecture = shape
        self.fused = fused
        """Whether norms, rotary positions and gates are one kernel each."""
        self.eager_attention = eager_attention
        """Whether attention scores exist as whole matrices."""
        # A search over GPU counts, ratios and sub-group sizes asks for the same layouts again. `_store` bounds each cache, since a screen
        # may stay open for days.
        self._rows: dict[tuple[int, int], tuple[UnplacedSubGroup, ...]] = {}
        self._layouts: dict[tuple[int, int, float, str], StateLayout] = {}
        self._spans: dict[tuple[int, int], tuple[Span, ...]] = {}

    @cached_property
    def key(self) -> str:
        """Name of the model's shape, whatever its weights: a digest of its parameter table."""
        return f"{self.architecture.model_type}-{hashlib.sha256(msgspec.json.encode(self.blocks)).hexdigest()[:12]}"

    @cached_property
    def flops(self) -> Flops:
        return flops_for(self.blocks, self.architecture)

    @cached_property
    def idle_parameters(self) -> int:
        """Expert parameters that one token does not use."""
        return idle_parameters(self.blocks, self.architecture)

    @cached_property
    def trainable(self) -> tuple[Parameter, ...]:
        """Parameters in the optimizer's order."""
        return trainable(self.blocks)

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
            (sum(prod(tensor.shape) for tensor in block.tensors) for block in self._layers()),
            default=0,
        )

    @cached_property
    def largest_layer_tensor(self) -> int:
        """Elements of the largest tensor in a repeated block."""
        return max(
            (prod(tensor.shape) for block in self._layers() for tensor in block.tensors), default=0
        )

    @cached_property
    def small_parameters(self) -> int:
        """Parameters in tensors so small that ZeRO-3 stores them whole on every rank."""
        return sum(
            block.repeat * prod(tensor.shape)
            for block in self.blocks
            for tensor in block.tensors
            if not tensor.tied and prod(tensor.shape) < PERSISTENCE_THRESHOLD
        )

    @cached_property
    def tied_head(self) -> bool:
        """Whether the output head is the embedding, whose gradient is complete only at the end of backward."""
        return any(tensor.tied for block in self.blocks for tensor in block.tensors)

    @cached_property
    def activations(self) -> dict[Policy, ActivationSizes]:
        shape, fused = self.architecture, self.fused
        block = block_bytes(shape, fused=fused)
        return {
            policy: ActivationSizes(stored=stored_bytes(shape, policy, fused=fused), block=block)
            for policy in POLICIES
        }

    @cached_property
    def elementwise_bytes(self) -> int:
        """GPU memory traffic of one layer's forward per token, beside its matrix products."""
        return elementwise_bytes(self.architecture, fused=self.fused)

    def score_bytes(self, sequence_length: int, sequences: int) -> int:
        """Return the bytes of one layer's attention scores where they exist as whole matrices, else 0."""
        return (
            score_bytes(self.architecture, sequence_length, sequences)
            if self.eager_attention
            else 0
        )

    def loss_bytes(self, tokens: int) -> int:
        """Return the peak bytes of the loss over ``tokens`` trained tokens of one rank."""
        return loss_bytes(tokens, self.architecture.vocabulary, self.architecture.hidden)

    def recomputed_logits(self, tokens: int) -> int:
        """Return how many logits the loss over ``tokens`` trained tokens multiplies a second time."""
        return recomputed_logits(tokens, self.architecture.vocabulary)

    def layout(self, ranks: int, offload: OffloadSpec) -> StateLayout:
        """Return the optimizer states of each of ``ranks`` ranks under these offload settings."""
        rule = device_rule(offload.mode, offload.engine)
        key = (ranks, offload.sub_group_size, offload.ratio, rule)
        if (found := self._layouts.get(key)) is None:
            rows = self._cut(ranks, offload.sub_group_size)
            found = assign_devices(
                rows, self.parameters, self.largest_parameter, ranks, offload.ratio, rule
            )
            _store(self._layouts, key, found)
        return found

    def gpu_numel(self, ranks: int, offload: OffloadSpec, ratio: float) -> int:
        """Return ``layout(...).gpu_numel`` at another offload ratio, without making that layout."""
        numels = [numel for _, _, numel in self._cut(ranks, offload.sub_group_size)]
        return sum(
            numels[: sub_groups_on_gpu(numels, ratio, device_rule(offload.mode, offload.engine))]
        )

    def compute_spans(self, ranks: int, sub_group_size: int) -> tuple[Span, ...]:
        """Return when a forward pass uses each sub-group."""
        key = (ranks, sub_group_size)
        if (found := self._spans.get(key)) is None:
            spans = self._tensor_spans
            # Names are in the model's order.
            found = tuple(
                (spans[names[0]][0], spans[names[-1]][1])
                for _, names, _ in self._cut(ranks, sub_group_size)
            )
            _store(self._spans, key, found)
        return found

    @cached_property
    def _tensor_spans(self) -> dict[str, Span]:
        return tensor_spans(self.blocks)

    def _cut(self, ranks: int, sub_group_size: int) -> tuple[UnplacedSubGroup, ...]:
        key = (ranks, sub_group_size)
        if (found := self._rows.get(key)) is None:
            found = cut(self.trainable, ranks, sub_group_size)
            _store(self._rows, key, found)
        return found

    def _layers(self) -> Iterator[ParameterBlock]:
        return (block for block in self.blocks if block.repeat > 1)


def _store(cache: dict[_K, _V], key: _K, value: _V) -> None:
    if len(cache) >= _MOST_LAYOUTS:
        cache.clear()
    cache[key] = value


def profile_of(model: ModelSpec) -> ModelProfile:
    """Return the profile of a model.

    Raises:
        InputError: The model has no parameter table (``missing-parameter-table``), or its shape is not described (see ``architecture``).
    """
    if not model.parameters:
        raise InputError(
            [
                Problem(
                    code="missing-parameter-table",
                    field="model.parameters",
                    value="",
                    message="the ordered parameter list of this model is not known",
                    remedy="`python -m so_tui_trainer.tools.presets FILE` writes it from `[model.config]`; built-in presets have it",
                )
            ]
        )
    return _profile(
        model.parameters,
        architecture(model.config),
        fused_kernels(model),
        model.attention == "eager",
    )


@lru_cache(maxsize=32)
def _profile(
    blocks: tuple[ParameterBlock, ...], shape: Architecture, fused: bool, eager_attention: bool
) -> ModelProfile:
    # The screen plans a spec again at every key press: expanding a table of a thousand tensors each time would be felt.
    return ModelProfile(blocks, shape, fused=fused, eager_attention=eager_attention)
