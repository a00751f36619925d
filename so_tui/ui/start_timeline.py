"""From the launch to the first step: what a run does meanwhile, and how long each part takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from so_tui.runs.records import PhaseRecord
from so_tui.ui.text import Content, brief_message, duration, shorten

LAUNCH = "starting the processes"
FIRST_STEP = "first step"
BAR = 24
NAME_CELLS = 44
LEAST_NAME_CELLS = 12
FIGURE_CELLS = 13
"""What the sign and the seconds take."""
MOST_ROWS = 9


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the way to the first step."""

    name: str
    seconds: float
    running: bool = False


def stages(phases: Sequence[PhaseRecord], attempt: int, started: float, now: float) -> tuple[Stage, ...]:
    """Return the stages of an attempt that has done no step yet, up to ``now``; the last one is running.

    Clocks of hosts differ: none takes less than no time.
    """
    own = [phase for phase in phases if phase.attempt == attempt]
    named = [(FIRST_STEP if phase.phase == "training" else phase.detail or phase.phase, phase.time) for phase in own]
    begun = [(LAUNCH, started), *named]
    ends = [*(time for _, time in begun[1:]), now]
    last = len(begun) - 1
    return tuple(
        Stage(name, max(0.0, end - time), running=index == last) for index, ((name, time), end) in enumerate(zip(begun, ends, strict=True))
    )


def timeline_lines(found: Sequence[Stage], width: int) -> Content:
    """Return one row a stage: its sign, name, seconds, and a bar that begins where the stage before it ended. The newest rows stay."""
    total = sum(stage.seconds for stage in found) or 1.0
    room = min(BAR, max(4, width - LEAST_NAME_CELLS - FIGURE_CELLS))
    name_cells = min(NAME_CELLS, max(4, width - room - FIGURE_CELLS))
    rows = []
    before = 0.0
    for stage in found:
        first = int(before / total * room)
        cells = max(1, round(stage.seconds / total * room))
        first = min(first, room - 1)
        bar = " " * first + "━" * min(cells, room - first)
        sign, style = ("▸", "$accent") if stage.running else ("✓", "$success")
        name = shorten(brief_message(stage.name), name_cells)
        rows.append(Content.assemble((f"{sign} ", style), f"{name:<{name_cells}}", (f"{duration(stage.seconds):>9}  ", ""), (bar, style)))
        before += stage.seconds
    return Content("\n").join(rows[-MOST_ROWS:])
