"""The dashboard's header: the run with its progress, and below it what the reader must know right now."""

from __future__ import annotations

from textual import getters
from textual.app import ComposeResult

from so_tui.ui.kept_lines import KeptVertical
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content
from so_tui.ui.widgets import run_lines
from so_tui.ui.widgets.styled_lines import StyledLines

MOST_NEWS_ROWS = 3
"""Enough to read in full why a run ended and what to do next."""


class RunHeader(KeptVertical):
    """One row for the run, and up to MOST_NEWS_ROWS for news, which are hidden while there is none."""

    title = getters.child_by_id("title", StyledLines)
    news = getters.child_by_id("news", StyledLines)

    def compose(self) -> ComposeResult:
        yield StyledLines(id="title")
        yield StyledLines(id="news")

    def show(self, snapshot: Snapshot, now: float, width: int) -> None:
        """Show the run's state in lines of ``width`` cells."""
        self.title.update(run_lines.title_line(snapshot, now, width))
        news = run_lines.news_line(snapshot)
        lines = [] if news is None else news.wrap(width)[:MOST_NEWS_ROWS]
        self.news.display = bool(lines)
        self.news.update(Content("\n").join(lines))

    @property
    def rows(self) -> int:
        """Rows that the header takes."""
        return 1 + (self.news.rows if self.news.display else 0)
