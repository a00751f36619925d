"""The columns of the list of runs: their content, and which of them fit. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, get_args, get_type_hints

from rich.cells import cell_len
from rich.text import Text
from textual.coordinate import Coordinate

from so_tui.runs import results as comparison
from so_tui.runs.results import RunResults, result_text
from so_tui.settings import RunListSettings
from so_tui.trust.text import brief_message
from so_tui.ui.charts.chart import Look
from so_tui.ui.run_rows import Curves, LossCurve, RunRow
from so_tui.ui.run_status import SIGNS
from so_tui.ui.text import shorten
from so_tui.ui.textual_fixes import FittedTable
from so_tui.ui.widgets import keys
from so_tui.units import age, plural, thousands

if TYPE_CHECKING:
    from so_tui.runs import RunDirectory


Cells = dict[str, Text]
"""A row by column."""

MARK, CURVE = "", " "
"""Columns without a heading."""
WHY, LEAST_WHY = "reason", 16
"""The last column, why runs ended early. It takes what the others leave, at least so many cells,
and alone is cut.
"""
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
    WHY,
)
DISPENSABLE = ("host", "GPU memory", "MFU", WHY, "evaluation loss", "tokens/s", "model", CURVE)
"""Columns that are dropped first where there is no room; dashboard and preview show their content
too.
"""
MEASURED = ("evaluation loss", "tokens/s", "MFU", "GPU memory", WHY)
"""Columns that are left out where no run has a value: without GPUs there is no MFU, and not every
run evaluates.
"""
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
RESULT_COLUMNS = {
    "mean loss": "loss",
    "evaluation loss": "evaluation_loss",
    "tokens/s": "tokens_per_s",
    "MFU": "mfu",
    "GPU memory": "gpu_memory_bytes",
}
HIGHEST_FIRST = ("step", "tokens/s", "MFU")


def _cells_of(
    row: RunRow, curve: LossCurve | None, colours: Mapping[str, str], mark: Look | None
) -> Cells:
    """Return the cells of a run; ``colours`` are the theme's, by name. A marked run has the colour
    and the sign of its line.
    """
    state = row.state
    sign, style = SIGNS.get(row.shown_state, ("?", "$faint"))
    faint, accent = colours["faint"], colours["accent"]
    total = f" / {thousands(state.total_steps)}" if state.total_steps else ""
    results = curve.results if curve is not None else RunResults()
    numbers = {column: result_text(results, key) for column, key in RESULT_COLUMNS.items()}
    since = age(time.time() - state.started) if state.started else ""
    return {
        MARK: Text(mark.sign or "▸", style=colours[mark.role]) if mark else Text(" ", style=accent),
        "state": Text(f"{sign} {row.shown_state}", style=colours[style.removeprefix("$")]),
        "name": Text(shorten(row.run.name, 28)),
        "model": Text(shorten(row.model, 24), style=faint),
        CURVE: Text(curve.spark if curve is not None else "", style=colours["run"]),
        "step": Text(f"{thousands(state.step)}{total}", justify="right"),
        **{column: Text(number, justify="right") for column, number in numbers.items()},
        "age": Text(since, style=faint, justify="right"),
        "host": Text(shorten(state.host, 16), style=faint),
        WHY: Text("" if row.live else brief_message(state.reason), style=faint),
    }


def _heading(column: str, order: RunListSettings) -> str:
    """Return the heading of a column: ``name ▴`` where runs are sorted by it, ``▾`` where the
    highest comes first.
    """
    if not column or column != SORTED_COLUMNS[order.sort]:
        return column
    return f"{column} {'▾' if (column in HIGHEST_FIRST) != order.reverse else '▴'}"


def _fitted(
    rows: list[Cells], room: int, padding: int, order: RunListSettings
) -> tuple[list[str], list[Cells]]:
    """Return the columns that ``_with_room`` finds, and the rows: a curve that has no room whole
    has every other of its bars.
    """
    columns, left = _with_room(rows, room, padding, order)
    if CURVE not in columns:
        rows = [{**row, CURVE: Text(row[CURVE].plain[::2], style=row[CURVE].style)} for row in rows]
        columns, left = _with_room(rows, room, padding, order)
    for row in rows:
        row[WHY].truncate(LEAST_WHY + left, overflow="ellipsis")
    return columns, rows


def _with_room(
    rows: Sequence[Cells], room: int, padding: int, order: RunListSettings
) -> tuple[list[str], int]:
    """Return the columns that fit into ``room`` cells, padded on both sides, and the cells left.
    None is cut, since a cut number would be wrong. The one that they are sorted by is dropped last.
    """
    kept = SORTED_COLUMNS[order.sort]
    texts = {name: [row[name].plain for row in rows] for name in COLUMNS}
    widths = {
        name: max(map(cell_len, (_heading(name, order), *found))) + 2 * padding
        for name, found in texts.items()
        if name not in MEASURED or any(found)
    }
    if WHY in widths:
        widths[WHY] = LEAST_WHY + 2 * padding
    for name in sorted(DISPENSABLE, key=lambda name: name == kept):
        if sum(widths.values()) > room:
            widths.pop(name, None)
    return list(widths), room - sum(widths.values())


# The order of the list of runs, and its groups. Pure.


ORDERS: dict[str, tuple[str, ...]] = {
    setting: get_args(choices) for setting, choices in get_type_hints(RunListSettings).items()
}
"""The choices of each setting of the list."""


def ordered(rows: Iterable[RunRow], curves: Curves, settings: RunListSettings) -> list[RunRow]:
    """Return rows, which come newest first, sorted, and the rows of a group together. Groups come
    in the order of their first row.
    """

    def results(row: RunRow) -> RunResults | None:
        return curves[row.run].results if row.run in curves else None

    found = comparison.ordered(rows, settings.sort, _text_of, lambda row: row.state.step, results)
    if settings.reverse:
        key = comparison.result_of_order(settings.sort)
        measured = [
            key is None or getattr(results(row) or RunResults(), key) is not None for row in found
        ]
        # Runs without the figure come last in either direction, as they do already.
        known = sum(measured)
        found = [*reversed(found[:known]), *found[known:]]
    if settings.group != "none":
        first: dict[str, int] = {}
        for index, row in enumerate(found):
            first.setdefault(_text_of(row, settings.group), index)
        found.sort(key=lambda row: first[_text_of(row, settings.group)])
    return found


def _text_of(row: RunRow, key: str) -> str:
    """Return what runs are sorted or grouped by; empty for no group. A run with several tags is in
    the group of all of them.
    """
    texts = {
        "name": row.run.name,
        "model": row.model,
        "state": row.shown_state,
        "host": row.state.host,
        "tag": " ".join(row.notes.tags),
    }
    return texts.get(key, "")


def _group_heading(group: str, name: str, count: int, colours: Mapping[str, str]) -> Cells:
    """Return the cells of the row above a group."""
    heading = Text.assemble(
        (shorten(name or f"no {group}", 20), f"bold {colours['accent']}"),
        (f"  {plural(count, 'run')}", colours["faint"]),
    )
    return dict.fromkeys(COLUMNS, Text()) | {"name": heading}


# The table of Runs: a row a run, with the columns that have room.


class RunTable(FittedTable):
    """Shows runs, and knows the one under the cursor."""

    BINDINGS = keys("table-of-runs")

    shown: tuple[RunRow | None, ...] = ()
    """The runs, from above; None where a group begins."""
    columns_shown: tuple[str, ...] = ()

    def chosen(self) -> RunRow | None:
        """Return the run under the cursor; None in an empty table."""
        return self.shown[self.cursor_row] if 0 <= self.cursor_row < len(self.shown) else None

    def validate_cursor_coordinate(self, value: Coordinate) -> Coordinate:
        """Keep the cursor off the headings of groups: it moves past them."""
        value = super().validate_cursor_coordinate(value)
        step = 1 if value.row >= self.cursor_row or value.row == 0 else -1
        row = value.row
        while 0 <= row < len(self.shown) and self.shown[row] is None:
            row += step
        return Coordinate(min(row, len(self.shown) - 1) if self.shown else value.row, value.column)

    def show(
        self,
        runs: Sequence[RunRow],
        curves: Curves,
        marks: Mapping[RunDirectory, Look],
        order: RunListSettings,
        room: int,
    ) -> None:
        """Show runs in the columns that fit into ``room`` cells. The cursor stays on its run.

        Args:
            runs: The runs, in their order.
            curves: Their losses, as far as they were read.
            marks: The look of each marked run's line.
            order: How they were ordered and grouped.
            room: Cells for all columns.
        """
        chosen = self.chosen()
        colours = self.app.theme_variables
        counts = Counter(_text_of(row, order.group) for row in runs)
        shown: list[RunRow | None] = []
        cells: list[Cells] = []
        group: str | None = None
        for row in runs:
            if order.group != "none" and (name := _text_of(row, order.group)) != group:
                group = name
                shown.append(None)
                cells.append(_group_heading(order.group, name, counts[name], colours))
            shown.append(row)
            cells.append(_cells_of(row, curves.get(row.run), colours, marks.get(row.run)))
        columns, cells = _fitted(cells, room, self.cell_padding, order)
        rows = [
            (str(row.run.path) if row else f"group {number}", [own[name] for name in columns])
            for number, (row, own) in enumerate(zip(shown, cells, strict=True))
        ]
        self.columns_shown = tuple(columns)
        self.shown = ()  # while the rows are exchanged, the cursor may stand anywhere
        self.fill([_heading(name, order).strip() for name in columns], rows)
        self.shown = tuple(shown)
        key = str(chosen.run.path) if chosen is not None else ""
        self.move_cursor(row=self.get_row_index(key) if key in self.rows else 0)
