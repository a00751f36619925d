"""Ask a model, and its base model beside it: answers appear as a helper process writes them."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static
from textual.worker import Worker

from so_tui.spec.errors import SoTuiError, reject
from so_tui.spec.generation import (
    Answer,
    Ended,
    Event,
    Loaded,
    LoadModel,
    ModelFacts,
    Piece,
    Progress,
    Prompt,
    Rejected,
    Sampling,
    Side,
    Turn,
)
from so_tui.ui.messages import unexpected_error
from so_tui.ui.shared_app import SettingsApp
from so_tui.ui.text import Content, faint, shorten
from so_tui.ui.widgets import KeyLine, Rule, keys
from so_tui.units import age, duration, plural, thousands

if TYPE_CHECKING:
    from so_tui.launch.helper_jobs import ModelProcess
    from so_tui.settings_file import Loaded as LoadedSettings


def _sampling_text(sampling: Sampling) -> str:
    """Return sampling as text that a user can edit."""
    return "  ".join(
        f"{name.replace('_', '-')}={value:g}"
        for name, value in msgspec.structs.asdict(sampling).items()
    )


def _read_sampling(text: str) -> Sampling:
    """Return the sampling that a user typed; what is left out has its default.

    Raises:
        InputError: A name is unknown or a value out of range (``sampling``).
    """
    pairs = dict(word.partition("=")[::2] for word in text.split())
    try:
        values = {name.replace("-", "_"): value for name, value in pairs.items()}
        return msgspec.convert(values, Sampling, strict=False)
    except msgspec.ValidationError as error:
        remedy = f"Write, for example: {_sampling_text(Sampling())}"
        raise reject("sampling", "sampling", text, f"cannot be used ({error})", remedy) from error


DRAW_S = 0.1
"""Between two redraws of answers that are being written; a GPU writes a hundred tokens a second."""
_LONGEST_QUESTION = 32_768
_FEW_STEPS = 1000
"""Steps after which a model that began with random weights still writes nonsense."""
_ENDS: dict[Ended, str] = {
    "stop": "",
    "length": ", cut off at max-tokens",
    "context": ", cut off at the model's longest sequence",
    "cancelled": ", stopped",
}


class _Column(VerticalScroll, can_focus=False):
    """One model's side of the conversation. Each model continues from its own answers."""

    def __init__(self, model: ModelFacts, system: str) -> None:
        self._model = model
        self._begin = (Turn("system", system),) if system else ()
        self._turns = self._begin
        self._answer = Static()
        self.pieces: list[str] = []
        """What was written of the answer. ``draw`` shows it."""
        self.writing = False
        """Whether its answer is being written."""
        super().__init__(id=model.side)

    def compose(self) -> ComposeResult:
        model = self._model
        name = model.name.rstrip("/").rpartition("/")[2] or model.name
        step = "" if model.step is None else f", step {thousands(model.step)}"
        called = shorten(f"{name}{step}", 60), "$faint"
        yield Rule(Content.assemble((f"{model.side}  ", "bold $accent"), called))

    def ask(self, text: str) -> Prompt:
        """Show a question, with room for its answer, and return what the model is asked."""
        self.writing, self.pieces = True, []
        self._turns = (*self._turns, Turn("user", text))
        question = Content.assemble(("> ", "bold $accent"), (text, "bold"))
        self._answer = Static(classes="chat-answer")
        self.mount(Static(question, classes="chat-question"), self._answer)
        return Prompt(side=self._model.side, turns=self._turns)

    def draw(self, ending: str | Content = "") -> None:
        """Show what was written, and how it ended if it has."""
        self._answer.update(Content.assemble("".join(self.pieces), ending))
        self.scroll_end(animate=False)

    def end(self, answer: str | None, ending: Content) -> None:
        """End the answer; None takes the question back."""
        self.writing = False
        self._turns = (
            self._turns[:-1] if answer is None else (*self._turns, Turn("assistant", answer))
        )
        self.draw(Content.assemble("\n", ending))

    def forget(self) -> None:
        """Remove the conversation."""
        self._turns = self._begin
        self.query(".chat-question, .chat-answer").remove()


