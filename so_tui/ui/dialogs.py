"""Questions and answers over a screen: yes or no, a name, what went wrong, the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from msgspec.structs import replace
from textual import events, getters, on, work
from textual.app import App, ComposeResult, SuspendNotSupported
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, OptionList, Static
from textual.worker import Worker

from so_tui.folders import settings_file
from so_tui.settings import Settings
from so_tui.settings_file import setting_index
from so_tui.spec.errors import InputError, SoTuiError
from so_tui.ui.form import problem_texts
from so_tui.ui.messages import answer, unexpected_error
from so_tui.ui.text import Content, faint, hanging, in_rows, shorten_path, wrong
from so_tui.ui.themes import THEMES
from so_tui.ui.widgets import keys
from so_tui.units import plural

if TYPE_CHECKING:
    from so_tui.launch.slurm.script import Draft
    from so_tui.plan.plan import Launch

Answer = TypeVar("Answer")


CLOSE = "screen.dismiss(None)"
"""The action of a button that closes a dialog as esc does. Every dialog has such a button, for the
mouse; its label names the key.
"""


def button(label: str, id: str | None, action: str) -> Button:
    """Return a button of a dialog, which runs an action."""
    return Button(Content(label), id=id, compact=True, action=action)


def dialog(
    title: str | Content, *parts: Widget, buttons: Iterable[Widget], classes: str = "dialog"
) -> Vertical:
    """Return the frame of a dialog: its title, its parts below each other, and its buttons."""
    heading = Static(Content(title) if isinstance(title, str) else title, classes="dialog-title")
    row = Horizontal(*buttons, classes="dialog-buttons")
    return Vertical(heading, *parts, row, classes=classes)


def show_dialog(
    app: App[Any], dialog: ModalScreen[Answer | None], then: Callable[[Answer], object]
) -> None:
    """Show ``dialog``, and hand over what was answered, unless it was left."""

    def answered(answer: Answer | None) -> Any:
        return None if answer is None else then(answer)

    app.push_screen(dialog, answered)


class Dialog(ModalScreen[Answer]):
    """A dialog, which says itself if what it does in a thread fails unexpectedly."""

    CSS_PATH: ClassVar[str | Path] = Path(__file__).with_name("dialogs.tcss")
    """Absolute, because dialogs of screens inherit it and Textual looks in the folder of the class
    that is shown.
    """

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if text := unexpected_error(event):
            self.call_later(self.fail, text)

    def fail(self, problem: str) -> Any:
        """Show why nothing comes of it."""
        self.say(wrong(problem))

    def say(self, text: Content | str) -> None:
        """Show a line below what was asked."""
        self.query_one("#said", Static).update(text)


class Question(Dialog[bool | None]):
    """A yes or no question. Where yes destroys or ends something, ``default_yes`` is False and
    enter answers no.
    """

    BINDINGS = keys("question")

    def __init__(
        self,
        title: str,
        lines: Sequence[str | Content],
        *,
        yes: str,
        no: str = "No",
        default_yes: bool = False,
        id: str | None = None,
    ) -> None:
        self._title, self._lines = title, lines
        self._yes, self._no, self._default_yes = yes, no, default_yes
        super().__init__(id=id)

    def compose(self) -> ComposeResult:
        lines = [Static(Content(line) if isinstance(line, str) else line) for line in self._lines]
        body = VerticalScroll(*lines, classes="dialog-body", can_focus=False)
        yield dialog(self._title, body, *self.fields(), buttons=self.buttons())

    def fields(self) -> list[Widget]:
        """Return what stands between the lines and the buttons."""
        return []

    def buttons(self) -> list[Button]:
        """Return the buttons."""
        return [
            button(f"{self._yes}  y", "yes", "screen.answer(True)"),
            button(f"{self._no}  n", "no", "screen.answer(False)"),
        ]

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#yes" if self._default_yes else "#no"))

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class AskText(Dialog[Answer | None]):
    """Asks for a line of text, or for a few. The result is what ``read`` returns for them, or None
    when the dialog was cancelled.

    What was typed stays until ``read`` accepts it. A choice that is clicked, or reached with up and
    down, is entered into the field.
    """

    BINDINGS = keys("text")

    def __init__(
        self,
        title: str,
        hint: str,
        *entries: Input,
        yes: str,
        read: Callable[..., Answer],
        may_be_empty: bool = False,
        choices: Sequence[tuple[str, str]] = (),
        slow: str = "",
    ) -> None:
        """Ask.

        Args:
            title: What is asked for.
            hint: What can be given.
            entries: The fields.
            yes: What is done with the answer.
            read: Makes the answer of the texts in the fields. Raises SoTuiError.
            may_be_empty: Whether ``read`` takes an empty first field.
            choices: Texts to enter, each with what it means; only that is shown of an empty one.
            slow: What ``read`` does with the first text, ``{}``, where that takes a while: it is
                called in a thread then.
        """
        self._title, self._hint, self._entries, self._yes = title, hint, entries, yes
        self._read, self._may_be_empty, self._choices = read, may_be_empty, choices
        self._slow, self._reading = slow, False
        super().__init__()

    def compose(self) -> ComposeResult:
        yield dialog(
            self._title,
            Static(Content(self._hint), classes="faint"),
            *([self._list()] if self._choices else []),
            *self._entries,
            Static(id="said", classes="dialog-answer"),
            buttons=[
                button(f"{self._yes}  enter", "yes", "screen.submit"),
                button("Cancel  esc", "no", CLOSE),
            ],
        )

    def _list(self) -> OptionList:
        """Return the choices; the keyboard stays in the field."""
        texts = [text for text, _ in self._choices]
        width = max(map(len, texts))
        lines = [
            Content.assemble(f"{text:<{width}}  " if text else "", (meaning, "$faint"))
            for text, meaning in self._choices
        ]
        listed = OptionList(*lines, compact=True, classes="choices")
        listed.can_focus = False
        present = self._entries[0].value
        listed.highlighted = texts.index(present) if present in texts else None
        return listed

    def on_mount(self) -> None:
        self.set_focus(self._entries[0])
        if self._choices:  # another is typed over the present one
            self.call_after_refresh(self._entries[0].action_select_all)

    def action_choose(self, way: Literal["up", "down"]) -> None:
        for listed in self.query(OptionList):
            listed.action_cursor_down() if way == "down" else listed.action_cursor_up()

    @on(OptionList.OptionHighlighted)
    def _chosen(self, event: OptionList.OptionHighlighted) -> None:
        entry, text = self._entries[0], self._choices[event.option_index][0]
        if entry.value != text:  # the present text stays selected
            entry.value = text
            entry.cursor_position = len(text)

    @on(Input.Submitted)
    def action_submit(self) -> None:
        texts = [entry.value.strip() for entry in self._entries]
        if self._reading or not (texts[0] or self._may_be_empty):
            return
        if self._slow and texts[0]:
            self._reading = True
            self.say(faint(self._slow.format(texts[0])))
            self._judge_in_thread(texts)
        else:
            self._judge(texts)()

    def _judge(self, texts: Sequence[str]) -> Callable[[], object]:
        """Read the texts, and return what to do then."""
        try:
            return partial(self._accept, self._read(*texts))
        except SoTuiError as error:
            return partial(self.fail, problem_texts(error))

    @work(thread=True, group="ask", name="read an answer", exit_on_error=False)
    def _judge_in_thread(self, texts: Sequence[str]) -> None:
        answer(self, self._judge(texts))

    def _accept(self, answer: Answer) -> None:
        self.dismiss(answer)  # not returned: awaiting it here is an error

    def fail(self, problem: str) -> None:
        self._reading = False
        super().fail(problem)
        self.set_focus(self._entries[0])


Laid = Callable[[int], Content]
"""Text laid out for a number of cells, as a table is."""
COPIED_WIDTH = 160
"""Cells of a table in the clipboard."""


class _LaidOut(Static):
    """Text that is laid out again for each width."""

    def __init__(self, lay: Laid) -> None:
        self._lay = lay
        super().__init__(lay(1))

    def on_resize(self) -> None:
        self.update(self._lay(self.size.width))


class Notice(Dialog[bool]):
    """What happened, why, and what to do next. The result is True when the offered action was
    chosen.
    """

    BINDINGS = keys("notice")

    def __init__(
        self, title: str, lines: Sequence[str | Laid], *, offer: str = "", bad: bool = True
    ) -> None:
        self._title, self._lines, self._offer, self._bad = title, lines, offer, bad
        super().__init__()

    def compose(self) -> ComposeResult:
        table = any(map(callable, self._lines))
        lines = (
            Static(Content(line), classes="dialog-line")
            if isinstance(line, str)
            else _LaidOut(line)
            for line in self._lines
        )
        yield dialog(
            f"{'✗ ' if self._bad else ''}{self._title}",
            VerticalScroll(*lines, classes="dialog-body"),
            buttons=[
                button("Close  esc", "close", "screen.dismiss(False)"),
                button("Copy  y", "copy", "screen.copy"),
                *([button(self._offer, "offer", "screen.dismiss(True)")] if self._offer else []),
            ],
            classes=f"dialog{' -bad' if self._bad else ''}{' -table' if table else ''}",
        )

    def action_copy(self) -> None:
        lines = [line if isinstance(line, str) else str(line(COPIED_WIDTH)) for line in self._lines]
        self.app.copy_to_clipboard("\n".join((self._title, *lines)))
        self.notify("Copied")


KeyRow = tuple[str, str, str]
"""Keys, name and details of a command."""
KeyGroup = tuple[str, Sequence[KeyRow]]
"""Commands under a heading."""


def key_lines(groups: Sequence[KeyGroup], width: int) -> Content:
    """Return commands in lines of ``width`` cells, what they do beside the keys."""
    lines: list[Content] = []
    for heading, rows in groups:
        keys_width = max((len(pressed) for pressed, _, _ in rows), default=0) + 4
        lines += [Content(""), Content.styled(heading, "bold $faint")]
        for pressed, name, tip in rows:
            shown = Content.styled(f"  {pressed}".ljust(keys_width), "$accent")
            more = f"  {tip}" if tip not in ("", name) else ""
            lines += hanging(shown, Content.assemble(name, (more, "$faint")), width)
    return in_rows(lines[1:])


# The question before a launch, which may name the run; before a job is submitted, with its batch
# script for editing.


_CHANGED = "You have changed the batch script. It is submitted as you saved it."


class LaunchQuestion(Question):
    """Asks whether to launch, and what the run is called. While that cannot be a name, the answer
    is not yes.
    """

    BINDINGS = keys("launch")

    draft: Draft | None = None
    """The user's batch script; None while a job is not asked about, or has the one that so-tui
    writes.
    """

    def __init__(self, title: str, lines: Sequence[str | Content], launch: Launch) -> None:
        self.launch = launch
        super().__init__(title, lines, yes="Launch", default_yes=True)

    def fields(self) -> list[Widget]:
        name = f"name of the run: {self.launch.spec.name}"
        said = Static(id="said", classes="dialog-answer")
        said.display = False
        return [Input(self.launch.called, placeholder=name, compact=True, id="called"), said]

    def buttons(self) -> list[Button]:
        return [*super().buttons(), button("Rename  r", "rename", "screen.rename")]

    def action_rename(self) -> None:
        """Give the keyboard to the name."""
        self.set_focus(self.query_one("#called"))

    def on_descendant_focus(self) -> None:
        """Say with which key the answer is yes: y would be typed into the name."""
        yes = self.query_one("#yes", Button)
        yes.label = "Launch  enter" if isinstance(self.focused, Input) else "Launch  y"
        yes.refresh(layout=True)

    @on(Input.Changed, "#called")
    def _typed(self) -> None:
        self.query_one("#said").display = False

    @on(Input.Submitted, "#called")
    def _named(self) -> None:
        self.action_answer(True)

    def action_answer(self, answer: bool) -> None:
        """Leave with the answer; with yes, the launch has the name that was typed, if it can."""
        from so_tui.runs import checked_name

        entry, said = self.query_one("#called", Input), self.query_one("#said", Static)
        text = entry.value.strip()
        try:
            if answer:
                self.launch = replace(self.launch, called=checked_name(text) if text else "")
        except InputError as error:
            said.display = True
            said.update(wrong(problem_texts(error)))
            self.set_focus(entry)
        else:
            self.dismiss(answer)


class JobQuestion(LaunchQuestion):
    """Asks whether to submit a launch."""

    BINDINGS = keys("job")

    def __init__(
        self, title: str, lines: Sequence[str | Content], launch: Launch, draft: Draft | None
    ) -> None:
        self.draft = draft
        super().__init__(title, [*lines, _CHANGED], launch)

    def buttons(self) -> list[Button]:
        return [*super().buttons(), button("Edit the script  e", "edit", "screen.edit")]

    def on_mount(self) -> None:
        super().on_mount()
        self._show_draft()

    def _show_draft(self) -> None:
        self.query(".dialog-body Static").last(Static).display = self.draft is not None

    def action_edit(self) -> None:
        """Open the script in the user's editor, which has the terminal until it ends."""
        failure = ""
        try:
            with self.app.suspend():
                try:  # an exception that left this block would leave the terminal with the editor
                    self.draft = self._edited()
                except (SoTuiError, OSError) as error:
                    failure = str(error)
        except SuspendNotSupported:
            failure = (
                "This terminal cannot be lent to an editor. Leave the screen and use `so-tui run "
                "--edit`."
            )
        if failure:
            self.notify(failure, title="The script is as it was", severity="error", markup=False)
        self._show_draft()

    def _edited(self) -> Draft | None:
        """Return the script that the user saves; None if it is the generated one."""
        from so_tui.launch.executors import executor_of
        from so_tui.launch.slurm.script import edited, kept

        generated = executor_of(self.launch.spec).preview(self.launch)
        saved = edited(self.draft.script if self.draft else generated)
        if saved != generated:
            return kept(saved, self.launch.spec.name, self.draft)
        if self.draft:
            self.draft.path.unlink(missing_ok=True)
        return None


