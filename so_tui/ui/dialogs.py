"""Questions and answers over a screen: yes or no, a name, what went wrong, the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from msgspec.structs import replace
from textual import events, on, work
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.style import Style
from textual.suggester import Suggester
from textual.widget import Widget
from textual.widgets import Button, Input, OptionList, Static
from textual.worker import Worker, get_current_worker

from so_tui.folders import settings_file
from so_tui.settings import Settings
from so_tui.settings_file import setting_index, value_of
from so_tui.spec.errors import InputError
from so_tui.ui.form import problem_texts
from so_tui.ui.messages import unexpected_error
from so_tui.ui.text import Content, faint, in_rows, shorten_path, wrong
from so_tui.ui.textual_fixes import Entry
from so_tui.ui.themes import THEMES

if TYPE_CHECKING:
    from so_tui.launch.slurm.script import Draft
    from so_tui.plan.plan import Launch

_STYLES = Path(__file__).with_name("dialogs.tcss")
"""Absolute, because dialogs of screens inherit it and Textual looks beside the class that is
shown.
"""


Answer = TypeVar("Answer")


def button(label: str, id: str | None, action: str | None = None) -> Button:
    """Return a button of a dialog; without an ``action``, the dialog itself answers the press."""
    return Button(Content(label), id=id, compact=True, action=action)


def dialog(
    title: str | Content, *parts: Widget, buttons: Iterable[Widget], classes: str = "dialog"
) -> Vertical:
    """Return the frame of a dialog: its title, its parts below each other, and its buttons."""
    heading = Static(Content(title) if isinstance(title, str) else title, classes="dialog-title")
    row = Horizontal(*buttons, classes="dialog-buttons")
    return Vertical(heading, *parts, row, classes=classes)


class CloseButton(Button):
    """The way out of a dialog that a mouse takes. Every dialog has one; the keyboard has esc."""

    def __init__(
        self,
        label: str = "Close  esc",
        *,
        id: str = "close",
        action: str | None = "screen.dismiss(None)",
    ) -> None:
        """``action`` is run on the dialog; None where the dialog itself answers the press."""
        super().__init__(Content(label), id=id, compact=True, action=action)


class Question(ModalScreen[bool]):
    """A yes or no question. Where yes destroys or ends something, ``default_yes`` is False and
    enter answers no.
    """

    CSS_PATH = _STYLES
    BINDINGS = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
        Binding("left,right", "app.focus_next", "Other button", show=False),
    ]

    def __init__(
        self,
        title: str,
        lines: Sequence[str | Content],
        *,
        yes: str,
        no: str = "No",
        default_yes: bool = False,
    ) -> None:
        self._title, self._lines = title, lines
        self._yes, self._no, self._default_yes = yes, no, default_yes
        super().__init__()

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
            button(f"{self._yes}  y", "yes"),
            CloseButton(f"{self._no}  n", id="no", action=None),
        ]

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#yes" if self._default_yes else "#no"))

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)

    @on(Button.Pressed, "#yes,#no")
    def _pressed(self, event: Button.Pressed) -> None:
        self.action_answer(event.button.id == "yes")


class QuitQuestion(Question):
    """Whether to quit. A class of its own tells that it is being asked already."""


class AskText(ModalScreen[Answer | None]):
    """Asks for a line of text. The result is what ``read`` returns for it, or None when the dialog
    was cancelled.

    What was typed stays until ``read`` accepts it. A choice that is clicked, or reached with up and
    down, is entered into the field.
    """

    CSS_PATH = _STYLES
    BINDINGS = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("down", "choose('down')", "Next choice", show=False),
        Binding("up", "choose('up')", "Choice before", show=False),
    ]

    def __init__(
        self,
        title: str,
        hint: str,
        value: str,
        *,
        yes: str,
        read: Callable[[str], Answer],
        may_be_empty: bool = False,
        suggester: Suggester | None = None,
        choices: Sequence[tuple[str, str]] = (),
    ) -> None:
        """``read`` raises InputError. ``choices`` are texts to enter, each with what it means; only
        that is shown of an empty one.
        """
        self._title, self._hint, self._value, self._yes = title, hint, value, yes
        self._read, self._may_be_empty = read, may_be_empty
        self._suggester, self._choices = suggester, choices
        super().__init__()

    def compose(self) -> ComposeResult:
        yield dialog(
            self._title,
            Static(Content(self._hint), classes="faint"),
            *([self._list()] if self._choices else []),
            Entry(self._value, compact=True, suggester=self._suggester),
            Static(id="said", classes="dialog-answer"),
            buttons=[button(f"{self._yes}  enter", "yes"), CloseButton("Cancel  esc", id="no")],
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
        listed.highlighted = texts.index(self._value) if self._value in texts else None
        return listed

    def action_choose(self, way: Literal["up", "down"]) -> None:
        for listed in self.query(OptionList):
            listed.action_cursor_down() if way == "down" else listed.action_cursor_up()

    @on(OptionList.OptionHighlighted)
    def _chosen(self, event: OptionList.OptionHighlighted) -> None:
        entry = self.query_one(Input)
        entry.value = self._choices[event.option_index][0]
        entry.cursor_position = len(entry.value)

    @on(Input.Submitted)
    @on(Button.Pressed, "#yes")
    def _submitted(self) -> None:
        value = self.query_one(Input).value.strip()
        if not value and not self._may_be_empty:
            return
        try:
            answer = self._read(value)
        except InputError as error:
            self.query_one("#said", Static).update(wrong(problem_texts(error)))
            self.set_focus(self.query_one(Input))
        else:
            self.dismiss(answer)


Laid = Callable[[int], str | Content]
"""Text laid out for a number of cells, as a table is."""
COPIED_WIDTH = 160
"""Cells of a table in the clipboard."""


class _LaidOut(Static):
    """Text that is laid out again for each width."""

    def __init__(self, lay: Laid, *, classes: str = "") -> None:
        self._lay = lay
        super().__init__(self._laid(1), classes=classes)

    def _laid(self, width: int) -> Content:
        text = self._lay(width)
        return Content(text) if isinstance(text, str) else text

    def on_resize(self) -> None:
        self.update(self._laid(self.size.width))


class Notice(ModalScreen[bool]):
    """What happened, why, and what to do next. The result is True when the offered action was
    chosen.
    """

    CSS_PATH = _STYLES
    BINDINGS = [
        Binding("escape,q", "dismiss(False)", "Close"),
        Binding("y", "copy", "Copy"),
    ]

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
                CloseButton(action=None),
                button("Copy  y", "copy"),
                *([button(self._offer, "offer")] if self._offer else []),
            ],
            classes=f"dialog{' -bad' if self._bad else ''}{' -table' if table else ''}",
        )

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#close"))

    def action_copy(self) -> None:
        lines = [line if isinstance(line, str) else str(line(COPIED_WIDTH)) for line in self._lines]
        self.app.copy_to_clipboard("\n".join((self._title, *lines)))
        self.notify("Copied")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "copy":
            self.action_copy()
        else:
            self.dismiss(event.button.id == "offer")


KeyRow = tuple[str, str, str]
"""Keys, name and details of a command."""


def _key_lines(rows: Sequence[KeyRow], width: int) -> Content:
    """Return commands in lines of ``width`` cells, what they do beside the keys."""
    keys_width = max((len(keys) for keys, _, _ in rows), default=0) + 4
    lines = []
    for keys, name, tip in rows:
        text = f"{name}  {tip}" if tip not in ("", name) else name
        first, *more = wrap(text, max(20, width - keys_width))
        at = len(name)
        shown = (f"  {keys}".ljust(keys_width), "$accent"), first[:at], (first[at:], "$faint")
        lines += [Content.assemble(*shown), *(faint(" " * keys_width + line) for line in more)]
    return in_rows(lines)


class KeysHelp(ModalScreen[None]):
    """Every key of the screen below, read from its bindings, so that help and dispatch agree."""

    CSS_PATH = _STYLES
    BINDINGS = [Binding("escape,q,question_mark,f1,enter", "dismiss(None)", "Close")]

    def __init__(
        self, title: str, about: str, groups: Sequence[tuple[str, Sequence[KeyRow]]]
    ) -> None:
        self._title, self._about, self._groups = title, about, groups
        super().__init__()

    def compose(self) -> ComposeResult:
        body = [Static(Content(self._about + "\n"), classes="dialog-line")] if self._about else []
        for heading, rows in self._groups:
            body += [
                Static(Content(heading), classes="heading"),
                _LaidOut(partial(_key_lines, rows), classes="dialog-line"),
            ]
        yield dialog(
            self._title,
            VerticalScroll(*body, classes="dialog-body"),
            buttons=[CloseButton()],
            classes="dialog -wide",
        )


# Make a preset of any model: ask for a hub id or a folder, and have a helper process read its
# shape.


class AddModel(ModalScreen[str | None]):
    """The result is the name of the new preset, or None when the dialog was cancelled. What
    was typed stays until it works.
    """

    CSS_PATH = _STYLES
    BINDINGS = [Binding("escape", "dismiss(None)", "Cancel")]

    _reading = False
    """Whether an answer is awaited. The thread that has given one may take a moment more to end."""

    def compose(self) -> ComposeResult:
        about = "Only its config.json is read. No weights are downloaded."
        model = "hub id such as Qwen/Qwen3-8B, or a folder"
        name = "name of the preset (empty: derived from the model's)"
        yield dialog(
            "Add a model",
            Static(about, classes="faint"),
            Entry(placeholder=model, id="model", compact=True),
            Entry(placeholder=name, id="name", compact=True),
            Static(id="said", classes="dialog-answer"),
            buttons=[button("Add  enter", "yes"), CloseButton("Cancel  esc", id="no")],
        )

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
            self._show_answer(faint(f"reading the shape of {model} …"))
            self.add_model(model, name)

    @work(thread=True, exclusive=True, group="add", name="add a model", exit_on_error=False)
    def add_model(self, model: str, name: str) -> None:
        """Describe the model and save the preset, unless the dialog was cancelled meanwhile."""
        from so_tui.launch.helper_jobs import describe_model
        from so_tui.spec import create_preset
        from so_tui.spec.errors import SoTuiError

        worker = get_current_worker()
        try:
            described = describe_model(model, name=name or None)
            if not worker.is_cancelled:
                create_preset(described.spec)
                self.call_later(self._added, described.spec.name, described.notes)
        except SoTuiError as error:
            self.call_later(self._failed, problem_texts(error))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if text := unexpected_error(event):
            self._failed(text)

    def _added(self, name: str, notes: Sequence[str]) -> None:
        for note in notes:
            self.app.notify(note, markup=False)
        self.dismiss(name)

    def _failed(self, problem: str) -> None:
        self._reading = False
        self._show_answer(wrong(problem))
        self.set_focus(self.query_one("#model", Input))

    def _show_answer(self, text: Content) -> None:
        self.query_one("#said", Static).update(text)


# The question before a launch, which may name the run; before a job is submitted, with its batch
# script for editing.


_CHANGED = "You have changed the batch script. It is submitted as you saved it."


class LaunchQuestion(Question):
    """Asks whether to launch, and what the run is called. While that cannot be a name, the answer
    is not yes.
    """

    BINDINGS = [Binding("r", "rename", "Rename")]

    def __init__(self, title: str, lines: Sequence[str | Content], launch: Launch) -> None:
        self.launch = launch
        super().__init__(title, lines, yes="Launch", default_yes=True)

    def fields(self) -> list[Widget]:
        name = f"name of the run: {self.launch.spec.name}"
        said = Static(id="said", classes="dialog-answer")
        said.display = False
        return [Entry(self.launch.called, placeholder=name, compact=True, id="called"), said]

    def buttons(self) -> list[Button]:
        return [*super().buttons(), button("Rename  r", "rename")]

    @on(Button.Pressed, "#rename")
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
    """Asks whether to submit a launch. ``draft`` is the user's batch script; None while it is the
    one that so-tui writes.
    """

    BINDINGS = [Binding("e", "edit", "Edit the script")]

    def __init__(
        self, title: str, lines: Sequence[str | Content], launch: Launch, draft: Draft | None
    ) -> None:
        self.draft = draft
        super().__init__(title, [*lines, _CHANGED], launch)

    def buttons(self) -> list[Button]:
        return [*super().buttons(), button("Edit the script  e", "edit")]

    def on_mount(self) -> None:
        super().on_mount()
        self._show_draft()

    def _show_draft(self) -> None:
        self.query(".dialog-body Static").last(Static).display = self.draft is not None

    @on(Button.Pressed, "#edit")
    def action_edit(self) -> None:
        """Open the script in the user's editor, which has the terminal until it ends."""
        from so_tui.spec import SoTuiError

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
            self.draft.discard()
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
_BACK = "back"
"""Marks the cells whose click goes to the value before."""


