"""Which parameter lies in which sub-group, on which device, in how many bytes.

The one arithmetic of the project: the planner reads it, and the trainer's own engine cuts its states by it. Pure functions on plain
numbers. What DeepSpeed does by itself (``deepspeed_gpu_sub_groups``) stands beside it for the modes in which DeepSpeed's code runs.

Words: P is a model's parameter count, n = ceil(p / ranks) a parameter's share on one rank, a sub-group a run of such shares that is
stepped together. All sizes below are per rank unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Literal

from msgspec import Struct

from so_tui.model.sharding import deepspeed_gpu_sub_groups, gpu_sub_groups, partition_numel, sub_group_slices
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.types import ParameterBlock, RunSpec, Tensor

Device = Literal["gpu", "cpu"]
Group = Literal["decay", "no-decay"]
DeviceRule = Literal["so-tui", "deepspeed", "gpu"]
"""Who decides how many sub-groups stay on the GPU: ``gpu_sub_groups``, ``deepspeed_gpu_sub_groups``, or nobody: all stay."""

WEIGHT_BYTES = 2
MASTER_BYTES = 4
GRADIENT_BYTES = 4
MOMENTS_BYTES = 8


class Parameter(Struct, frozen=True):
    """A trainable parameter as the optimizer sees it; ``numel`` counts all ranks."""

    name: str
    numel: int
    decay: bool


class SubGroup(Struct, frozen=True):
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
    sub_groups: tuple[SubGroup, ...]
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
    def gpu_sub_groups(self) -> int:
        return sum(sub_group.device == "gpu" for sub_group in self.sub_groups)

    @property
    def weights_bytes(self) -> int:
        """bf16 weights, always on the GPU."""
        return WEIGHT_BYTES * self.numel

    def master_weights_bytes(self, device: Device) -> int:
        """fp32 weights."""
        return MASTER_BYTES * self.on(device)

    def gradients_bytes(self, device: Device) -> int:
        """fp32 gradients."""
        return GRADIENT_BYTES * self.on(device)

    def moments_bytes(self, device: Device) -> int:
        """Both fp32 moments of Adam."""
        return MOMENTS_BYTES * self.on(device)

    def on(self, device: Device) -> int:
        """Parameters of this rank whose optimizer states lie on ``device``."""
        return self.gpu_numel if device == "gpu" else self.cpu_numel


def expand(blocks: Sequence[ParameterBlock]) -> Iterator[Tensor]:
    """The run-length table written out: every tensor of the model in the order of its parameter list, ``{i}`` replaced."""
    for block in blocks:
        for index in range(block.first, block.first + block.repeat):
            for tensor in block.tensors:
                yield Tensor(tensor.name.replace("{i}", str(index)), tensor.shape, tensor.decay, tensor.kind, tensor.tied)


Row = tuple[Group, tuple[str, ...], int]
"""A sub-group before it has a place: parameter group, names, elements of one rank."""


@lru_cache(maxsize=64)
def trainable(blocks: tuple[ParameterBlock, ...]) -> tuple[Parameter, ...]:
    """What the optimizer gets, in its order: the group with weight decay, then the one without. Tied tensors have no states."""
    own = [Parameter(tensor.name, prod(tensor.shape), tensor.decay) for tensor in expand(blocks) if not tensor.tied]
    return tuple([parameter for parameter in own if parameter.decay] + [parameter for parameter in own if not parameter.decay])


def cut(parameters: Sequence[Parameter], ranks: int, sub_group_size: int) -> tuple[Row, ...]:
    """The sub-groups of one rank, in the optimizer's order; none spans the two parameter groups."""
    rows: list[Row] = []
    groups: tuple[tuple[Group, bool], ...] = (("decay", True), ("no-decay", False))
    for group, decay in groups:
        members = [parameter for parameter in parameters if parameter.decay == decay]
        numels = [partition_numel(parameter.numel, ranks) for parameter in members]
        for start, stop in sub_group_slices(numels, sub_group_size):
            rows.append((group, tuple(parameter.name for parameter in members[start:stop]), sum(numels[start:stop])))
    return tuple(rows)


@lru_cache(maxsize=256)
def _cut_table(blocks: tuple[ParameterBlock, ...], ranks: int, sub_group_size: int) -> tuple[Row, ...]:
    return cut(trainable(blocks), ranks, sub_group_size)


def layout_of(parameters: Sequence[Parameter], ranks: int, sub_group_size: int, ratio: float, rule: DeviceRule) -> StateLayout:
    """The layout of any parameter list in the optimizer's order; ``state_layout`` is this for a spec."""
    return _place(cut(parameters, ranks, sub_group_size), _sizes(parameters), ranks, ratio, rule)


