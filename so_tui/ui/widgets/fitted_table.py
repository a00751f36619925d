"""A table whose columns are as wide as what is in them from the first drawing on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text
from textual.widgets import DataTable


class FittedTable(DataTable[Text]):
    """Textual measures columns when it is idle, and goes on showing rows that were drawn before that, as wide as the titles."""

    def fill(
        self,
        titles: Sequence[str],
        rows: Iterable[tuple[str, Sequence[Text]]],
        widths: Mapping[str, int] | None = None,
    ) -> None:
        """Show other columns and rows.

        Args:
            titles: Title of each column.
            rows: Key and cells of each row.
            widths: Least cells of columns, by title; what is in them is never cut.
        """
        kept = list(rows)
        self.clear(columns=True)
        for index, title in enumerate(titles):
            fitting = max([cell_len(title), *(cells[index].cell_len for _, cells in kept)])
            self.add_column(title, width=max(fitting, (widths or {}).get(title, 0)))
        for key, cells in kept:
            self.add_row(*cells, key=key)
