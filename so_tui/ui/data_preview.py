"""A preview of the data as the model will see it, made by a helper process that can be cancelled at
any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Event
from typing import TYPE_CHECKING

from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Button, Input, Static

from so_tui.launch.helper_jobs import DataPreview, Sample, SourceView
from so_tui.spec import RunSpec, SoTuiError
from so_tui.spec.data_notes import row_missing
from so_tui.ui.dialogs import CLOSE, AskText, Dialog, button
from so_tui.ui.form import problem_texts
from so_tui.ui.lines import fill_pieces
from so_tui.ui.messages import code_refused
from so_tui.ui.plan_view import data_name
from so_tui.ui.text import Content, faint, in_rows, shorten_path
from so_tui.ui.widgets import Rule, keys
from so_tui.units import thousands

if TYPE_CHECKING:
    from so_tui.launch.helper_jobs import Progress


# A preview of training data as styled text. Pure functions from a preview to content.


_SHADES = (("█", "$run"), ("▓", "$backward"))
"""Documents beside each other in a sequence: they differ without colour as well."""
_MOST_COUNT = 9
"""Cells of a count behind a bar."""


def _facts(preview: DataPreview) -> list[Content]:
    """Return a line for each figure: its name, the figure, what it means."""
    rows = preview.facts()
    width = max(len(figure) for _, figure, _ in rows)
    return [
        Content.assemble(
            (f"{name:<10}", "$faint"),
            (
                f"{figure:>{width}}  ",
                "bold $warning" if name in ("truncated", "dropped") and figure != "0" else "bold",
            ),
            (meaning, "$faint"),
        )
        for name, figure, meaning in rows
    ]


def _histogram(preview: DataPreview, width: int) -> list[Content]:
    """Return a bar for each range of lengths."""
    label = max(len(entry.label) for entry in preview.histogram)
    cells = preview.histogram_cells(max(8, min(60, width - label - 1 - _MOST_COUNT)))
    return [
        Content.assemble(
            (f"{entry.label:>{label}} ", "$faint"),
            ("▇" * bar, "$run"),
            f" {thousands(entry.documents)}" if bar else "",
        )
        for entry, bar in zip(preview.histogram, cells, strict=True)
    ]


def _packed(preview: DataPreview, width: int) -> list[Content]:
    """Return one sequence as a bar in which neighbouring documents differ, and their lengths."""
    *documents, padding = preview.sequence_cells(width)
    bar = [
        (glyph * cells, style)
        for cells, (glyph, style) in zip(documents, _SHADES * len(documents), strict=False)
    ]
    return [
        Content.assemble(*bar, ("─" * padding, "$rule")),
        faint(preview.sequence_sum()),
    ]


def _source(source: SourceView, width: int) -> Content:
    """Return the line of a source of a mixture: its share of an epoch, what became of its rows, its
    name.
    """
    text = (
        f"  {source.format}\n       {thousands(source.rows)} rows, "
        f"{thousands(source.trained_tokens)} trained tokens, each {source.times_an_epoch:.1f} x an "
        "epoch"
    )
    counts = (("truncated", source.truncated), ("dropped", source.dropped))
    lost = ", ".join(f"{thousands(count)} {name}" for name, count in counts if count)
    name = shorten_path(source.source, max(12, width - 7 - len(source.format) - 4))
    return Content.assemble(
        (f"{100 * source.share:3.0f} %  ", "bold"),
        name,
        (text, "$faint"),
        (f"  {lost}" if lost else "", "$warning"),
    )


def _legend(*, marks: bool) -> Content:
    """Return the legend of trained and context text; with ``marks`` they differ by signs instead of
    colour.
    """
    return Content.assemble(
        _piece("what is trained", trained=True, marks=marks),
        (" and ", "$faint"),
        ("what is context", "$faint"),
    )


def _sample(one: Sample, preview: DataPreview, *, marks: bool) -> Content:
    """Return one document as the model sees it."""
    source = f" of {one.source}" if len(preview.sources) > 1 else ""
    return Content.assemble(
        (f"row {thousands(one.row)}{source}", "bold"),
        (f"   {one.counted}\n", "$faint"),
        *(_piece(text, trained=trained, marks=marks) for text, trained in one.visible),
    )


def _piece(text: str, *, trained: bool, marks: bool) -> Content:
    if not trained:
        return faint(text)
    return Content.styled(f"«{text}»" if marks else text, "$success on $success 15%")


FIRST_ROWS = 12
MORE = 4
"""Factor by which "More rows" multiplies the rows."""
_DIGITS = 15
"""Digits that no number of a row has."""
WIDE = 100
"""Columns from which figures and lengths stand side by side."""


class DataPreviewScreen(Dialog[None]):
    """Counts, lengths, a packed sequence, and the first rows with their trained parts marked."""

    CSS_PATH = "data_preview.tcss"
    BINDINGS = keys("data-preview")

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._rows, self._cancel = spec, FIRST_ROWS, Event()
        self._preview: DataPreview | None = None
        self._row: int | None = None
        """The row that was asked for by its number."""
        super().__init__()

    def compose(self) -> ComposeResult:
        what = f"   {self._spec.label}: {data_name(self._spec)}"
        with Vertical(id="preview"):
            yield Static(
                Content.assemble(("Data preview", "bold"), (what, "$faint")), id="preview-title"
            )
            yield Static(id="preview-status")
            yield VerticalScroll(id="preview-body")
            with Horizontal(id="preview-buttons"):
                yield button("Back  esc", "leave", CLOSE)
                yield button("More rows  m", "more", "screen.more")
                yield button("Go to a row  g", "row", "screen.row")
                yield button("Read again  r", "again", "screen.again")

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#preview-body"))
        self._start()

    def _start(self) -> None:
        self._cancel = Event()
        self._show_status(faint("starting the helper process …   esc cancels"))
        self.query(Button).exclude("#leave").set(disabled=True)
        self._preview_data(self._rows, [] if self._row is None else [self._row], self._cancel)

    @work(thread=True, group="data", name="preview the data", exit_on_error=False)
    def _preview_data(self, rows: int, numbers: list[int], cancel: Event) -> None:
        from so_tui.launch.helper_jobs import Progress, preview_data

        try:
            for event in preview_data(self._spec, rows, cancel, numbers=numbers):
                if isinstance(event, Progress):
                    self.call_later(self._show_progress, event)
                else:
                    self.call_later(self._show_preview, event)
        except SoTuiError as error:
            self.call_later(self.fail, problem_texts(error))
            if refused := code_refused(self.app, "No data read", error, self.action_again):
                self.app.post_message(refused)

    def _show_progress(self, progress: Progress) -> None:
        status = faint(f"{progress.message} …   esc cancels")
        if progress.total_rows:
            done = fill_pieces(progress.done_rows / progress.total_rows, 24, "$run")
            status = Content.assemble(*done, "  ", status)
        self._show_status(status)

    async def fail(self, problem: str) -> None:
        """Show reasons with their remedies."""
        self._show_status(Content.styled("✗ this preview could not be made", "bold $error"))
        await self._show([Static(Content(problem), classes="preview-part")])

    async def _show_preview(self, preview: DataPreview) -> None:
        self._preview = preview
        self._show_status(Content.styled(preview.how, "$foreground"))
        await self._show(self._parts(preview))
        self.query_one("#more", Button).disabled = len(preview.samples) < self._rows
        self.query_one("#row", Button).disabled = False
        if self._row is not None:
            first = self.query(".preview-row").first()
            self.call_after_refresh(first.scroll_visible, top=True, animate=False)

    async def on_resize(self) -> None:
        if self._preview is not None:
            await self._show(self._parts(self._preview))

    async def _show(self, parts: Iterable[Widget]) -> None:
        self.query_one("#again", Button).disabled = False
        body = self.query_one("#preview-body", VerticalScroll)
        async with body.batch():
            await body.remove_children()
            await body.mount_all(list(parts))

    def _parts(self, preview: DataPreview) -> Iterable[Widget]:
        width = self.query_one("#preview-body").scrollable_content_region.width
        marks = self.app.no_color
        for warning in preview.notes:
            yield Static(
                Content.assemble(("note: ", "bold $warning"), warning), classes="preview-part"
            )
        wide = width >= WIDE
        narrow = 2 * width // 5 - 3 if wide else width
        figures = _part("what happens to the rows", _facts(preview))
        lengths = _part("documents by length in tokens", _histogram(preview, narrow))
        yield (
            Horizontal(figures, lengths, classes="preview-pair")
            if wide
            else Vertical(figures, lengths, classes="preview-stack")
        )
        if len(preview.sources) > 1:
            yield _part(
                "the mixture: share of an epoch",
                [_source(source, width) for source in preview.sources],
            )
        if preview.packing:
            yield _part(preview.sequence_words(), _packed(preview, width))
        title = "rows as the model sees them   ", "$faint"
        yield Rule(Content.assemble(title, _legend(marks=marks)))
        for one in preview.samples:
            yield Static(_sample(one, preview, marks=marks), classes="preview-part preview-row")

    def _show_status(self, text: Content) -> None:
        self.query_one("#preview-status", Static).update(text)

    # Commands.

    def on_unmount(self) -> None:
        self._cancel.set()

    def action_again(self) -> None:
        if not self.query_one("#again", Button).disabled:
            self._start()

    def action_row(self) -> None:
        """Ask for a row by its number, and show it before the first rows."""
        if (preview := self._preview) is None or self.query_one("#row", Button).disabled:
            return
        most = max(source.rows for source in preview.sources)
        shown = "this row of each source" if len(preview.sources) > 1 else "the row"

        def read(given: str) -> int:
            number = int(given) if given.isdecimal() and len(given) < _DIGITS else 0
            if not 1 <= number <= most:
                raise row_missing(given, most)
            return number

        self.app.push_screen(
            AskText(
                "Go to a row",
                f"A number from 1 to {thousands(most)}; {shown} comes before the first rows.",
                Input(compact=True),
                yes="Show",
                read=read,
            ),
            self._go_to,
        )

    def _go_to(self, number: int | None) -> None:
        if number is not None:
            self._row = number
            self._start()

    def action_more(self) -> None:
        if not self.query_one("#more", Button).disabled:
            self._rows *= MORE
            self._start()


def _part(title: str, lines: list[Content]) -> Widget:
    return Vertical(Rule(title), Static(in_rows(lines)), classes="preview-part")
