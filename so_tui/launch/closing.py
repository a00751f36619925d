"""When the processes of an attempt are told to go, and when they are made to. Pure: every moment is passed in (seconds, monotonic)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Step = Literal["wait", "terminate", "kill"]

EXIT_GRACE_S = 60.0
"""From the trainer's end record until all its processes have to be gone: pinned hundreds of GB take a while to be given back."""
KILL_AFTER_S = 5.0
"""From TERM to KILL. DeepSpeed's launcher alone would wait up to 30 s for each rank."""


@dataclass
class Closing:
    """Remembers since when there is a reason to end, and what was already done about it."""

    ended_at: float | None = None
    """The trainer has written its end record."""
    broken_at: float | None = None
    """The runner or the launcher has vanished without it, or the launcher gives up because a rank failed."""
    overdue_at: float | None = None
    """When an accepted stop has to be carried out at the latest."""
    terminated_at: float | None = None

    def step(self, now: float) -> Step:
        """What to do now; the caller does it."""
        if self.terminated_at is not None:
            return "kill" if now >= self.terminated_at + KILL_AFTER_S else "wait"
        if self._due(now):
            self.terminated_at = now
            return "terminate"
        return "wait"

    def stop_overdue(self, now: float) -> bool:
        return self.ended_at is None and self.overdue_at is not None and now >= self.overdue_at

    def _due(self, now: float) -> bool:
        if self.ended_at is not None:
            return now >= self.ended_at + EXIT_GRACE_S
        return self.broken_at is not None or self.stop_overdue(now)
