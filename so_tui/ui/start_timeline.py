"""From the confirmation to the first step: what a run does meanwhile, and how long each part takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from so_tui.runs.records import PhaseRecord
from so_tui.ui.text import Content, brief_message, duration, shorten
from so_tui.units import thousands

CHECKS = "checks"
LAUNCHER = "launcher"
FIRST_STEP = "first step"
NAMES = {"checkpoint": "saved states"}
"""Names of stages that are not called by their code."""
BAR = 24
NAME_CELLS = 44
LEAST_NAME_CELLS = 12
FIGURE_CELLS = 13
"""What the sign and the seconds take."""
MOST_ROWS = 9


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the way to the first step; ``detail`` is what it does just now."""

    name: str
    seconds: float
    running: bool = False
    detail: str = ""


def stages(
    phases: Sequence[PhaseRecord],
    attempt: int,
    started: float,
    now: float,
    checks_s: float | None = None,
) -> tuple[Stage, ...]:
    """Return the stages of an attempt that has done no step yet, up to ``now``; the last one is running.

    Clocks of hosts differ: none takes less than no time.

    Args:
        phases: What the trainer announced, in order. Records of one stage that follow each other are one row.
        attempt: The attempt.
        started: When its processes were started.
        now: The present time.
        checks_s: Duration of the checks before ``started``; None if there were none.
    """
    begun = [(LAUNCHER, "", started)]
    code = ""
    for phase in phases:
        if phase.attempt != attempt:
            continue
        since = phase.time
        if phase.stage and phase.stage == code:
            since = begun.pop()[2]
        code = phase.stage
        begun.append((_name(phase), phase.detail if phase.stage else "", since))
    ends = [*(since for _, _, since in begun[1:]), now]
    last = len(begun) - 1
    found = (
        Stage(name, max(0.0, end - since), index == last, detail if index == last else "")
        for index, ((name, detail, since), end) in enumerate(zip(begun, ends, strict=True))
    )
    return (*(() if checks_s is None else (Stage(CHECKS, checks_s),)), *found)


def _name(phase: PhaseRecord) -> str:
    """Return ``weights 3 of 8``; what records of older versions say of themselves stands for their stage."""
    if phase.phase == "training":
        return FIRST_STEP
    counted = f" {thousands(phase.done)} of {thousands(phase.total)}" if phase.total else ""
    return (
        f"{NAMES.get(phase.stage, phase.stage)}{counted}"
        if phase.stage
        else phase.detail or phase.phase
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
        left = name_cells - cell_len(name) - 2
        detail = (
            f"  {shorten(brief_message(stage.detail), left)}"
            if stage.detail and left >= LEAST_NAME_CELLS
            else ""
        )
        gap = " " * (name_cells - cell_len(name + detail))
        figure = f"{duration(stage.seconds):>9}  "
        rows.append(
            Content.assemble(
                (f"{sign} ", style), name, (detail, "$faint"), gap, figure, (bar, style)
            )
        )
        before += stage.seconds
    return Content("\n").join(rows[-MOST_ROWS:])
