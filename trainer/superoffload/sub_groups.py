"""What the optimizer steps at once, and the gradients that come for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from superoffload.errors import OffloadError


@dataclass(frozen=True)
class SubGroup:
    """Parameters that are stepped together: this rank's share of them, flat."""

    weights: torch.Tensor
    parameter_group: int
    """Index into the optimizer's parameter groups, whose learning rate and weight decay apply."""
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    """Where each parameter begins."""
    on_gpu: bool
    first_use: int = 0
    """When a forward pass first wants its weights: the place of its earliest parameter in the model's order."""

    def span(self, member: int) -> tuple[int, int]:
        """Where a parameter begins and ends, padding included."""
        bounds = (*self.offsets, self.weights.numel())
        return bounds[member], bounds[member + 1]


@dataclass(frozen=True)
class Gradient:
    """The reduced gradient of one parameter: this rank's share, without padding, in memory that is not used for anything else later."""

    sub_group: int
    member: int
    values: torch.Tensor


def check_types(sub_groups: Sequence[SubGroup]) -> None:
    """Raises OffloadError unless all weights are bf16, or all fp32: what the Adam kernel can read and write."""
    found = sorted({str(group.weights.dtype).removeprefix("torch.") for group in sub_groups})
    if found not in (["bfloat16"], ["float32"]):
        raise OffloadError(f"SuperOffload trains weights in bfloat16, or all in float32, but these are in {' and '.join(found)}.")