@dataclass
class _Line:
    """A setting with its values; one of them is chosen."""

    key: str
    values: tuple[Any, ...]
    value: Any
    description: str

    def step(self, by: int) -> None:
        at = self.values.index(self.value) if self.value in self.values else -1
        self.value = self.values[(at + by) % len(self.values)]

    def content(self) -> Content:
        shown = ("yes" if self.value else "no") if isinstance(self.value, bool) else str(self.value)
        back = Content.styled("◂ ", Style(bold=True) + Style.from_meta({_BACK: True}))
        return Content.assemble(f"{self.key:<{_LABEL}} ", back, (f"{shown} ▸", "bold"))

    def about(self) -> Content:
        return faint(self.description + (", from the next start on" if self.key in LATER else ""))


class _SettingList(OptionList):
    """Settings, a line each. A click on the arrow to the left goes back; anywhere else it goes
    forward, as enter does.
    """

    async def _on_click(self, event: events.Click) -> None:
        meta = event.style.meta
        if meta.get(_BACK) and "option" in meta:
            event.prevent_default()
            self.highlighted = meta["option"]
            await self.run_action("screen.step(-1)")


class SettingsDialog(ModalScreen[dict[str, Any] | None]):
    """Change settings; the result is what was changed, by key. The theme is shown at once."""

    CSS_PATH = _STYLES
    BINDINGS = [
        Binding("escape,q,comma", "close", "Keep and close"),
        Binding("right,space", "step(1)", "Next value"),
        Binding("left", "step(-1)", "Previous value"),
    ]

    def __init__(self, settings: Settings, themes: Iterable[str]) -> None:
        own = tuple(theme.name for theme in THEMES)
        self._before = settings
        self._lines = []
        for key in SHOWN:
            info = setting_index()[key]
            values: tuple[str | bool, ...] = info.choices or (True, False)
            if key == "screen.theme":
                values = (*own, *(name for name in sorted(themes) if name not in own))
            self._lines.append(
                _Line(key, values, value_of(settings, key), info.description.partition(":")[0])
            )
        super().__init__()

    def compose(self) -> ComposeResult:
        file = shorten_path(str(settings_file()), 60)
        keys = f"left, right, enter or a click change; esc keeps them in {file}"
        yield dialog(
            "Settings",
            _SettingList(*(line.content() for line in self._lines), classes="settings"),
            Static(id="about", classes="dialog-answer"),
            *(Static(faint(line), classes="dialog-line") for line in (keys, MORE)),
            buttons=[CloseButton("Keep and close  esc", action="screen.close")],
            classes="dialog -wide",
        )

    @on(OptionList.OptionHighlighted)
    def _moved(self, event: OptionList.OptionHighlighted) -> None:
        self.query_one("#about", Static).update(self._lines[event.option_index].about())

    def action_step(self, by: int) -> None:
        options = self.query_one(OptionList)
        if (at := options.highlighted) is not None:
            line = self._lines[at]
            line.step(by)
            options.replace_option_prompt_at_index(at, line.content())
            if line.key == "screen.theme":
                self.app.theme = line.value

    @on(OptionList.OptionSelected)
    def _chosen(self) -> None:
        self.action_step(1)

    def action_close(self) -> None:
        changes = {
            line.key: line.value
            for line in self._lines
            if line.value != value_of(self._before, line.key)
        }
        self.dismiss(changes or None)


