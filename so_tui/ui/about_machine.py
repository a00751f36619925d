"""What Presets says of the machine that it plans for: what it is, what can be done there, and how good the figures are. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from so_tui.machine.described import MACHINES
from so_tui.ui.text import Content, plural

if TYPE_CHECKING:
    from so_tui.plan.types import PlanRow

MOST_PARAMETERS_WITHOUT_GPU = 1_000_000_000
"""What fits in the memory of a machine without a GPU and has more takes many minutes a step there."""
PUBLISHED = "published figures, not measured"
WIDE = 100
"""Cells from which a line also names its source."""
_WHAT = {
    "t": ("[@click=screen.train_tiny]train tiny here, now[/]", "about a minute, downloads nothing"),
    "o": ("[@click=app.other_machine]plan for another machine[/]", ""),
    "P": (
        "[@click=screen.partition]choose a Slurm partition[/]",
        "Configure plans for its nodes and submits there",
    ),
}
"""Key, command and details of what can be done on a machine without a GPU."""


def without_gpu(width: int, *, slurm: bool) -> Content:
    """Return what can be done on a machine without a GPU, such as most login nodes, a line each.

    Args:
        width: Cells of a line; details that do not fit are left out.
        slurm: Whether jobs can be submitted from here.
    """
    lines = [Content.styled("This machine has no GPU.", "bold")]
    for key, (command, details) in _WHAT.items():
        if key == "P" and not slurm:
            continue
        line = Content.assemble((f"{key}  ", "$accent"), Content.from_markup(command))
        extra = (
            details or f"{', '.join(list(MACHINES)[:3])} and others, or a file that describes one"
        )
        if line.cell_length + len(extra) + 3 <= width:
            line = Content.assemble(line, (f"   {extra}", "$faint"))
        lines.append(line)
    return Content("\n").join(lines)


def elsewhere(label: str, machine_file: str, width: int) -> Content:
    """Return for which other machine is planned and, of one that is known by name, where its figures come from.

    Args:
        label: What the machine is called.
        machine_file: Its name in ``MACHINES``, or the file that describes it.
        width: Cells of a line; a narrow one leaves the source out.
    """
    described = MACHINES.get(machine_file)
    parts = [Content.assemble("Plans for ", (label, "bold"))]
    if described is not None:
        source = f": {described.source}" if width >= WIDE else ""
        parts.append(Content.assemble(", ", (PUBLISHED, "$warning"), source))
    return Content.assemble(
        *parts, ". ", Content.from_markup("[@click=app.other_machine]o changes it[/]"), "."
    )


def trains_without_gpu(row: PlanRow) -> bool:
    """Return whether a model can be trained on the machine without a GPU that ``row`` was planned for."""
    return row.parameters <= MOST_PARAMETERS_WITHOUT_GPU and any(
        plan is not None and plan.fits for plan in row.cells.values()
    )


def folded(rows: Sequence[PlanRow]) -> Content:
    """Return one line for the models that need GPUs."""
    needs = "needs GPUs" if len(rows) == 1 else "need GPUs"
    return Content.assemble(
        f"{plural(len(rows), 'model')} {needs}: ",
        Content.from_markup("[@click=app.other_machine]o plans them for another machine[/]"),
        (", / finds one by name", "$faint"),
    )