# The settings that are changed in the application: a line each, with the values that it can take.


SHOWN = (
    "screen.theme",
    "screen.glyphs",
    "screen.units",
    "screen.layout",
    "keys.style",
    "alerts.bell",
    "alerts.notify",
    "alerts.title",
)
LATER = ("screen.glyphs", "screen.layout")
"""Settings that take effect when so-tui is opened the next time."""
MORE = (
    "That file has more: other keys, when to alert, a command to run. `so-tui settings` lists it."
)
_LABEL = 16


class SettingsDialog(Dialog[dict[str, Any] | None]):
    """Change settings; the result is what was changed, by key. The theme is shown at once."""

    BINDINGS = keys("settings")

    def __init__(self, settings: Settings, themes: Iterable[str]) -> None:
        own = [theme.name for theme in THEMES]
        self._before = {key: attrgetter(key)(settings) for key in SHOWN}
        self._chosen = dict(self._before)
        self._themes = (*own, *sorted(set(themes).difference(own)))
        super().__init__()

    def compose(self) -> ComposeResult:
        file = shorten_path(str(settings_file()), 60)
        keys = f"left, right, enter or a click change; esc keeps them in {file}"
        yield dialog(
            "Settings",
            OptionList(*map(self._line, SHOWN), classes="settings"),
            Static(id="about", classes="dialog-answer"),
            *(Static(faint(line), classes="dialog-line") for line in (keys, MORE)),
            buttons=[button("Keep and close  esc", "close", "screen.close")],
            classes="dialog -wide",
        )

    def _line(self, key: str) -> Content:
        value = self._chosen[key]
        shown = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        return Content.assemble(f"{key:<{_LABEL}} ", (f"{shown} ▸", "bold"))

    @on(OptionList.OptionHighlighted)
    def _moved(self, event: OptionList.OptionHighlighted) -> None:
        key = SHOWN[event.option_index]
        about = setting_index()[key].description.partition(":")[0]
        later = ", from the next start on" if key in LATER else ""
        self.query_one("#about", Static).update(faint(about + later))

    def action_step(self, by: int) -> None:
        options = self.query_one(OptionList)
        if (at := options.highlighted) is None:
            return
        key = SHOWN[at]
        values: tuple[str | bool, ...] = setting_index()[key].choices or (True, False)
        if key == "screen.theme":
            values = self._themes
        present = values.index(self._chosen[key]) if self._chosen[key] in values else -1
        self._chosen[key] = values[(present + by) % len(values)]
        options.replace_option_prompt_at_index(at, self._line(key))
        if key == "screen.theme":
            self.app.theme = self._chosen[key]

    @on(OptionList.OptionSelected)
    def _selected(self) -> None:
        self.action_step(1)

    def action_close(self) -> None:
        changes = {key: value for key, value in self._chosen.items() if value != self._before[key]}
        self.dismiss(changes or None)