# A list of things to tick: whether one is ticked is seen without colour, too.


Item = TypeVar("Item")


class TickList(OptionList, Generic[Item]):
    """Ticked items keep the order in which they were ticked, also those that are not listed now."""

    BINDINGS = [
        Binding("space", "select", "Tick"),
        Binding("enter", "take", "Take what is ticked"),
        Binding("a", "tick_all(True)", "Tick all"),
        Binding("n", "tick_all(False)", "Tick none"),
    ]
    DEFAULT_CSS = """
    TickList {
        height: auto; max-height: 14; border: none; background: $surface; padding: 0; margin: 1 0;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    """

    class Changed(Message):
        """Something was ticked, or not any more."""

    class Taken(Message):
        """What is ticked now is what was wanted."""

    def __init__(self, ticked: Iterable[Item], *, id: str | None = None) -> None:
        self.ticked = list(ticked)
        self._listed: list[tuple[Item, Content]] = []
        super().__init__(id=id, compact=True)

    def list_items(self, items: Sequence[tuple[Item, Content]]) -> None:
        """List these items, each with its text."""
        self._listed = list(items)
        self.clear_options()
        self.add_options([self._line(item, text) for item, text in self._listed])
        if self._listed:
            self.highlighted = 0

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

    def action_take(self) -> None:
        self.post_message(self.Taken())

    def action_tick_all(self, ticked: bool) -> None:
        self._tick([item for item, _ in self._listed], ticked)


