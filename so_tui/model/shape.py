"""Where a rank's optimizer states are stored: which parameter in which sub-group, on which device,
in how many bytes.

Pure functions on plain numbers. The planner and the engine that trains use the same ones.
``sub_groups_on_gpu`` repeats what DeepSpeed decides by itself, for the modes in which its code
runs.

P is a model's parameter count and n = ceil(p / ranks) the part of one parameter on one rank. A
sub-group is a run of such parts that is stepped together. All sizes are per rank unless they say
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from so_tui.model.sharding import gpu_sub_groups, partition_numel, sub_group_slices
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.model_table import layer_kinds, layers_without_attention
from so_tui.spec.run_spec import ParameterBlock, Tensor

# A transformer's shape in one vocabulary, whichever keys its ``config.json`` uses.
#
# Known model types: llama, qwen3, qwen3_moe, phi3, gpt_oss, seed_oss. Others with the same keys
# are read the same way, those with latent attention (deepseek) by the heads that it is unfolded
# to.


# What transformers assumes where a config.json is silent; elsewhere it is hidden_size /
# num_attention_heads.
_DEFAULT_HEAD_DIM = {"qwen3": 128, "gpt_oss": 64, "seed_oss": 128}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WINDOW_IN_EVERY_LAYER = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Model types of transformers that use ``sliding_window``, where it is set, in all layers."""


AttentionLayers = tuple[int, int, int | None]
"""How many layers have attention of which width (query heads x head dimension), and which window.
"""


