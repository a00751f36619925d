"""The table of Presets: a row a model, a column a number of GPUs, a cell the plan for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding, BindingType

from so_tui.ui.text import count, plural, rate, shorten
from so_tui.ui.widgets.fitted_table import FittedTable
from so_tui.ui.widgets.plan_view import SIGNS, STYLES
from so_tui.units import thousands

if TYPE_CHECKING:
    from so_tui.plan.types import Plan, PlanRow

WIDE, SPACIOUS = 112, 132
"""Columns of a terminal from which on cells hold words, and rows more about their model."""


class PresetTable(FittedTable):
    """Shows plans, and knows the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "enter",
            "select_cursor",
            "Configure",
            id="open",
            tooltip="Change its settings before it runs",
        )
    ]

    _shown: tuple[PlanRow, ...] = ()
    _counts: tuple[int, ...] = ()
    """Numbers of GPUs."""
    _fixed = 2
    """Columns before those of the numbers of GPUs."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "select_cursor" or self.row_count > 0

    def show(self, rows: Sequence[PlanRow], counts: tuple[int, ...], noun: str) -> None:
        """Show the plans of ``rows`` for each of ``counts`` GPUs, or ranks, as ``noun`` says. The cursor stays on its plan."""
        at = self.cursor_coordinate
        preset, count_at = self.preset_at(at.row), at.column - self._fixed
        self._shown, self._counts = tuple(rows), counts
        wide, spacious = self.screen.size.width >= WIDE, self.screen.size.width >= SPACIOUS
        titles = ("model", "size", *(["tokens"] if spacious else []))
        self._fixed = len(titles)
        columns = ["    " + plural(ranks, noun) for ranks in counts]
        plans = [plan for row in rows for plan in row.cells.values() if plan.fits]
        room = max([7 if wide else 5, *(cell_len(_speed(plan, wide=wide)) for plan in plans)])
        filled = []
        for row in rows:
            cells = [self._cell(row.cells.get(ranks), room, wide=wide) for ranks in counts]
            longest = (
                36
                if spacious or (wide and len(counts) < 3)
                else 24
                if wide or len(counts) < 3
                else 16
            )
            filled.append((row.preset, [*self._model(row, longest, spacious=spacious), *cells]))
        self.fill([*titles, *columns], filled, dict.fromkeys(columns, 22 if wide else 14))
        column = self._fixed + count_at if count_at >= 0 else at.column
        self.move_cursor(
            row=self.get_row_index(preset) if preset in self.rows else at.row, column=column
        )

    def _model(self, row: PlanRow, longest: int, *, spacious: bool) -> list[Text]:
        """Return the cells about a model, whose name takes at most ``longest``."""
        size = count(row.parameters, 1)
        if row.active_parameters < row.parameters:
            size += f" MoE, {count(row.active_parameters, 1)} active" if spacious else " MoE"
        cells = [Text(shorten(row.title, longest)), Text(size, style=self._colour("$faint"))]
        return (
            [*cells, Text(thousands(row.sequence_length), justify="right")] if spacious else cells
        )

    def _cell(self, plan: Plan | None, room: int, *, wide: bool) -> Text:
        """Return ``★ ✓ ratio 0.35  13.9k/s`` (narrow: ``★ ✓ 0.35 13.9k``; ``none``: no offload), or ``✗ too big``.

        Speeds take ``room`` cells.
        """
        if plan is None:
            return Text("-")
        text = Text("★ " if plan.recommended else "  ", style=self._colour("$accent"))
        text.append(f"{SIGNS[plan.verdict]} ", self._colour(STYLES[plan.verdict]))
        if plan.verdict == "does not fit":
            return text.append("too big", self._colour("$faint"))
        offloads = plan.mode != "gpu"
        if wide:
            state = "tight" if plan.verdict == "tight" else "ratio"
            how = f"{f'{state} {plan.ratio:.2f}' if offloads else 'no offload':<10}"
        else:
            how = f"{plan.ratio:.2f}" if offloads else "none"
        text.append(how, self._colour("$foreground"))
        return text.append(f" {_speed(plan, wide=wide):>{room}}", self._colour("$faint"))

    def _colour(self, variable: str) -> str:
        return self.app.theme_variables[variable.removeprefix("$")]

    # The cursor.

    def preset_at(self, row: int) -> str:
        """Return the preset in a row; empty where there is none."""
        return self.ordered_rows[row].key.value or "" if 0 <= row < self.row_count else ""

    def chosen(self) -> tuple[PlanRow, Plan] | None:
        """Return the row under the cursor and its plan: the column's, or the recommended one where the cursor is on the model."""
        at = self.cursor_coordinate
        if at.row >= self.row_count:
            return None
        row = self._shown[at.row]
        if at.column >= self._fixed:
            plan = row.cells.get(self._counts[at.column - self._fixed])
        else:
            plan = next((plan for plan in row.cells.values() if plan.recommended), None) or next(
                iter(row.cells.values()), None
            )
        return (row, plan) if plan is not None else None

    def select(self, preset: str) -> None:
        """Put the cursor on the recommended plan of a preset."""
        row = next(row for row in self._shown if row.preset == preset)
        best = next(
            (
                column
                for column, ranks in enumerate(self._counts)
                if (plan := row.cells.get(ranks)) and plan.recommended
            ),
            0,
        )
        self.move_cursor(row=self.get_row_index(preset), column=self._fixed + best, scroll=True)

    def start_where_it_fits(self, *, on_gpus: bool) -> None:
        """Put the cursor on the first recommended plan that fits, or on the last row, that of tiny, where none does or no GPU trains it."""
        for row_index, row in enumerate(self._shown if on_gpus else ()):
            for column, ranks in enumerate(self._counts):
                plan = row.cells.get(ranks)
                if plan is not None and plan.recommended and plan.fits:
                    self.move_cursor(row=row_index, column=self._fixed + column)
                    return
        self.move_cursor(row=max(0, len(self._shown) - 1), column=self._fixed)


def _speed(plan: Plan, *, wide: bool) -> str:
    """Return ``13.9k/s``, or ``13.9k`` where there is little room; empty where no speed is predicted."""
    speed = plan.useful_tokens_per_s_total
    return f"{rate(speed)}{'/s' if wide else ''}" if speed else ""
