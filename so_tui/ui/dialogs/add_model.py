"""Make a preset of any model: ask for a hub id or a folder, and have a helper process read its shape."""

from __future__ import annotations

from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static
from textual.worker import Worker, WorkerState, get_current_worker

from so_tui.ui.dialogs.basic import CloseButton
from so_tui.ui.form import problem_text
from so_tui.ui.text import Content
from so_tui.ui.widgets.entry import Entry


class Answered(Message):
    """The helper process has answered: the preset's name with notes, or an empty name with the problems."""

    def __init__(self, name: str, lines: tuple[str, ...]) -> None:
        self.name, self.lines = name, lines
        super().__init__()


class AddModel(ModalScreen[str | None]):
    """The result is the name of the new preset, or None when the dialog was cancelled. What was typed stays until it works."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]

    _reading = False
    """Whether an answer is awaited. The thread that has given one may take a moment more to end."""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("Add a model", classes="dialog-title")
            yield Static(
                "Only its config.json is read. No weights are downloaded.", classes="faint"
            )
            yield Entry(
                placeholder="hub id such as Qwen/Qwen3-8B, or a folder", id="model", compact=True
            )
            yield Entry(
                placeholder="name of the preset (empty: derived from the model's)",
                id="name",
                compact=True,
            )
            yield Static(id="said", classes="dialog-answer")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Add  enter", id="yes", compact=True)
                yield CloseButton("Cancel  esc", id="no")

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#model", Input))

    @on(Input.Submitted)
    @on(Button.Pressed, "#yes")
    def _submitted(self) -> None:
        model, name = (
            self.query_one(selector, Input).value.strip() for selector in ("#model", "#name")
        )
        if not model:
            self._show_answer(Content.styled("Type a hub id or a folder first.", "$warning"))
            self.set_focus(self.query_one("#model", Input))
        elif not self._reading:
            self._reading = True
            self._show_answer(Content.styled(f"reading the shape of {model} …", "$faint"))
            self.add_model(model, name)

    @work(thread=True, exclusive=True, group="add", name="add a model", exit_on_error=False)
    def add_model(self, model: str, name: str) -> None:
        """Describe the model and save the preset, unless the dialog was cancelled meanwhile."""
        from so_tui.launch.new_preset import add_preset, describe_model
        from so_tui.spec.errors import InputError, SoTuiError

        worker = get_current_worker()
        try:
            described = describe_model(model, name=name or None)
            if not worker.is_cancelled:
                add_preset(described)
                self.post_message(Answered(described.spec.name, described.notes))
        except InputError as error:
            self.post_message(Answered("", tuple(map(problem_text, error.problems))))
        except SoTuiError as error:
            self.post_message(Answered("", tuple(str(error).splitlines())))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is WorkerState.ERROR:
            self.post_message(
                Answered("", (f"{type(event.worker.error).__name__}: {event.worker.error}",))
            )

    def on_answered(self, message: Answered) -> None:
        self._reading = False
        if message.name:
            for note in message.lines:
                self.app.notify(note, markup=False)
            self.dismiss(message.name)
        else:
            self._show_answer(Content.assemble(("✗ ", "$error"), "\n".join(message.lines)))
            self.set_focus(self.query_one("#model", Input))

    def _show_answer(self, text: Content) -> None:
        self.query_one("#said", Static).update(text)
