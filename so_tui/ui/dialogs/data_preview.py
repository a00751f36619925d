"""A preview of the data as the model will see it, made by a helper process that can be cancelled at any time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Static
from textual.worker import Worker, WorkerState

from so_tui.spec import InputError, RunSpec
from so_tui.ui.dialogs.basic import CloseButton
from so_tui.ui.form import label
from so_tui.ui.text import Content
from so_tui.ui.widgets import data_view
from so_tui.ui.widgets.bars import fill
from so_tui.ui.widgets.plan_view import data_name
from so_tui.ui.widgets.rule import Rule

if TYPE_CHECKING:
    from so_tui.launch.data_preview import DataPreview, Progress
    from so_tui.launch.helpers import Cancel

FIRST_ROWS = 12
MORE = 4
"""Factor by which "More rows" multiplies the rows."""
WIDE = 100
"""Columns from which figures and lengths stand side by side."""


class Progressed(Message):
    """The helper process has made progress."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        super().__init__()


class Previewed(Message):
    """The helper process has answered."""

    def __init__(self, preview: DataPreview) -> None:
        self.preview = preview
        super().__init__()


class PreviewFailed(Message):
    """The helper process failed; each line gives a reason and its remedy."""

    def __init__(self, lines: tuple[Content, ...]) -> None:
        self.lines = lines
        super().__init__()


class DataPreviewScreen(ModalScreen[None]):
    """Counts, lengths, a packed sequence, and the first rows with their trained parts marked."""

    CSS_PATH = "data_preview.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "Back"),
        Binding("m", "more", "More rows"),
        Binding("r", "again", "Read again"),
    ]

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._rows = spec, FIRST_ROWS
        self._cancel: Cancel | None = None
        self._preview: DataPreview | None = None
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
                yield CloseButton("Back  esc", id="leave", action=None)
                yield Button("More rows  m", id="more", compact=True, disabled=True)
                yield Button("Read again  r", id="again", compact=True, disabled=True)

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#preview-body"))
        self._start()

    def _start(self) -> None:
        from so_tui.launch.helpers import Cancel

        self._cancel = Cancel()
        self._show_status(Content.styled("starting the helper process …   esc cancels", "$faint"))
        for button in ("#more", "#again"):
            self.query_one(button, Button).disabled = True
        self._preview_data(self._rows, self._cancel)

    @work(thread=True, group="data", name="preview the data", exit_on_error=False)
    def _preview_data(self, rows: int, cancel: Cancel) -> None:
        from so_tui.launch.data_preview import Progress, preview_data
        from so_tui.spec.errors import SoTuiError

        try:
            for event in preview_data(self._spec, rows, cancel):
                self.post_message(
                    Progressed(event) if isinstance(event, Progress) else Previewed(event)
                )
        except InputError as error:
            lines = [
                Content.assemble(
                    (f"{label(problem.field)} ", "bold"),
                    f"{problem.value}: {problem.message}\n",
                    (problem.remedy, "$accent"),
                )
                for problem in error.problems
            ]
            self.post_message(PreviewFailed(tuple(lines)))
        except SoTuiError as error:
            self.post_message(PreviewFailed(tuple(map(Content, str(error).splitlines()))))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is WorkerState.ERROR:
            self.post_message(
                PreviewFailed(
                    (Content(f"{type(event.worker.error).__name__}: {event.worker.error}"),)
                )
            )

    @on(Progressed)
    def _progressed(self, message: Progressed) -> None:
        progress = message.progress
        bar = (
            fill(progress.done_rows / progress.total_rows, 24) + "  "
            if progress.total_rows
            else Content("")
        )
        self._show_status(bar + Content.styled(f"{progress.message} …   esc cancels", "$faint"))

    @on(PreviewFailed)
    async def _failed(self, message: PreviewFailed) -> None:
        self._show_status(
            Content.styled("✗ this data cannot be trained on as it is", "bold $error")
        )
        await self._show(Static(line, classes="preview-part") for line in message.lines)

    @on(Previewed)
    async def _previewed(self, message: Previewed) -> None:
        self._preview = message.preview
        self._show_status(Content.styled(message.preview.how, "$foreground"))
        await self._show(self._parts(message.preview))
        self.query_one("#more", Button).disabled = len(message.preview.samples) < self._rows

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
        for warning in preview.warnings:
            yield Static(
                Content.assemble(("note: ", "bold $warning"), warning), classes="preview-part"
            )
        wide = width >= WIDE
        narrow = 2 * width // 5 - 3 if wide else width
        figures = _part("what happens to the rows", data_view.facts(preview))
        lengths = _part("documents by length in tokens", data_view.histogram(preview, narrow))
        yield (
            Horizontal(figures, lengths, classes="preview-pair")
            if wide
            else Vertical(figures, lengths, classes="preview-stack")
        )
        if len(preview.sources) > 1:
            yield _part("the mixture: share of an epoch", data_view.sources(preview, width))
        if preview.packing:
            yield _part(preview.sequence_words(), data_view.packed(preview, width))
        yield Rule(
            Content.assemble(
                ("rows as the model sees them   ", "$faint"), data_view.legend(marks=marks)
            )
        )
        for one in preview.samples:
            yield Static(
                data_view.sample(one, preview, marks=marks), classes="preview-part preview-row"
            )

    def _show_status(self, text: Content) -> None:
        self.query_one("#preview-status", Static).update(text)

    # Commands.

    def on_unmount(self) -> None:
        if self._cancel is not None:
            self._cancel()

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_again(self) -> None:
        if not self.query_one("#again", Button).disabled:
            self._start()

    def action_more(self) -> None:
        if not self.query_one("#more", Button).disabled:
            self._rows *= MORE
            self._start()

    @on(Button.Pressed)
    async def _button(self, event: Button.Pressed) -> None:
        await self.run_action(event.button.id or "")


def _part(title: str, lines: list[Content]) -> Widget:
    return Vertical(
        Rule(Content.styled(title, "$faint")),
        Static(Content("\n").join(lines)),
        classes="preview-part",
    )