# A list of things to tick: whether one is ticked is seen without colour, too.


Item = TypeVar("Item")


class TickList(OptionList, Generic[Item]):
    """Ticked items keep the order in which they were ticked, also those that are not listed now."""

    BINDINGS = keys("ticks")
    DEFAULT_CSS = """
    TickList {
        height: auto; max-height: 14; border: none; background: $surface; padding: 0; margin: 1 0;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    """

    class Changed(Message):
        """Something was ticked, or not any more."""

    def __init__(self, ticked: Iterable[Item], *, id: str | None = None) -> None:
        self.ticked = list(ticked)
        self._listed: list[tuple[Item, Content]] = []
        super().__init__(id=id, compact=True)

    def list_items(self, items: Sequence[tuple[Item, Content]]) -> None:
        """List these items, each with its text."""
        self._listed = list(items)
        self.set_options([self._line(item, text) for item, text in self._listed])
        self.action_first()

    def _line(self, item: Item, text: Content) -> Content:
        return Content.assemble(
            ("✓ ", "$success") if item in self.ticked else ("· ", "$faint"), text
        )

    def _tick(self, items: Sequence[Item], ticked: bool) -> None:
        self.ticked = [item for item in self.ticked if ticked or item not in items]
        self.ticked += [item for item in items if ticked and item not in self.ticked]
        for index, (item, text) in enumerate(self._listed):
            if item in items:
                self.replace_option_prompt_at_index(index, self._line(item, text))
        self.post_message(self.Changed())

    def action_select(self) -> None:  # what a click does
        if self.highlighted is not None:
            item = self._listed[self.highlighted][0]
            self._tick([item], item not in self.ticked)

    def action_tick_all(self, ticked: bool) -> None:
        self._tick([item for item, _ in self._listed], ticked)


