"""The dashboard's log: its heading, which names the search, and the lines themselves."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import events, getters, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from so_tui.ui.kept_lines import KeptVertical
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import plural
from so_tui.ui.widgets.log import LogView
from so_tui.ui.widgets.rule import Rule

_STEP_LINE = re.compile(r"\bstep ([0-9]{1,15})/[0-9]")
"""How the trainer begins what it prints of a step. The log is free text: where a line is missing, the one before it is gone to."""


class LogPanel(KeptVertical):
    """Follows the end of the log until the reader scrolls up, and goes through the lines that contain a text."""

    KEYS: ClassVar[tuple[BindingType, ...]] = (
        Binding(
            "slash",
            "find",
            "Search",
            key_display="/",
            id="find",
            tooltip="n and N go to the next and previous match",
        ),
        Binding(
            "f", "follow", "Follow log", show=False, id="follow", tooltip="Back to the newest line"
        ),
    )
    """Keys that act on this panel from anywhere on its screen, which binds them."""

    heading = getters.child_by_id("log-rule", Rule)
    lines = getters.query_one("#log", LogView)

    def __init__(self) -> None:
        self._step: float | None = None
        """The step that is shown instead of the end."""
        self._followed = True
        """Whether the end was followed before."""
        super().__init__()

    def compose(self) -> ComposeResult:
        yield Rule("log", id="log-rule")
        with KeptVertical(classes="frame"):
            yield LogView(id="log")

    def clear(self) -> None:
        """Forget every line, for another run."""
        self.lines.clear()

    def show(self, snapshot: Snapshot) -> None:
        """Add the lines that are new in ``snapshot``."""
        several_hosts = snapshot.hosts > 1
        lines = (
            f"{line.host}: {line.text}" if several_hosts else line.text
            for line in snapshot.log_lines
        )
        self.lines.extend(lines, snapshot.log_partial)
        self._show_heading()

    def set_rows(self, rows: int) -> None:
        """Show ``rows`` lines, unless the log is maximised."""
        self.lines.styles.height = None if self.lines.is_maximized else rows

    def search(self, text: str) -> None:
        """Mark the lines that contain ``text``; empty ends the search."""
        self.lines.needle = text

    def go_to_newest_match(self) -> None:
        """Give the keyboard to the log and scroll to the newest line that matches."""
        self.screen.set_focus(self.lines)
        self.lines.action_next_match(-1)

    def show_step(self, step: float | None) -> None:
        """Scroll to the line of the last step that was logged up to ``step``; None scrolls back to the end if it left it."""
        if step == self._step:
            return
        followed = self.lines.following if self._step is None else self._followed
        self._step, self._followed = step, followed
        if step is None:
            if followed:
                self.follow_end()
            return
        lines = self.lines.lines
        for index in range(len(lines) - 1, -1, -1):
            if (found := _STEP_LINE.search(lines[index])) is not None and int(found[1]) <= step:
                self.lines.go_to(index)
                return
        self.lines.go_to(0)

    def follow_end(self) -> None:
        """Scroll to the newest line and stay there."""
        self.lines.action_follow()

    @on(LogView.Moved)
    def _moved(self, message: LogView.Moved) -> None:
        message.stop()
        self._show_heading()

    @on(events.Click, "#log-rule")
    def _heading_clicked(self) -> None:
        self.follow_end()

    def _show_heading(self) -> None:
        log = self.lines
        text = "following" if log.following else "paused, f or a click here follows"
        if not log.needle:
            self.heading.update("log", text)
            return
        found = f"{plural(log.matches, 'line')} with “{log.needle}”"
        through = f"{found}, n and N go through them"
        self.heading.update("log", f"{text}   {through}", through, found, text)
