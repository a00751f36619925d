"""A copy of a sub-group's states, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Master weights, first and second moment, in fp32."""


@dataclass(frozen=True)
class StatesCopy:
    """The states of one sub-group as they were when the copy was ordered. Both functions may be called from any thread."""

    tensors: Callable[[], Tensors]
    """Waits until the copy is complete, and returns it."""
    release: Callable[[], None]
    """Gives the copy's memory back; its tensors must no longer be used."""
