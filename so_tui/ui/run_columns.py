"""The columns of the list of runs: their content, and which of them fit. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from so_tui.runs.comparison import result_text
from so_tui.runs.results import RunResults
from so_tui.ui.line_looks import Look
from so_tui.ui.loss_curve import LossCurve
from so_tui.ui.runlist import RunRow
from so_tui.ui.text import age, memory, shorten
from so_tui.ui.widgets.run_lines import SIGNS
from so_tui.units import thousands

Cells = dict[str, Text]
"""A row by column."""

MARK, CURVE = "", " "
"""Columns without a heading."""
COLUMNS = (
    MARK,
    "state",
    "name",
    "model",
    "step",
    "mean loss",
    "evaluation loss",
    CURVE,
    "tokens/s",
    "MFU",
    "GPU memory",
    "age",
    "host",
)
DISPENSABLE = ("host", "GPU memory", "MFU", "evaluation loss", "tokens/s", "model", CURVE)
"""Columns that are dropped first where there is no room; dashboard and preview show their content too."""
MEASURED = ("evaluation loss", "tokens/s", "MFU", "GPU memory")
"""Columns that are left out where no run has a value: without GPUs there is no MFU, and not every run evaluates."""
SORTED_COLUMNS = {
    "started": "age",
    "name": "name",
    "model": "model",
    "state": "state",
    "host": "host",
    "step": "step",
    "loss": "mean loss",
    "evaluation": "evaluation loss",
    "tokens/s": "tokens/s",
    "mfu": "MFU",
    "memory": "GPU memory",
}
"""Columns by the order that goes by them."""
HIGHEST_FIRST = ("step", "tokens/s", "MFU")


def cells_of(
    row: RunRow, curve: LossCurve | None, colours: Mapping[str, str], *, mark: Look | None = None
) -> Cells:
    """Return the cells of a run; ``colours`` are the theme's, by name. A marked run has the colour and the sign of its line."""
    state = row.state
    sign, style = SIGNS.get(row.shown_state, ("?", "$faint"))
    faint = colours["faint"]
    step = (
        f"{thousands(state.step)} / {thousands(state.total_steps)}"
        if state.total_steps
        else thousands(state.step)
    )
    results = curve.results if curve is not None else RunResults()
    return {
        MARK: Text(
            (mark.sign or "▸") if mark else " ", style=colours[mark.role if mark else "accent"]
        ),
        "state": Text(f"{sign} {row.shown_state}", style=colours[style.removeprefix("$")]),
        "name": Text(shorten(row.run.name, 28)),
        "model": Text(shorten(model_of(row), 24), style=faint),
        "step": Text(step, justify="right"),
        "mean loss": Text(result_text(results, "loss"), justify="right"),
        "evaluation loss": Text(result_text(results, "evaluation_loss"), justify="right"),
        CURVE: Text(curve.spark if curve is not None else "", style=colours["accent"]),
        "tokens/s": Text(result_text(results, "tokens_per_s"), justify="right"),
        "MFU": Text(result_text(results, "mfu"), justify="right"),
        "GPU memory": Text(
            "" if results.gpu_memory_bytes is None else memory(results.gpu_memory_bytes),
            justify="right",
        ),
        "age": Text(
            age(time.time() - state.started) if state.started else "", style=faint, justify="right"
        ),
        "host": Text(shorten(state.host, 16), style=faint),
    }


def model_of(row: RunRow) -> str:
    """Return the model's label; ``?`` for a run whose settings cannot be read."""
    return row.spec.label if row.spec is not None else "?"


def heading(column: str, sorted_column: str = "") -> str:
    """Return the heading of a column: ``name ▴`` where runs are sorted by it, ``▾`` where the highest comes first."""
    return (
        f"{column} {'▾' if column in HIGHEST_FIRST else '▴'}"
        if column and column == sorted_column
        else column
    )


def fitted(
    rows: Sequence[Cells], room: int, padding: int, kept: str = ""
) -> tuple[list[str], Sequence[Cells]]:
    """Return the columns that ``with_room`` finds, and the rows: a curve that has no room whole has every other of its bars."""
    columns = with_room(rows, room, padding, kept)
    if CURVE not in columns:
        rows = [{**row, CURVE: Text(row[CURVE].plain[::2], style=row[CURVE].style)} for row in rows]
        columns = with_room(rows, room, padding, kept)
    return columns, rows


def with_room(rows: Sequence[Cells], room: int, padding: int, kept: str = "") -> list[str]:
    """Return the columns that fit into ``room`` cells, padded on both sides. None is cut, since a cut number is another number.

    ``kept``, which they are sorted by, is dropped last.
    """
    widths = {
        name: max(map(cell_len, (heading(name, kept), *(row[name].plain for row in rows))))
        + 2 * padding
        for name in COLUMNS
    }
    columns = [
        name for name in COLUMNS if name not in MEASURED or any(row[name].plain for row in rows)
    ]
    for name in sorted(
        set(DISPENSABLE).intersection(columns),
        key=lambda name: (name == kept, DISPENSABLE.index(name)),
    ):
        if sum(widths[column] for column in columns) > room:
            columns.remove(name)
    return columns
