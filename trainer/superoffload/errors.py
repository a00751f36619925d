"""What can go wrong in the offload engine, in the user's words."""

from __future__ import annotations

from so_tui.spec.errors import SoTuiError


class OffloadError(SoTuiError):
    """The run cannot go on: the message says what happened and what to do next."""


class NonFiniteGradientError(OffloadError):
    """A gradient was not finite. ``poisoned`` tells whether weights in memory were already changed by it."""

    def __init__(self, message: str, *, step: int, sub_group: int, poisoned: bool) -> None:
        super().__init__(message)
        self.step = step
        self.sub_group = sub_group
        self.poisoned = poisoned


class WorkerLostError(OffloadError):
    """The Adam worker died or stopped making progress."""


class StateMismatchError(OffloadError):
    """A saved state does not belong to this engine: other ranks, sub-groups, parameters, ratio or DeepSpeed version."""
