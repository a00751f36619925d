"""The log of the dashboard: its heading, and the search in it."""

from __future__ import annotations

from textual import on
from textual.content import Content
from textual.widgets import Input

from so_tui.ui.page import Page
from so_tui.ui.text import plural
from so_tui.ui.widgets.log import LogView
from so_tui.ui.widgets.rule import Rule


class LogSearch(Page):
    """Has a log, its heading ``#log-rule`` and a hidden field ``#search``, which ``/`` shows."""

    def show_log_rule(self) -> None:
        """Say whether the log follows, and what is searched."""
        log = self.query_one(LogView)
        words = "log   following" if log.following else "log   paused, f follows"
        if log.needle:
            words += f"   {plural(log.matches, 'line')} with “{log.needle}”, n and N go through them"
        self.query_one("#log-rule", Rule).update(Content.styled(words, "$faint"))

    @on(LogView.Moved)
    def _log_moved(self) -> None:
        self.show_log_rule()

    def action_find(self) -> None:
        field = self.query_one("#search", Input)
        field.display = True
        field.focus()

    @on(Input.Changed, "#search")
    def _search_changed(self, event: Input.Changed) -> None:
        self.query_one(LogView).needle = event.value

    @on(Input.Submitted, "#search")
    def _search_done(self) -> None:
        log = self.query_one(LogView)
        log.focus()
        log.action_next_match(-1)

    def action_follow(self) -> None:
        self.query_one(LogView).action_follow()

    def left_search(self) -> bool:
        """End the search; whether there was one."""
        field = self.query_one("#search", Input)
        was_shown = bool(field.display)
        field.value = ""
        field.display = False
        return was_shown
