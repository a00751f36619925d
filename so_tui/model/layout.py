"""Where a rank's optimizer states are stored: which parameter in which sub-group, on which device, in how many bytes.

Pure functions on plain numbers. The planner and the engine that trains use the same ones. ``deepspeed_gpu_sub_groups`` repeats what
DeepSpeed decides by itself, for the modes in which its code runs.

P is a model's parameter count and n = ceil(p / ranks) the part of one parameter on one rank. A sub-group is a run of such parts that is
stepped together. All sizes are per rank unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal

from msgspec import Struct

from so_tui.model.sharding import (
    deepspeed_gpu_sub_groups,
    gpu_sub_groups,
    partition_numel,
    sub_group_slices,
)
from so_tui.spec.sections.parameters import ParameterBlock, Tensor

Device = Literal["gpu", "cpu"]
Group = Literal["decay", "no-decay"]
DeviceRule = Literal["so-tui", "deepspeed", "gpu"]
"""How many sub-groups stay on the GPU: by ``gpu_sub_groups``, by ``deepspeed_gpu_sub_groups``, or all of them."""

WEIGHT_BYTES = 2
MASTER_BYTES = 4
GRADIENT_BYTES = 4
MOMENTS_BYTES = 8


class Parameter(Struct, frozen=True):
    """A trainable parameter as the optimizer sees it; ``numel`` counts all ranks."""

    name: str
    numel: int
    decay: bool


class PlannedSubGroup(Struct, frozen=True):
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
    sub_groups: tuple[PlannedSubGroup, ...]
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
        """Parameters of this rank whose optimizer states are stored on ``device``."""
        return self.gpu_numel if device == "gpu" else self.cpu_numel


def expand(blocks: Sequence[ParameterBlock]) -> Iterator[Tensor]:
    """Yield every tensor of the model in the order of its parameter list, with ``{i}`` replaced by the layer's index."""
    for block in blocks:
        for index in range(block.first, block.first + block.repeat):
            for tensor in block.tensors:
                yield Tensor(
                    tensor.name.replace("{i}", str(index)),
                    tensor.shape,
                    tensor.decay,
                    tensor.kind,
                    tensor.tied,
                )


UnplacedSubGroup = tuple[Group, tuple[str, ...], int]
"""A sub-group before it has a device: parameter group, names, elements of one rank."""


def trainable(blocks: tuple[ParameterBlock, ...]) -> tuple[Parameter, ...]:
    """Return the parameters in the optimizer's order: those with weight decay, then those without. Tied tensors have no states."""
    own = [
        Parameter(tensor.name, prod(tensor.shape), tensor.decay)
        for tensor in expand(blocks)
        if not tensor.tied
    ]
    return tuple(
        [parameter for parameter in own if parameter.decay]
        + [parameter for parameter in own if not parameter.decay]
    )


def cut(
    parameters: Sequence[Parameter], ranks: int, sub_group_size: int
) -> tuple[UnplacedSubGroup, ...]:
    """Return the sub-groups of one rank in the optimizer's order; none spans the two parameter groups."""
    rows: list[UnplacedSubGroup] = []
    groups: tuple[tuple[Group, bool], ...] = (("decay", True), ("no-decay", False))
    for group, decay in groups:
        members = [parameter for parameter in parameters if parameter.decay == decay]
        numels = [partition_numel(parameter.numel, ranks) for parameter in members]
        for start, stop in sub_group_slices(numels, sub_group_size):
            rows.append(
                (
                    group,
                    tuple(parameter.name for parameter in members[start:stop]),
                    sum(numels[start:stop]),
                )
            )
    return tuple(rows)


def layout_of(
    parameters: Sequence[Parameter], ranks: int, sub_group_size: int, ratio: float, rule: DeviceRule
) -> StateLayout:
    """Return the layout of a parameter list in the optimizer's order; ``ModelProfile.layout`` is this for a model."""
    numels = [parameter.numel for parameter in parameters]
    return assign_devices(
        cut(parameters, ranks, sub_group_size), sum(numels), max(numels), ranks, ratio, rule
    )


def sub_groups_on_gpu(numels: Sequence[int], ratio: float, rule: DeviceRule) -> int:
    """Return how many of the first sub-groups stay on the GPU."""
    if rule == "gpu":
        return len(numels)
    return (
        deepspeed_gpu_sub_groups(len(numels), ratio)
        if rule == "deepspeed"
        else gpu_sub_groups(numels, ratio)
    )


def assign_devices(
    rows: Sequence[UnplacedSubGroup],
    parameters: int,
    largest_parameter: int,
    ranks: int,
    ratio: float,
    rule: DeviceRule,
) -> StateLayout:
    """Return the layout of sub-groups that are cut already: the first ones stay on the GPU, as ``rule`` says."""
    numels = [numel for _, _, numel in rows]
    on_gpu = sub_groups_on_gpu(numels, ratio, rule)
    return StateLayout(
        ranks=ranks,
        parameters=parameters,
        sub_groups=tuple(
            PlannedSubGroup(index, group, names, numel, "gpu" if index < on_gpu else "cpu")
            for index, (group, names, numel) in enumerate(rows)
        ),
        numel=sum(numels),
        gpu_numel=sum(numels[:on_gpu]),
        largest_sub_group=max(numels),
        largest_parameter=largest_parameter,
    )


Span = tuple[float, float]
"""Shares of a forward pass over the blocks: how much is done before the first parameter is needed, and after the last was used."""


def tensor_spans(blocks: Sequence[ParameterBlock]) -> dict[str, Span]:
    """Return when a forward pass uses each tensor, by the matrix products before it. Embeddings take no time."""
    ends: list[tuple[str, float, float]] = []
    done = 0.0
    for tensor in expand(blocks):
        if not tensor.tied:
            begin, done = (
                done,
                done + (prod(tensor.shape) if tensor.kind in ("linear", "expert") else 0),
            )
            ends.append((tensor.name, begin, done))
    whole = done or 1.0
    return {name: (begin / whole, end / whole) for name, begin, end in ends}


def device_rule(mode: str, engine: str) -> DeviceRule:
    """Return the rule of an offload mode; ``auto`` counts as ``superoffload``, which it becomes where states are offloaded."""
    if mode == "gpu":
        return "gpu"
    return "deepspeed" if mode == "zerooffload" or engine == "deepspeed" else "so-tui"
