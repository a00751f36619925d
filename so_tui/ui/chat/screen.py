"""Ask a model, and its base model beside it: answers appear as a helper process writes them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
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
from so_tui.ui.textual_fixes import Entry
from so_tui.ui.widgets import KeyLine, Rule
from so_tui.units import duration, plural, thousands

if TYPE_CHECKING:
    from so_tui.launch.helper import Cancel
    from so_tui.launch.helper_jobs import ModelProcess
    from so_tui.settings_file import Loaded as LoadedSettings


# What was said so far to each model. Models are asked the same, and each goes on from its own
# answers.


class _Conversation:
    """The turns of one conversation with one or two models."""

    def __init__(self, system: str = "") -> None:
        self._begin = (Turn("system", system),) if system else ()
        self._turns: dict[Side, tuple[Turn, ...]] = {}

    def ask(self, side: Side, text: str) -> Prompt:
        """Add a question, and return what the model is asked."""
        self._turns[side] = (*self._turns.get(side, self._begin), Turn("user", text))
        return Prompt(side=side, turns=self._turns[side])

    def answered(self, side: Side, text: str) -> None:
        """Add an answer."""
        self._turns[side] = (*self._turns[side], Turn("assistant", text))

    def take_back(self, side: Side) -> None:
        """Remove the last question, which was not answered."""
        self._turns[side] = self._turns[side][:-1]


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
_ENDS: dict[Ended, str] = {
    "stop": "",
    "length": ", cut off at max-tokens",
    "context": ", cut off at the model's longest sequence",
    "cancelled": ", stopped",
}


class Column(VerticalScroll, can_focus=False):
    """One model's side of the conversation."""

    def __init__(self, model: ModelFacts) -> None:
        self.model = model
        self._answer = Static()
        self._pieces: list[str] = []
        super().__init__(id=model.side)

    def compose(self) -> ComposeResult:
        model = self.model
        name = model.name.rstrip("/").rpartition("/")[2] or model.name
        step = "" if model.step is None else f", step {thousands(model.step)}"
        called = shorten(f"{name}{step}", 60), "$faint"
        yield Rule(Content.assemble((f"{model.side}  ", "bold $accent"), called))

    def ask(self, text: str) -> None:
        """Show a question, with room for its answer."""
        self._pieces, self._answer = [], Static(classes="chat-answer")
        self.mount(
            Static(
                Content.assemble(("> ", "bold $accent"), (text, "bold")), classes="chat-question"
            ),
            self._answer,
        )

    def write(self, piece: str) -> None:
        """Add to the answer. ``draw`` shows it."""
        self._pieces.append(piece)

    def draw(self, ending: Content | None = None) -> None:
        """Show what was written, and how it ended if it has."""
        text = Content("".join(self._pieces))
        self._answer.update(text if ending is None else Content.assemble(text, "\n", ending))
        self.scroll_end(animate=False)

    def clear(self) -> None:
        """Remove the conversation."""
        self.query(".chat-question, .chat-answer").remove()