# A dialog in which things are ticked, filtered while something is typed.


class TickDialog(Dialog[Answer | None], Generic[Answer, Item]):
    """Has an input ``filter``, a list of things to tick, and a line ``said``, which the dialog that
    builds on it composes.
    """

    BINDINGS = keys("tick-dialog")

    ticks = getters.query_one(TickList)

    def __init__(self, items: Sequence[tuple[Item, Content, str]], noun: str) -> None:
        """Let these items be ticked, each with its text and with what the filter looks for."""
        self._items, self._noun = items, noun
        super().__init__()

    def buttons(self, yes: str) -> list[Button]:
        """Return the buttons below the list; ``yes`` says what is done with what is ticked."""
        return [
            button(f"{yes}  enter", "yes", "screen.apply"),
            button("No change  esc", "no", CLOSE),
        ]

    @on(events.Mount)
    @on(Input.Changed, "#filter")
    def _list(self) -> None:
        """List what the filter finds."""
        wanted = self.query_one("#filter", Input).value.lower()
        self.ticks.list_items([item[:2] for item in self._items if wanted in item[2].lower()])
        self.tell()

    @on(TickList.Changed)
    def tell(self) -> None:
        ticked = f"{plural(len(self.ticks.ticked), self._noun)} ticked"
        self.say(ticked if self._items else f"There is no other {self._noun} yet.")

    @on(Input.Submitted, "#filter")
    def _to_the_list(self) -> None:
        self.set_focus(self.ticks)
