"""A page with a table and a field that narrows it: what Presets and Runs have in common."""

from __future__ import annotations

from textual import on
from textual.widgets import Input

from so_tui.ui.page import Page


class FilteredPage(Page):
    """Has a table ``#table`` and a hidden field ``#filter``, which ``/`` shows and esc empties."""

    def filter_changed(self) -> None:
        """Show what the text now wants."""
        raise NotImplementedError

    @property
    def filter_text(self) -> str:
        """What rows have to contain, in small letters."""
        return self.query_one("#filter", Input).value.strip().lower()

    def action_find(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    @on(Input.Changed, "#filter")
    def _filter_typed(self) -> None:
        self.filter_changed()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self.query_one("#table").focus()

    def action_leave_field(self) -> None:
        """Show every row again."""
        if self.maximized is not None:
            self.minimize()
            return
        field = self.query_one("#filter", Input)
        field.value = ""
        field.display = False
        self.query_one("#table").focus()
