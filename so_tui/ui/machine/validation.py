"""The report of ``so-tui validate``: its parts, speeds beside the plan, and how losses agree. Read
again whenever it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static
from textual.worker import Worker

from so_tui.spec.errors import InputError
from so_tui.ui.dialogs import CLOSE, button
from so_tui.ui.lines import fill
from so_tui.ui.messages import answer, unexpected_error
from so_tui.ui.text import Content, distinct, faint, in_rows, shorten
from so_tui.units import duration

if TYPE_CHECKING:
    from so_tui.validation.report import Outcome, Report, State


READ_EVERY_S = 2.0
_SIGNS: dict[State, tuple[str, str]] = {
    "measured": ("●", "$success"),
    "failed": ("✗ failed", "$error"),
    "timed-out": ("✗ took too long", "$error"),
    "left-out": ("○ no time left", "$faint"),
    "pending": ("○ pending", "$faint"),
}
_MEDIUM, _WIDE = 70, 110
"""Columns from which speeds have all figures, and bars."""
_COLUMN_CELLS, _BAR_CELLS, _TITLE_CELLS = 11, 24, 64


def _report_lines(report: Report, width: int) -> list[Content]:
    """Return a report in lines of at most ``width`` columns."""
    return [*_parts(report, width), *_speeds(report, width), *_losses(report, width)]


def _parts(report: Report, width: int) -> Iterator[Content]:
    count = sum(outcome.state == "measured" for outcome in report.outcomes)
    measured = f"{count} of {len(report.outcomes)} parts measured"
    yield Content.assemble(
        (measured, "bold"), (shorten(f"   {report.shape}", max(0, width - len(measured))), "$faint")
    )
    for outcome in report.outcomes:
        if outcome.state != "measured":
            yield _part(outcome, width)
    yield Content("")


def _part(outcome: Outcome, width: int) -> Content:
    sign, style = _SIGNS[outcome.state]
    title = shorten(outcome.title, max(10, width - 17))
    room = width - 17 - len(title) - 3
    reason = f"   {shorten(outcome.reason, room)}" if outcome.reason and room > 12 else ""
    return Content.assemble((f"{sign:<16} ", style), title, (reason, "$faint"))


def _speeds(report: Report, width: int) -> Iterator[Content]:
    from so_tui.validation.show import speed_cells, timed

    found = timed(report)
    if not found:
        return
    best = max(result.useful_tokens_per_s for _, result in found)
    chosen = (
        ("GPUs", "s/step", "planned", "tokens/s") if width >= _MEDIUM else ("s/step", "tokens/s")
    )
    bars = width >= _WIDE
    room = min(_TITLE_CELLS, width - _COLUMN_CELLS * len(chosen) - (_BAR_CELLS + 2) * bars)
    yield faint(_row(room, ["training"], chosen))
    names = distinct([outcome.title for outcome, _ in found], room - 1)
    for name, (_, result) in zip(names, found, strict=True):
        cells = speed_cells(result)
        bar = "  " + fill(result.useful_tokens_per_s / best, _BAR_CELLS) if bars else Content("")
        yield Content(_row(room, [name], [cells[column] for column in chosen])) + bar
    yield Content("")


def _losses(report: Report, width: int) -> Iterator[Content]:
    from so_tui.validation.show import agreement_rows

    rows = agreement_rows(report)
    if not rows:
        return
    room = min(_TITLE_CELLS, (width - 2 * _COLUMN_CELLS) // 2)
    titles, references, steps, differences = zip(*rows, strict=True)
    yield faint(_row(room, ["losses", shorten("compared with", room - 1)], ["steps", "differ by"]))
    names = (distinct(column, room - 1) for column in (titles, references))
    for *pair, count, differ in zip(*names, steps, differences, strict=True):
        text = differ or "not finite"
        yield Content.assemble(
            _row(room, pair, [count]), (f"{text:>{_COLUMN_CELLS}}", "" if differ else "$error")
        )


def _row(room: int, names: Sequence[str], figures: Sequence[str]) -> str:
    """Return a line of a table: names of ``room`` columns each, and figures."""
    return "".join(
        (
            *(f"{name:<{room}}" for name in names),
            *(f"{figure:>{_COLUMN_CELLS}}" for figure in figures),
        )
    )


class ValidationScreen(ModalScreen[None]):
    """The report in the user's folder, also while it is being written."""

    CSS_PATH = "validation.tcss"
    BINDINGS = [Binding("escape,q", "dismiss(None)", "Back")]

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._report: Report | None = None
        self._reading: Worker[None] | None = None
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(id="report-page"):
            yield Static(
                Content.assemble(("Validation", "bold"), ("   measured beside planned", "$faint")),
                id="report-title",
            )
            yield Static(id="report-status")
            with VerticalScroll(id="report-body"):
                yield Static(id="report")
            yield button("Back  esc", "leave", CLOSE)

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#report-body"))
        self._read_again()
        self.set_interval(READ_EVERY_S, self._read_again)

    def _read_again(self) -> None:
        """Have the report read, unless that is under way: a file system may take longer than a
        report is left alone.
        """
        if self._reading is None or self._reading.is_finished:
            self._reading = self._read_report()

    @work(thread=True, group="validation", name="read the validation", exit_on_error=False)
    def _read_report(self) -> None:
        from so_tui.validation import report as reports

        try:
            answer(self, self._take, reports.read(self._folder))
        except InputError as error:
            answer(self, self._take, None, "\n".join(map(str, error.problems)))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if text := unexpected_error(event):
            self._take(None, text)

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
            took = duration(sum(outcome.seconds or 0.0 for outcome in report.outcomes))
            status = faint(
                f"begun {report.begun}, {took} of measuring   {self._folder / 'report.md'}"
            )
        self.query_one("#report-status", Static).update(status)
        if report != self._report:
            self._report = report
            self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        width = max(40, self.size.width - 6)
        lines = _report_lines(self._report, width) if self._report else []
        self.query_one("#report", Static).update(in_rows(lines))
