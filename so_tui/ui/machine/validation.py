"""The report of ``so-tui validate`` as its Markdown, read again whenever it changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markdown import Markdown as RichMarkdown
from textual import work
from textual.app import ComposeResult
from textual.containers import ScrollableContainer, Vertical
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownBlock

from so_tui.spec.errors import InputError
from so_tui.ui.dialogs import CLOSE, Dialog, button
from so_tui.ui.messages import answer, is_working
from so_tui.ui.text import Content, faint
from so_tui.ui.widgets import keys
from so_tui.units import duration

if TYPE_CHECKING:
    from so_tui.validation.report import Report


READ_EVERY_S = 2.0


class _Table(MarkdownBlock):
    """A table as one widget. Textual's has one for each cell: they take a second of CPU time until
    they are shown, and a tenth at each key.
    """

    def compose(self) -> ComposeResult:
        yield Static(RichMarkdown(self.source or "", hyperlinks=False))


class _Markdown(Markdown):
    """Markdown with such tables."""

    BLOCKS = Markdown.BLOCKS | {"table_open": _Table}


class ValidationScreen(Dialog[None]):
    """The report in the user's folder, also while it is being written."""

    CSS_PATH = "validation.tcss"
    BINDINGS = keys("validation")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._report: Report | None = None
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(id="report-page"):
            yield Static(
                Content.assemble(("Validation", "bold"), ("   measured beside planned", "$faint")),
                id="report-title",
            )
            yield Static(id="report-status")
            with ScrollableContainer(id="report-body"):
                yield _Markdown(id="report", open_links=False)
            yield button("Back  esc", "leave", CLOSE)

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#report-body"))
        self._read_again()
        self.set_interval(READ_EVERY_S, self._read_again)

    def _read_again(self) -> None:
        """Have the report read, unless that is under way: a file system may take longer than a
        report is left alone.
        """
        if not is_working(self, "validation"):
            self._read_report()

    @work(thread=True, group="validation", name="read the validation", exit_on_error=False)
    def _read_report(self) -> None:
        from so_tui.validation import report as reports

        try:
            answer(self, self._take, reports.read(self._folder))
        except InputError as error:
            answer(self, self.fail, "\n".join(map(str, error.problems)))

    def fail(self, problem: str) -> None:
        self._take(None, problem)

    def _take(self, report: Report | None, problem: str = "") -> None:
        """Show the report, that there is none, or why it cannot be used."""
        if problem:
            status = Content.styled(problem, "$error")
        elif report is None:
            status = Content(
                "There is no report yet. In a terminal, `so-tui validate` takes up to 20 minutes "
                "to measure this machine and write one."
            )
        else:
            outcomes = report.outcomes
            took = duration(sum(outcome.seconds or 0.0 for outcome in outcomes))
            count = sum(outcome.state == "measured" for outcome in outcomes)
            status = faint(
                f"{count} of {len(outcomes)} parts measured in {took}   "
                f"{self._folder / 'report.md'}"
            )
        self.query_one("#report-status", Static).update(status)
        if report != self._report:
            from so_tui.validation.show import markdown

            self._report = report
            self.query_one("#report", Markdown).update(markdown(report) if report else "")
