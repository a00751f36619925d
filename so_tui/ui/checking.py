"""A launch that is being checked, as the dashboard shows it until its run exists."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from so_tui.ui.text import Content

if TYPE_CHECKING:
    from so_tui.launch.checks import Check


@dataclass(frozen=True, slots=True)
class Checking:
    """A launch that has been confirmed, and has no run directory yet."""

    label: str
    since: float
    """Monotonic seconds."""
    asked_on: str
    """The screen on which it was confirmed."""
    begun: tuple[tuple[Check, float], ...] = ()
    """Its checks so far, each with its monotonic time."""

    def come_to(self, check: Check, since: float) -> Checking:
        """Return it with one more check, which began at this monotonic time."""
        return replace(self, begun=(*self.begun, (check, since)))

    def lines(self, width: int) -> Content:
        """Return what is launched and how long each of its checks has taken, in ``width`` cells."""
        from so_tui.launch.checks import CHECKS as NAMES  # not needed for the first paint
        from so_tui.ui.start_timeline import CHECKS, Stage, timeline_lines

        names = [f"{CHECKS}: {NAMES[check]}" for check, _ in self.begun] or [CHECKS]
        starts = [since for _, since in self.begun] or [self.since]
        ends = [*starts[1:], time.monotonic()]
        last = len(names) - 1
        stages = [
            Stage(name, max(0.0, end - start), index == last)
            for index, (name, start, end) in enumerate(zip(names, starts, ends, strict=True))
        ]
        return Content.assemble((self.label, "bold"), "\n\n", timeline_lines(stages, width))
