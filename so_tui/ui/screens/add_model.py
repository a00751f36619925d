"""Any model as a preset: asks for a hub id or folder, builds its shape in a helper process, and shows there what does not work."""

from __future__ import annotations

from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static
from textual.worker import get_current_worker

from so_tui.ui.widgets.entry import Entry


class Answered(Message):
    """The helper process has answered: the preset's name and notes on it, or what is wrong."""

    def __init__(self, name: str, lines: tuple[str, ...]) -> None:
        self.name, self.lines = name, lines
        super().__init__()


class AddModel(ModalScreen[str | None]):
    """Answers with the name of the new preset; None when it was left. What was typed stays until it works."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("Add a model", classes="dialog-title")
            yield Static("Its config.json is read and its shape is built without memory. No weights are downloaded.", classes="faint")
            yield Entry(placeholder="hub id such as Qwen/Qwen3-8B, or a folder", id="model", compact=True)
            yield Entry(placeholder="name of the preset (empty: made from the model's)", id="name", compact=True)
            yield Static(id="said", classes="dialog-answer")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Add  enter", id="yes", compact=True)
                yield Button("Cancel  esc", id="no", compact=True)

    def on_mount(self) -> None:
        self.query_one("#model", Input).focus()

    @on(Input.Submitted)
    @on(Button.Pressed, "#yes")
    def _submitted(self) -> None:
        model, name = (self.query_one(selector, Input).value.strip() for selector in ("#model", "#name"))
        if not model:
            self._say(Content.styled("Type a hub id or a folder first.", "$warning"))
            self.query_one("#model", Input).focus()
        elif not any(worker.is_running for worker in self.workers if worker.node is self):
            self._say(Content.styled(f"building the shape of {model} …", "$faint"))
            self.add_model(model, name)

    @on(Button.Pressed, "#no")
    def _left(self) -> None:
        self.dismiss(None)

    @work(thread=True, exclusive=True, group="add", name="add a model", exit_on_error=False)
    def add_model(self, model: str, name: str) -> None:
        """Describe the model and save the preset, unless the dialog was left meanwhile."""
        from so_tui.launch.new_preset import add_preset, describe_model
        from so_tui.spec.errors import SoTuiError

        worker = get_current_worker()
        try:
            described = describe_model(model, name=name or None)
            if not worker.is_cancelled:
                add_preset(described)
                self.post_message(Answered(described.spec.name, described.notes))
        except SoTuiError as error:
            self.post_message(Answered("", tuple(str(error).splitlines())))

    def on_answered(self, message: Answered) -> None:
        if message.name:
            for note in message.lines:
                self.app.notify(note, markup=False)
            self.dismiss(message.name)
        else:
            self._say(Content.assemble(("✗ ", "$error"), "\n".join(message.lines)))
            self.query_one("#model", Input).focus()

    def _say(self, words: Content) -> None:
        self.query_one("#said", Static).update(words)
