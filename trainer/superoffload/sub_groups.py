"""Sub-groups: parameters that are stepped together, the gradients that arrive for them, and their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from superoffload.errors import OffloadError


@dataclass(frozen=True)
class SubGroup:
    """This rank's shards of the parameters that are stepped together, in one flat tensor."""

    weights: torch.Tensor
    """What the model computes with: bf16 or fp32, padding included. On the GPU, or in host memory (``host_weights``)."""
    parameter_group: int
    """Index of the optimizer's parameter group, whose learning rate and weight decay apply."""
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    """First element of each parameter's shard."""
    on_gpu: bool
    """Whether the optimizer states are on the GPU."""
    places: tuple[int, ...] = ()
    """Where each shard begins in the whole parameter; empty if all begin with it."""
    first_use: int = 0
    """When a forward pass first needs the weights: the position of the earliest parameter in the model's order."""

    def span(self, member: int) -> tuple[int, int]:
        """Return the first element of a parameter's shard and the one after its last, padding included."""
        bounds = (*self.offsets, self.weights.numel())
        return bounds[member], bounds[member + 1]


@dataclass(frozen=True)
class Gradient:
    """The reduced gradient of this rank's shard of one parameter."""

    sub_group: int
    member: int
    """Position of the parameter in the sub-group."""
    values: torch.Tensor
    """Without padding, in memory that nothing else will be written to."""


@dataclass(frozen=True)
class SubGroupState:
    """The optimizer state of one sub-group of one rank: flat tensors of equal length, padding included.

    All but ``weights`` are fp32. ``set_moments`` takes what ``moments`` returned, or tensors of the same form.
    """

    device: str
    """``gpu`` or ``cpu``; where DeepSpeed offloads nothing, the type of the torch device."""
    weights: torch.Tensor
    """What the model computes with (bf16, on the GPU or in host memory): a cast of ``master_weights``."""
    master_weights: torch.Tensor
    moments: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None
    """Returns the first and second moment: the state itself, or copies of compact moments. None where they are out of reach, in the process
    of DeepSpeed's own SuperOffload worker."""
    set_moments: Callable[[torch.Tensor, torch.Tensor], None]
    step: int
    set_step: Callable[[int], None]


def check_dtypes(sub_groups: Sequence[SubGroup]) -> None:
    """Raise OffloadError (``dtype``) unless all weights are bf16 or all are fp32, which the Adam kernel can read and write."""
    found = sorted({str(group.weights.dtype).removeprefix("torch.") for group in sub_groups})
    if found not in (["bfloat16"], ["float32"]):
        raise OffloadError(
            f"SuperOffload trains models whose weights are all bfloat16 or all float32. These are {' and '.join(found)}.",
            code="dtype",
        )