# A dialog in which things are ticked, filtered while something is typed.


Result = TypeVar("Result")


class TickDialog(ModalScreen[Result | None], Generic[Result, Item]):
    """Has an input ``filter``, a list of things to tick, and a line ``said``, which the dialog that
    builds on it composes.
    """

    CSS_PATH = _STYLES
    BINDINGS = [
        Binding("escape", "dismiss(None)", "Leave without a change"),
    ]

    def on_mount(self) -> None:
        self.list_matching("")

    @property
    def ticks(self) -> TickList[Item]:
        return self.query_one(TickList)

    def buttons(self, yes: str) -> list[Button]:
        """Return the buttons below the list; ``yes`` says what is done with what is ticked."""
        return [
            button(f"{yes}  enter", "yes", "screen.apply"),
            CloseButton("No change  esc", id="no"),
        ]

    def list_matching(self, text: str) -> None:
        """List what matches the text of the filter."""
        raise NotImplementedError

    def say(self, text: Content | str) -> None:
        """Show a line below the list."""
        self.query_one("#said", Static).update(text)

    def action_apply(self) -> None:
        """Leave with what is ticked."""
        raise NotImplementedError

    @on(TickList.Taken)
    def _take(self) -> None:
        self.action_apply()

    @on(Input.Changed, "#filter")
    def _filtered(self, event: Input.Changed) -> None:
        self.list_matching(event.value)

    @on(Input.Submitted, "#filter")
    def _to_the_list(self) -> None:
        self.set_focus(self.ticks)
