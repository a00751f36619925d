"""The table of Presets: a row for each model, a column for each number of GPUs, and in each cell a
plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.text import Text
from textual import on
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from so_tui.ui.plan_view import SIGNS, STYLES
from so_tui.ui.text import Content, in_rows, shorten, wrapped
from so_tui.ui.textual_fixes import FittedTable
from so_tui.ui.widgets import keys
from so_tui.units import count, memory_unit, plural, rate, thousands

if TYPE_CHECKING:
    from so_tui.plan.plan import Plan, PlanRow


_NAMES = 36, 24, 16, 12
"""Cells that a model's name takes at most: as many as there is room for."""

Cells = Literal["words", "short", "tight"]
"""How much a cell says: ``★⇡ ✓ ratio 0.35 13.9k/s``, ``★⇡✓ 0.35* 13.9k`` or ``★⇡✓ 13.9k``."""


@dataclass(frozen=True, slots=True)
class _Look:
    """How much of the table there is room for."""

    cells: Cells
    facts: int
    """Columns about the model: its name, its size, its tokens."""
    name: int
    """Cells of the longest name."""


def _looks() -> Iterator[_Look]:
    """Yield how the table may look, the best first. Names are shortened first, and then columns
    about the model are left out; figures are never cut.
    """
    kinds: tuple[tuple[Cells, int, tuple[int, ...]], ...] = (
        ("words", 3, _NAMES[:2]),
        ("words", 2, _NAMES[:2]),
        ("short", 2, _NAMES[:3]),
        ("short", 1, _NAMES[:3]),
        ("tight", 1, _NAMES),
    )
    for cells, facts, names in kinds:
        for name in names:
            yield _Look(cells, facts, name)