class ChatScreen(Screen[None]):
    """A conversation with a run's newest checkpoint or a model's folder."""

    CSS_PATH = "screen.tcss"
    AUTO_FOCUS = "#question"
    BINDINGS = [
        Binding(
            "escape",
            "stop_or_leave",
            "Stop, leave",
            tooltip="Stop the answers that are being written; without any, leave",
        ),
        Binding("f2", "sampling", "Sampling", tooltip="Temperature, top-p, longest answer, seed"),
        Binding("f3", "forget", "New conversation", tooltip="Forget what was said"),
        Binding("pageup", "scroll(-1)", "Back", show=False),
        Binding("pagedown", "scroll(1)", "Forward", show=False),
    ]

    def __init__(self, load: LoadModel, sampling: Sampling, system: str = "") -> None:
        """Load a model, which begins when the screen is shown.

        Args:
            load: Which model.
            sampling: How it answers, to begin with.
            system: A system message.
        """
        self._load, self._sampling, self._system = load, sampling, system
        self._conversation = _Conversation(system)
        self._process: ModelProcess | None = None
        self._end: Cancel | None = None
        self._loaded: Loaded | None = None
        self._waiting: set[Side] = set()
        """The models whose answers are being written."""
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(id="chat"):
            yield Static(id="chat-title")
            yield Static(id="chat-sampling")
            yield Horizontal(id="chat-columns")
            yield Entry(
                id="question",
                compact=True,
                disabled=True,
                max_length=_LONGEST_QUESTION,
                placeholder="the model is being loaded",
            )
        yield KeyLine()

    def on_mount(self) -> None:
        from so_tui.launch.helper import Cancel

        self._end = Cancel()
        self._show_title(faint("starting the helper process …"))
        self._show_sampling()
        self.set_interval(DRAW_S, self._draw)
        self._converse(self._end)

    @work(thread=True, group="chat", name="load and ask the model", exit_on_error=False)
    def _converse(self, end: Cancel) -> None:
        from so_tui.launch.helper_jobs import ModelProcess

        try:
            with contextlib.closing(ModelProcess(self._load, end)) as process:
                self.call_later(setattr, self, "_process", process)
                for event in process.events():
                    self.call_later(self._take, event)
        except SoTuiError as error:
            self.call_later(self._fail, str(error))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if text := unexpected_error(event):
            self._fail(text)

    def on_unmount(self) -> None:
        if self._end is not None:
            self._end()

    # What the helper says.

    async def _take(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._show_title(faint(f"{event.message} …"))
        elif isinstance(event, Loaded):
            await self._show_models(event)
        elif isinstance(event, Piece):
            self._column(event.side).write(event.text)
        elif isinstance(event, Answer):
            self._conversation.answered(event.side, event.text)
            said = (
                f"{plural(event.tokens, 'token')} in {duration(event.seconds)}{_ENDS[event.ended]}"
            )
            self._end_answer(event.side, faint(said))
        elif isinstance(event, Rejected):
            self._conversation.take_back(event.side)
            self._end_answer(event.side, Content.styled(f"✗ {event.problem}", "$error"))

    async def _show_models(self, loaded: Loaded) -> None:
        self._loaded = loaded
        await self.query_one("#chat-columns").mount_all([Column(model) for model in loaded.models])
        self._show_title(faint(f"on {loaded.device}, in {loaded.layout}"))
        question = self.query_one("#question", Entry)
        question.disabled, question.placeholder = False, "ask something, then enter"
        self.set_focus(question)

    def _fail(self, problem: str) -> None:
        """Say that the helper process has ended with an error."""
        self._waiting.clear()
        self._process = None
        self.query_one("#question", Entry).disabled = True
        self._show_title(Content.assemble(("✗ ", "bold $error"), problem))

    def _end_answer(self, side: Side, ending: Content) -> None:
        self._waiting.discard(side)
        self._column(side).draw(ending)

    def _draw(self) -> None:
        for side in self._waiting:
            self._column(side).draw()

    def _column(self, side: Side) -> Column:
        return self.query_one(f"#{side}", Column)

    def _show_title(self, text: Content) -> None:
        self.query_one("#chat-title", Static).update(Content.assemble(("Chat  ", "bold"), text))

    def _show_sampling(self) -> None:
        system = f"  system: {shorten(self._system, 40)}" if self._system else ""
        self.query_one("#chat-sampling", Static).update(
            faint(_sampling_text(self._sampling) + system)
        )

    # Commands.

    @on(Input.Submitted, "#question")
    def _ask(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if not text or self._waiting or self._process is None or self._loaded is None:
            return
        event.input.clear()
        sides = [model.side for model in self._loaded.models]
        for side in sides:
            self._column(side).ask(text)
        self._waiting = set(sides)
        self._process.ask([self._conversation.ask(side, text) for side in sides], self._sampling)

    def action_stop_or_leave(self) -> None:
        if self._waiting and self._process is not None:
            self._process.cancel()
        else:
            self.dismiss(None)

    def action_sampling(self) -> None:
        from so_tui.ui.dialogs import AskText

        def answered(sampling: Sampling | None) -> None:
            if sampling is not None:
                self._sampling = sampling
                self._show_sampling()

        hint = "temperature=0 takes the most probable token; the same seed gives the same answer"
        self.app.push_screen(
            AskText(
                "Sampling", hint, _sampling_text(self._sampling), yes="Use", read=_read_sampling
            ),
            answered,
        )

    def action_forget(self) -> None:
        if not self._waiting:
            self._conversation = _Conversation(self._system)
            for column in self.query(Column):
                column.clear()

    def action_scroll(self, direction: int) -> None:
        for column in self.query(Column):
            column.scroll_relative(y=direction * (column.size.height - 1), animate=False)


class ChatApp(SettingsApp):
    """The application of ``so-tui chat``, which has only this screen."""

    TITLE = "so-tui chat"
    CSS_PATH = "../app.tcss"

    def __init__(
        self,
        load: LoadModel,
        sampling: Sampling,
        system: str = "",
        settings: LoadedSettings | None = None,
    ) -> None:
        self._chat = ChatScreen(load, sampling, system)
        super().__init__(settings)

    def on_mount(self) -> None:
        self.report_settings()
        self.push_screen(self._chat, lambda _: self.exit())
