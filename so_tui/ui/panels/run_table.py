"""The table of Runs: a row a run, with the columns that have room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from so_tui.ui.run_columns import SORTED_COLUMNS, cells_of, fitted, heading
from so_tui.ui.run_order import text_of
from so_tui.ui.text import shorten
from so_tui.ui.widgets.fitted_table import FittedTable

if TYPE_CHECKING:
    from so_tui.runs import RunDirectory
    from so_tui.settings.types import RunListSettings
    from so_tui.ui.line_looks import Look
    from so_tui.ui.loss_curve import LossCurve
    from so_tui.ui.runlist import RunRow


class RunTable(FittedTable):
    """Shows runs, and knows the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "enter", "select_cursor", "Open", id="open", tooltip="Show this run on the dashboard"
        )
    ]

    shown: tuple[RunRow, ...] = ()
    """The runs, from above."""
    _columns: tuple[str, ...] = ()

    def chosen(self) -> RunRow | None:
        """Return the run under the cursor; None in an empty table."""
        return self.shown[self.cursor_row] if 0 <= self.cursor_row < len(self.shown) else None

    def show(
        self,
        runs: Sequence[RunRow],
        curves: Mapping[RunDirectory, LossCurve],
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
        cells = [
            cells_of(row, curves.get(row.run), colours, mark=marks.get(row.run)) for row in runs
        ]
        before = ""
        for row, own in zip(runs, cells, strict=True):
            if order.group != "none" and (name := text_of(row, order.group)) != before:
                before = name
                own["name"] = Text.assemble(
                    (f"{shorten(name, 20)} ", colours["accent"]), own["name"]
                )
        by = SORTED_COLUMNS[order.sort]
        columns, shown = fitted(cells, room, self.cell_padding, kept=by)
        self.shown, self._columns = tuple(runs), tuple(columns)
        rows = [
            (str(row.run.path), [own[name] for name in columns])
            for row, own in zip(runs, shown, strict=True)
        ]
        self.fill([heading(name, by).strip() for name in columns], rows)
        positions = [
            index for index, row in enumerate(runs) if chosen is not None and row.run == chosen.run
        ]
        self.move_cursor(row=positions[0] if positions else 0)

    def order_by(self, column: int) -> str | None:
        """Return the order of runs that goes by a column; None if none does."""
        return next(
            (order for order, by in SORTED_COLUMNS.items() if by == self._columns[column]), None
        )