class PresetTable(FittedTable):
    """Shows plans, and knows the one under the cursor."""

    BINDINGS = keys("table-of-presets")

    _shown: Sequence[PlanRow] = ()
    _counts: tuple[int, ...] = ()
    """Numbers of GPUs that are shown."""
    _all_counts: tuple[int, ...] = ()
    _first = 0
    """The first of them that is shown."""
    _noun = "GPU"
    _fixed = 2
    """Columns before those of the numbers of GPUs."""
    room = 80
    """Cells for all columns."""
    cells = 0
    """Cells that they take."""
    _said: Cells = "words"
    """How much the cells say."""
    _underlined: tuple[Coordinate, Text] | None = None
    """The cell that is underlined, and what it is otherwise."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "select_cursor" or self.row_count > 0

    def show(self, rows: Sequence[PlanRow], counts: tuple[int, ...], noun: str) -> None:
        """Show the plans of ``rows`` for each of ``counts`` GPUs, or ranks, as ``noun`` says. The
        cursor stays on its plan.
        """
        at, before = self.cursor_coordinate, self.chosen()
        # On the model, the cursor stays there.
        gpus = self._counts[at.column - self._fixed] if before and at.column >= self._fixed else 0
        self._shown, self._all_counts, self._noun = rows, counts, noun
        if gpus not in counts or gpus not in self._fill(min(self._first, len(counts) - 1)):
            self._fill(counts.index(gpus) if gpus in counts else 0)
        column = self._fixed + self._counts.index(gpus) if gpus in self._counts else at.column
        preset = before[0].preset if before is not None else ""
        line = self.get_row_index(preset) if preset in self.rows else at.row
        self.move_cursor(row=line, column=column)
        self._underline_chosen()  # also where the cursor did not move

    def _fill(self, first: int) -> tuple[int, ...]:
        """Show as many numbers of GPUs as there is room for, from one of them on, and return
        them.
        """
        for look in _looks():
            columns = self._columns(look, self._all_counts)
            if (left := self.room - self._width(columns)) >= 0:
                # Names have what is left.
                longest = max((name.cell_len for name in columns[0][1]), default=0)
                wider = replace(look, name=min(_NAMES[0], longest + left))
                columns = self._columns(wider, self._all_counts)
                break
        self._said = look.cells
        widths = [self._width(columns[: look.facts])]
        widths += [self._width([column]) for column in columns[look.facts :]]
        most = len(self._all_counts)
        while first and widths[0] + sum(widths[first : 1 + most]) <= self.room:
            first -= 1  # no column is left empty
        while most > first + 1 and widths[0] + sum(widths[1 + first : 1 + most]) > self.room:
            most -= 1
        shown = [*columns[: look.facts], *columns[look.facts :][first:most]]
        self._first, self._fixed, self._counts = first, look.facts, self._all_counts[first:most]
        filled = [
            (row.preset, [cells[index] for _, cells in shown])
            for index, row in enumerate(self._shown)
        ]
        self.cells = self._width(shown)
        self._underlined = None
        self.fill([title for title, _ in shown], filled)
        return self._counts

    def _columns(self, look: _Look, counts: Sequence[int]) -> list[tuple[str, list[Text]]]:
        """Return title and cells of each column."""
        facts = zip(*(self._model(row, look) for row in self._shown), strict=True)
        columns = [*zip(("model", "size", "tokens")[: look.facts], map(list, facts), strict=False)]
        columns = columns or [("model", [])]
        for ranks in counts:
            plans = [row.cells[ranks] for row in self._shown]
            fitting = [plan for plan in plans if plan.fits]
            how = max((len(_how(plan, look.cells)) for plan in fitting), default=0)
            room = max((len(_speed(plan, look.cells)) for plan in fitting), default=0)
            cells = [
                self._cell(row, row.cells[ranks], look.cells, (how, room)) for row in self._shown
            ]
            columns.append(
                (f"{'  ' if look.cells == 'tight' else '   '}{plural(ranks, self._noun)}", cells)
            )
        return columns

    def _width(self, columns: Sequence[tuple[str, list[Text]]]) -> int:
        fitting = (max([cell_len(title), *(c.cell_len for c in cells)]) for title, cells in columns)
        return sum(width + 2 * self.cell_padding for width in fitting)

    def _model(self, row: PlanRow, look: _Look) -> list[Text]:
        """Return the cells about a model."""
        size = count(row.parameters, 1)
        if row.active_parameters < row.parameters:
            size += f" MoE, {count(row.active_parameters, 1)} active" if look.facts > 2 else " MoE"
        tokens = Text(thousands(row.sequence_length), style=self._colour("$faint"), justify="right")
        name = Text(shorten(row.title, look.name))
        return [name, Text(size, style=self._colour("$faint")), tokens][: look.facts]

    def _cell(self, row: PlanRow, plan: Plan, look: Cells, room: tuple[int, int]) -> Text:
        """Return how a plan offloads and how fast it is, or ``✗ host 922 > 464``.

        How it offloads, and its speed, take as many cells as ``room`` says.
        """
        from so_tui.plan.show import shortfall

        sign = f"{' ' if look == 'words' else ''}{SIGNS[plan.verdict]} "
        verdict, strong, short = self._colour(STYLES[plan.verdict]), self._colour("$run"), ""
        if not plan.fits:
            short = shortfall(plan)
            if look == "tight":  # no marks: they are for what fits
                return Text.assemble((sign, verdict), short.replace(" > ", ">"))
        marks = f"{'★' if plan.recommended else ' '}{'⇡' if plan is row.fastest_plan else ' '}"
        text = Text.assemble((marks, strong), (sign, verdict), short)
        if not plan.fits:
            return text
        if look != "tight":
            text.append(f"{_how(plan, look):<{room[0]}} ", self._colour("$faint"))
        return text.append(f"{_speed(plan, look):>{room[1]}}", "bold")

    def _colour(self, variable: str) -> str:
        return self.app.theme_variables[variable.removeprefix("$")]

    def _turn(self, by: int) -> bool:
        """Show the number of GPUs that has no room beside the others, in place of one of them;
        return whether there is one.
        """
        first, column = self._first + by, self.cursor_column
        if not (first >= 0 and first + len(self._counts) <= len(self._all_counts)):
            return False
        row = self.cursor_row
        self._fill(first)
        self.move_cursor(row=row, column=column)
        return True

    def action_cursor_right(self) -> None:
        last = self.cursor_column == len(self.columns) - 1
        if not (last and self._turn(1)):
            super().action_cursor_right()

    def action_cursor_left(self) -> None:
        if not (self.cursor_column == self._fixed and self._turn(-1)):
            super().action_cursor_left()

    def legend(self, width: int) -> Content:
        """Return what the marks and figures mean, in lines of ``width`` cells."""
        from so_tui.plan.gist import compact_moments

        plans = [plan for row in self._shown for plan in row.cells.values()]
        verdicts = {plan.verdict for plan in plans}
        fitting, ratios = [plan for plan in plans if plan.fits], self._said != "tight"
        offloaded = ratios and any(plan.mode != "gpu" for plan in fitting)
        kept = self._said == "short" and any(plan.mode == "gpu" for plan in fitting)
        ratio = "offload ratio, none: no offload" if kept else "offload ratio"
        compact = ratios and any(map(compact_moments, fitting))
        speeds = any(plan.useful_tokens_per_s_total for plan in fitting)
        entries = (
            ("★", "$run", "so-tui run starts this", any(plan.recommended for plan in plans)),
            ("⇡", "$run", "fastest", any(row.fastest_plan for row in self._shown)),
            (
                "✗",
                STYLES["does not fit"],
                f"needs > has ({memory_unit()[1]})",
                "does not fit" in verdicts,
            ),
            ("~", STYLES["tight"], "tight", "tight" in verdicts),
            ("0.90", "", ratio, offloaded),
            ("*", "", "compact moments", compact),
            ("16.0k", "bold", "tokens/s", speeds),
        )
        shown = [
            Content.assemble((sign, style), (f" {meaning}", "$faint"))
            for sign, style, meaning, of_use in entries
            if of_use
        ]
        return in_rows(wrapped(shown, width))

    # The cursor.

    @on(DataTable.CellHighlighted)
    def _underline_chosen(self) -> None:
        """Underline the cell of the plan that is chosen while the cursor is on its model."""
        if self._underlined is not None:
            self.update_cell_at(*self._underlined)
            self._underlined = None
        at, chosen = self.cursor_coordinate, self.chosen()
        if chosen is None or at.column >= self._fixed or chosen[1].gpus not in self._counts:
            return
        place = Coordinate(at.row, self._fixed + self._counts.index(chosen[1].gpus))
        cell: Text = self.get_cell_at(place)
        self._underlined, marked = (place, cell), cell.copy()
        begin = cell.cell_len - len(cell.plain.lstrip())
        marked.stylize("underline", begin)
        self.update_cell_at(place, marked)

    def chosen(self) -> tuple[PlanRow, Plan] | None:
        """Return the row under the cursor and its plan: the column's, or the recommended one where
        the cursor is on the model.
        """
        at = self.cursor_coordinate
        if at.row >= self.row_count:
            return None
        row = self._shown[at.row]
        if at.column < self._fixed:
            return row, best_plan(row)
        return row, row.cells[self._counts[at.column - self._fixed]]

    def _recommended(self, row: PlanRow) -> int:
        """Return the column of the recommended plan of a row, which fits; 0 where there is none."""
        columns = enumerate(self._counts, self._fixed)
        return next((column for column, ranks in columns if row.cells[ranks].recommended), 0)

    def select(self, preset: str) -> None:
        """Put the cursor on the recommended plan of a preset."""
        index = self.get_row_index(preset)
        column = self._recommended(self._shown[index])
        self.move_cursor(row=index, column=column or self._fixed)

    def start_where_it_fits(self, *, on_gpus: bool) -> None:
        """Put the cursor on the first recommended plan that fits, or on the last row, that of tiny,
        where none does or no GPU trains it.
        """
        columns = enumerate(map(self._recommended, self._shown if on_gpus else ()))
        last = max(0, len(self._shown) - 1), self._fixed
        if self._shown:
            last = last[0], self._recommended(self._shown[-1]) or self._fixed
        index, column = next((found for found in columns if found[1]), last)
        self.move_cursor(row=index, column=column)


def best_plan(row: PlanRow) -> Plan:
    """Return the recommended plan of a row, else its first."""
    return max(row.cells.values(), key=lambda plan: plan.recommended)


def _how(plan: Plan, look: Cells) -> str:
    """Return how a plan offloads: ``ratio 0.35`` or, where there is less room, ``0.35``."""
    from so_tui.plan.gist import compact_moments

    if plan.mode == "gpu":
        return "no offload" if look == "words" else "none"
    ratio = f"{plan.ratio:.2f}{'*' if compact_moments(plan) else ''}"
    if look == "words":
        return f"{'tight' if plan.verdict == 'tight' else 'ratio'} {ratio}"
    return ratio


def _speed(plan: Plan, look: Cells) -> str:
    """Return ``13.9k/s``, or ``13.9k`` where there is little room; empty where no speed is
    predicted.
    """
    speed = plan.useful_tokens_per_s_total
    return f"{rate(speed)}{'/s' if look == 'words' else ''}" if speed else ""