class Architecture(Struct, frozen=True, kw_only=True):
    model_type: str
    layers: int
    hidden: int
    """Width of the residual stream."""
    vocabulary: int
    heads: int
    """Query heads; ``heads * head_dim`` need not be ``hidden``."""
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense feed-forward block, or of one expert."""
    experts: int = 0
    """Experts of a layer; 0 in a dense model."""
    experts_per_token: int = 0
    window: int | None = None
    """Positions that a sliding-window layer sees; None where no layer has one."""
    windowed_layers: int = 0
    """Layers with a window, or with attention in chunks of that many positions."""
    windowed_head_dim: int = 0
    """Width of their heads where it is not ``head_dim``, which is then that of the other layers
    (Gemma 4).
    """
    other_layers: int = 0
    """Layers without attention over pairs of tokens: recurrences, or a feed-forward block alone."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Keys, or values; both have this width."""
        return self.kv_heads * self.head_dim

    @property
    def active_intermediate(self) -> int:
        """Feed-forward width that one token uses."""
        return self.intermediate * max(1, self.experts_per_token)

    @property
    def attention_layers(self) -> tuple[AttentionLayers, ...]:
        """The layers with attention over pairs of tokens, without and with a window."""
        full = self.layers - self.windowed_layers - self.other_layers
        windowed_width = self.heads * (self.windowed_head_dim or self.head_dim)
        kinds = (
            (full, self.query_width, None),
            (self.windowed_layers, windowed_width, self.window),
        )
        return tuple(kind for kind in kinds if kind[0])


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the shape that ``[model.config]`` describes.

    Raises:
        InputError: Names every key that is missing (``missing-model-key``) or not a positive whole
            number (``invalid-model-key``).
    """
    problems: list[Problem] = []

    def number(*keys: str) -> int:
        given = [(key, value) for key in keys if (value := config.get(key)) is not None]
        key, value = given[0] if given else (keys[0], None)
        if isinstance(value, int) and value > 0:
            return value
        code, message = "invalid-model-key", "must be a positive whole number"
        if value is None:
            code, message = "missing-model-key", "is missing, so the model's shape is not known"
        problems.append(
            Problem(
                code,
                f"model.config.{key}",
                "" if value is None else repr(value),
                message,
                "copy the keys of the model's config.json, or extend a preset",
            )
        )
        return 1

    model_type = str(config.get("model_type", ""))
    hidden = number("hidden_size")
    heads = number("num_attention_heads")
    layers = number("num_hidden_layers")
    experts = number(*_EXPERTS) if set(_EXPERTS) & config.keys() else 0
    window, windowed_layers = _windows(config, model_type, layers)
    head_dim, widest = (
        _head_dim(config, number) or _DEFAULT_HEAD_DIM.get(model_type, hidden // heads),
        _widest_head(config),
    )
    found = Architecture(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        vocabulary=number("vocab_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=max(head_dim, widest),
        intermediate=number("moe_intermediate_size", "intermediate_size")
        if experts
        else number("intermediate_size"),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", "top_k_experts") if experts else 0,
        window=window,
        windowed_layers=windowed_layers,
        windowed_head_dim=head_dim if widest > head_dim else 0,
        other_layers=layers_without_attention(layer_kinds(config)),
    )
    if problems:
        raise InputError(problems)
    return found


def _head_dim(config: Mapping[str, Any], number: Callable[..., int]) -> int:
    """Return the width of a head, 0 where the config has none. In latent attention ``head_dim`` is
    only the rotated part.
    """
    if config.get("qk_nope_head_dim") and config.get("qk_rope_head_dim"):
        return number("qk_nope_head_dim") + number("qk_rope_head_dim")
    return number("head_dim") if config.get("head_dim") else 0


def _widest_head(config: Mapping[str, Any]) -> int:
    """Return the widest head of layers that have heads of their own size (``per_layer_config``); 0
    where none has.
    """
    layers = config.get("per_layer_config")
    own = (
        [layer.get("head_dim") for layer in layers.values() if isinstance(layer, dict)]
        if isinstance(layers, dict)
        else []
    )
    return max((size for size in own if isinstance(size, int)), default=0)


def _windows(config: Mapping[str, Any], model_type: str, layers: int) -> tuple[int | None, int]:
    """Return the sliding window, or the chunk, and the number of layers that have one."""
    kinds = layer_kinds(config)
    if windowed := kinds.count("chunked_attention"):
        window = config.get("attention_chunk_size")
        return (window, windowed) if isinstance(window, int) and window > 0 else (None, 0)
    window = config.get("sliding_window")
    if not isinstance(window, int) or (
        model_type.startswith("qwen") and not config.get("use_sliding_window")
    ):
        return None, 0
    if isinstance(config.get("layer_types"), list | tuple):
        windowed = kinds.count("sliding_attention")
    elif model_type == "gpt_oss":
        windowed = (layers + 1) // 2
    elif model_type in _WINDOW_IN_EVERY_LAYER:
        windowed = layers
    return (window, windowed) if windowed else (None, 0)


Device = Literal["gpu", "cpu"]
Group = Literal["decay", "no-decay"]
DeviceRule = Literal["so-tui", "deepspeed", "gpu"]
"""How many sub-groups stay on the GPU: by ``gpu_sub_groups``, as DeepSpeed does, or all of
them.
"""

WEIGHT_BYTES = 2


class Parameter(Struct, frozen=True):
    """A trainable parameter as the optimizer sees it; ``numel`` counts all ranks."""

    name: str
    numel: int
    decay: bool


class _PlannedSubGroup(Struct, frozen=True):
    index: int
    group: Group
    names: tuple[str, ...]
    numel: int
    """Parameters of one rank, padding included."""
    device: Device


class StateLayout(Struct, frozen=True):
    """The model states of one rank: bf16 weights, everything else fp32. Bytes are exact."""

    ranks: int
    parameters: int
    """Trainable parameters of the whole model, tied ones counted once."""
    sub_groups: tuple[_PlannedSubGroup, ...]
    numel: int
    """Parameters of one rank, padding included."""
    gpu_numel: int
    """Of these, those whose optimizer states stay on the GPU."""
    largest_sub_group: int
    largest_parameter: int
    """Elements of the largest single parameter, before it is cut over the ranks."""

    @property
    def cpu_numel(self) -> int:
        return self.numel - self.gpu_numel

    @property
    def cpu_groups(self) -> tuple[_PlannedSubGroup, ...]:
        return tuple(group for group in self.sub_groups if group.device == "cpu")

    def largest_on(self, device: Device) -> int:
        """Parameters of the largest sub-group on a device."""
        return max((group.numel for group in self.sub_groups if group.device == device), default=0)


def _expand(blocks: Sequence[ParameterBlock]) -> Iterator[Tensor]:
    """Yield every tensor of the model in the order of its parameter list, with ``{i}`` replaced by
    the layer's index.
    """
    for block in blocks:
        for index in range(block.first, block.first + block.repeat):
            for tensor in block.tensors:
                yield replace(tensor, name=tensor.name.replace("{i}", str(index)))


UnplacedSubGroup = tuple[Group, tuple[str, ...], int]
"""A sub-group before it has a device: parameter group, names, elements of one rank."""


def trainable(blocks: tuple[ParameterBlock, ...]) -> tuple[Parameter, ...]:
    """Return the parameters in the optimizer's order: those with weight decay, then those without.
    Tied tensors have no states.
    """
    own = [
        Parameter(tensor.name, prod(tensor.shape), tensor.decay)
        for tensor in _expand(blocks)
        if not tensor.tied
    ]
    return tuple(sorted(own, key=lambda parameter: not parameter.decay))


def cut(
    parameters: Sequence[Parameter], ranks: int, sub_group_size: int
) -> tuple[UnplacedSubGroup, ...]:
    """Return the sub-groups of one rank in the optimizer's order; none spans the two parameter
    groups.
    """
    rows: list[UnplacedSubGroup] = []
    groups: tuple[tuple[Group, bool], ...] = (("decay", True), ("no-decay", False))
    for group, decay in groups:
        members = [parameter for parameter in parameters if parameter.decay == decay]
        names = tuple(parameter.name for parameter in members)
        numels = [partition_numel(parameter.numel, ranks) for parameter in members]
        rows += [
            (group, names[start:stop], sum(numels[start:stop]))
            for start, stop in sub_group_slices(numels, sub_group_size)
        ]
    return tuple(rows)


def sub_groups_on_gpu(numels: Sequence[int], ratio: float, rule: DeviceRule) -> int:
    """Return how many of the first sub-groups stay on the GPU.

    DeepSpeed 0.19.8 decides by count, rounded down (``stage3.py``, ``subgroup_to_device``). At
    ratio 0.9 ten sub-groups leave none on the GPU, since ``(1 - 0.9) * 10`` is less than 1 in
    floating point.
    """
    if rule == "so-tui":
        return gpu_sub_groups(numels, ratio)
    return len(numels) if rule == "gpu" else int((1 - ratio) * len(numels))


def assign_devices(
    rows: Sequence[UnplacedSubGroup],
    parameters: int,
    largest_parameter: int,
    ranks: int,
    ratio: float,
    rule: DeviceRule,
) -> StateLayout:
    """Return the layout of sub-groups that are cut already: the first ones stay on the GPU, as
    ``rule`` says.
    """
    numels = [numel for _, _, numel in rows]
    on_gpu = sub_groups_on_gpu(numels, ratio, rule)
    return StateLayout(
        ranks=ranks,
        parameters=parameters,
        sub_groups=tuple(
            _PlannedSubGroup(index, group, names, numel, "gpu" if index < on_gpu else "cpu")
            for index, (group, names, numel) in enumerate(rows)
        ),
        numel=sum(numels),
        gpu_numel=sum(numels[:on_gpu]),
        largest_sub_group=max(numels),
        largest_parameter=largest_parameter,
    )


Span = tuple[float, float]
"""Shares of a forward pass over the blocks: how much is done before the first parameter is needed,
and after the last was used.
"""


def tensor_spans(blocks: Sequence[ParameterBlock]) -> dict[str, Span]:
    """Return when a forward pass uses each tensor, by the matrix products before it. Embeddings
    take no time.
    """
    ends: list[tuple[str, float, float]] = []
    done = 0.0
    for tensor in _expand(blocks):
        if not tensor.tied:
            begin, done = (
                done,
                done + (prod(tensor.shape) if tensor.kind in ("linear", "expert") else 0),
            )
            ends.append((tensor.name, begin, done))
    whole = done or 1.0
    return {name: (begin / whole, end / whole) for name, begin, end in ends}


# How many positions a micro-batch computes when documents lie end to end: few different numbers,
# so that memory is reused.


_BUCKETS = 64
"""Sizes of a micro-batch at most. The padding at its end is less than this part of it, half of that
on average.
"""
_SMALLEST = 8
"""Tokens of the smallest bucket: sizes that are a multiple of it suit matrix products."""


def bucket_tokens(capacity: int) -> int:
    """Return the multiple to which the computed positions of a micro-batch of ``capacity``
    positions are rounded up.
    """
    return max(_SMALLEST, -(-capacity // _BUCKETS // _SMALLEST) * _SMALLEST)


def computed_tokens(useful: int, capacity: int, parts: int = 1) -> int:
    """Return the positions that are computed for ``useful`` tokens, in so many equal parts."""
    room = capacity // parts
    bucket = bucket_tokens(room)
    return parts * min(room, -(-useful // (parts * bucket)) * bucket)