class ChatScreen(ModalScreen[None]):
    """A conversation with a run's newest checkpoint or a model's folder.

    It is modal: keys of the application, one of which leaves it, must not act on what is typed
    while no field has the focus.
    """

    CSS_PATH = "screen.tcss"
    AUTO_FOCUS = "#question"
    BINDINGS = keys("chat")

    def __init__(self, load: LoadModel, sampling: Sampling, system: str = "") -> None:
        """Load a model, which begins when the screen is shown.

        Args:
            load: Which model.
            sampling: How it answers, to begin with.
            system: A system message.
        """
        self._load, self._sampling, self._system = load, sampling, system
        self._end = threading.Event()
        self._process: ModelProcess | None = None
        self._columns: dict[Side, _Column] = {}
        self._stopping = False
        """Whether the answers were asked to stop and still have not."""
        self._loading: tuple[str, float] | None = None
        """What is loaded, and since when (monotonic seconds); None once that has ended."""
        self._early = False
        """Whether the question in the field is to be asked once the model is loaded."""
        super().__init__()

    @property
    def writing(self) -> bool:
        """Whether an answer is being written."""
        return any(column.writing for column in self._columns.values())

    def compose(self) -> ComposeResult:
        with Vertical(id="chat"):
            yield Static(id="chat-title")
            yield Static(id="chat-sampling")
            yield Horizontal(id="chat-columns")
            yield Input(
                id="question",
                compact=True,
                max_length=_LONGEST_QUESTION,
                placeholder="ask something: it is answered once the model is loaded",
            )
        yield KeyLine()

    def on_mount(self) -> None:
        self._loading = "starting the helper process", time.monotonic()
        self._show_loading()
        self._show_sampling()
        self.set_interval(DRAW_S, self._draw)
        self._converse()

    @work(thread=True, group="chat", name="load and ask the model", exit_on_error=False)
    def _converse(self) -> None:
        from so_tui.launch.helper_jobs import ModelProcess

        try:
            with contextlib.closing(ModelProcess(self._load, self._end)) as process:
                self.call_later(setattr, self, "_process", process)
                for event in process.events():
                    self.call_later(self._take, event)
        except SoTuiError as error:
            self.call_later(self._fail, str(error))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if text := unexpected_error(event):
            self._fail(text)

    def on_unmount(self) -> None:
        self._end.set()

    # What the helper says.

    async def _take(self, event: Event) -> None:
        if isinstance(event, Progress) and self._loading is not None:
            self._loading = event.message, self._loading[1]
            self._show_loading()
        elif isinstance(event, Loaded):
            await self._show_models(event)
        elif isinstance(event, Piece):
            self._columns[event.side].pieces.append(event.text)
        elif isinstance(event, Answer):
            tokens, took = plural(event.tokens, "token"), duration(event.seconds)
            ending = faint(f"{tokens} in {took}{_ENDS[event.ended]}")
            self._columns[event.side].end(event.text, ending)
        elif isinstance(event, Rejected):
            ending = Content.styled(f"✗ {event.problem}", "$error")
            self._columns[event.side].end(None, ending)

    async def _show_models(self, loaded: Loaded) -> None:
        self._columns = {model.side: _Column(model, self._system) for model in loaded.models}
        await self.query_one("#chat-columns").mount_all(self._columns.values())
        self._loading = None
        where = faint(f"on {loaded.device}, in {loaded.layout}")
        self._show_title(Content.assemble(where, (_expected(loaded), "$warning")))
        question = self.query_one("#question", Input)
        question.placeholder = "ask something, then enter"
        if self._early:
            self._ask(question.value)

    def _fail(self, problem: str) -> None:
        """Say that the helper process has ended with an error."""
        self._process = self._loading = None
        for column in self._columns.values():
            column.writing = False
        self.query_one("#question", Input).disabled = True
        self._show_title(Content.assemble(("✗ ", "bold $error"), problem))

    def _draw(self) -> None:
        for column in self._columns.values():
            if column.writing:
                column.draw()
        if self._loading is not None:
            self._show_loading()

    def _show_loading(self) -> None:
        """Say what is loaded and how long that has taken."""
        assert self._loading is not None
        what, since = self._loading
        taken = age(time.monotonic() - since)
        early = "   your question is asked then" if self._early else ""
        self._show_title(Content.assemble((f"{what} …  {taken}", "$faint"), early))

    def _show_title(self, text: Content) -> None:
        self.query_one("#chat-title", Static).update(Content.assemble(("Chat  ", "bold"), text))

    def _show_sampling(self) -> None:
        system = f"  system: {shorten(self._system, 40)}" if self._system else ""
        self.query_one("#chat-sampling", Static).update(
            faint(_sampling_text(self._sampling) + system)
        )

    # Commands.

    @on(Input.Changed, "#question")
    def _typed(self) -> None:
        self._early = False  # it is still being written

    @on(Input.Submitted, "#question")
    def _submitted(self, event: Input.Submitted) -> None:
        if self._loading is not None:
            self._early = bool(event.value.strip())
        else:
            self._ask(event.value)

    def _ask(self, text: str) -> None:
        text = text.strip()
        if text and self._process is not None and self._columns and not self.writing:
            self.query_one("#question", Input).clear()
            self._process.ask(
                [column.ask(text) for column in self._columns.values()], self._sampling
            )
            self._stopping = False

    def action_stop_or_leave(self) -> None:
        if self.writing and self._process is not None and not self._stopping:
            self._process.cancel()
            self._stopping = True
        else:  # which ends the process, also one that does not stop
            self.dismiss(None)

    def action_sampling(self) -> None:
        from so_tui.ui.dialogs import AskText, show_dialog

        def answered(sampling: Sampling) -> None:
            self._sampling = sampling
            self._show_sampling()

        dialog = AskText(
            "Sampling",
            "temperature=0 takes the most probable token; the same seed gives the same answer",
            Input(_sampling_text(self._sampling), compact=True),
            yes="Use",
            read=_read_sampling,
        )
        show_dialog(self.app, dialog, answered)

    def action_forget(self) -> None:
        if not self.writing:
            for column in self._columns.values():
                column.forget()

    def action_scroll(self, direction: int) -> None:
        for column in self._columns.values():
            column.scroll_relative(y=direction * (column.size.height - 1), animate=False)


def _expected(loaded: Loaded) -> str:
    """Return a warning that nonsense is to be expected; empty unless it is."""
    return next(
        (
            f"   {plural(model.step, 'step')} from random weights: expect nonsense"
            for model in loaded.models
            if model.random and model.step is not None and model.step < _FEW_STEPS
        ),
        "",
    )


class ChatApp(SettingsApp):
    """The application of ``so-tui chat``, which has only this screen."""

    TITLE = "so-tui chat"
    CSS_PATH = "../app.tcss"

    def __init__(self, chat: ChatScreen, settings: LoadedSettings) -> None:
        self._chat = chat
        super().__init__(settings)

    def on_mount(self) -> None:
        self.report_settings()
        self.push_screen(self._chat, lambda _: self.exit())