def _sizes(parameters: Sequence[Parameter]) -> tuple[int, int]:
    """Elements of all parameters, and of the largest."""
    return sum(parameter.numel for parameter in parameters), max(parameter.numel for parameter in parameters)


def _kept(numels: Sequence[int], ratio: float, rule: DeviceRule) -> int:
    """How many of the first sub-groups stay on the GPU."""
    if rule == "gpu":
        return len(numels)
    return deepspeed_gpu_sub_groups(len(numels), ratio) if rule == "deepspeed" else gpu_sub_groups(numels, ratio)


def _place(rows: Sequence[Row], sizes: tuple[int, int], ranks: int, ratio: float, rule: DeviceRule) -> StateLayout:
    numels = [numel for _, _, numel in rows]
    kept = _kept(numels, ratio, rule)
    parameters, largest = sizes
    return StateLayout(
        ranks=ranks,
        parameters=parameters,
        sub_groups=tuple(
            SubGroup(index, group, names, numel, "gpu" if index < kept else "cpu") for index, (group, names, numel) in enumerate(rows)
        ),
        numel=sum(numels),
        gpu_numel=sum(numels[:kept]),
        largest_sub_group=max(numels),
        largest_parameter=largest,
    )


@lru_cache(maxsize=64)
def _table_sizes(blocks: tuple[ParameterBlock, ...]) -> tuple[int, int]:
    return _sizes(trainable(blocks))


@lru_cache(maxsize=2048)
def _table_layout(blocks: tuple[ParameterBlock, ...], ranks: int, sub_group_size: int, ratio: float, rule: DeviceRule) -> StateLayout:
    # Keyed on the run-length table, which is short: the planner asks for some hundred layouts of models with thousands of tensors.
    return _place(_cut_table(blocks, ranks, sub_group_size), _table_sizes(blocks), ranks, ratio, rule)


Span = tuple[float, float]
"""Shares of a forward pass over the blocks: what of it is done before the first parameter is needed, and after the last was used."""


def compute_spans(spec: RunSpec, ranks: int) -> tuple[Span, ...]:
    """When a forward pass uses each sub-group, by the matrix products of the parameters in the model's order. Embeddings take no time."""
    return _compute_spans(spec.model.parameters, ranks, spec.offload.sub_group_size)


@lru_cache(maxsize=256)
def _compute_spans(blocks: tuple[ParameterBlock, ...], ranks: int, sub_group_size: int) -> tuple[Span, ...]:
    spans = _tensor_spans(blocks)
    # Names are in the model's order.
    return tuple((spans[names[0]][0], spans[names[-1]][1]) for _, names, _ in _cut_table(blocks, ranks, sub_group_size))


@lru_cache(maxsize=64)
def _tensor_spans(blocks: tuple[ParameterBlock, ...]) -> dict[str, Span]:
    ends: list[tuple[str, float, float]] = []
    done = 0.0
    for tensor in expand(blocks):
        if not tensor.tied:
            begin, done = done, done + (prod(tensor.shape) if tensor.kind in ("linear", "expert") else 0)
            ends.append((tensor.name, begin, done))
    whole = done or 1.0
    return {name: (begin / whole, end / whole) for name, begin, end in ends}


def device_rule(mode: str, engine: str) -> DeviceRule:
    """Whose rule decides in this offload mode; ``auto`` counts as ``superoffload``, which is what it becomes where states are offloaded."""
    if mode == "gpu":
        return "gpu"
    return "deepspeed" if mode == "zerooffload" or engine == "deepspeed" else "so-tui"


def state_layout(spec: RunSpec, ranks: int) -> StateLayout:
    """The model states of each of ``ranks`` ranks under ``spec``. Raises InputError when the spec has no parameter table."""
    if not spec.model.parameters:
        raise InputError(
            [
                Problem(
                    field="model.parameters",
                    value="",
                    message="the ordered parameter list of this model is not known",
                    remedy="`python -m so_tui_trainer.tools.presets FILE` writes it from `[model.config]`; built-in presets have it",
                )
            ]
        )
    rule = device_rule(spec.offload.mode, spec.offload.engine)
    return _table_layout(spec.model.parameters, ranks, spec.offload.sub_group_size, spec.offload.ratio, rule)


def gpu_numel(spec: RunSpec, layout: StateLayout, ratio: float) -> int:
    """``gpu_numel`` of the layout of the same spec at another ratio, which cuts the same sub-groups."""
    numels = [group.numel for group in layout.sub_groups]
    return sum(numels[: _kept(numels, ratio, device_rule(spec.offload.mode, spec.offload.engine))])
