"""Questions and answers over a screen: yes or no, a name, what went wrong, the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import ClassVar, Literal, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Button, Input, OptionList, Static

from so_tui.spec.errors import InputError
from so_tui.ui.form import problem_text
from so_tui.ui.text import Content
from so_tui.ui.widgets.entry import Entry

Answer = TypeVar("Answer")


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
    """A yes or no question. Where yes destroys or ends something, ``default_yes`` is False and enter answers no."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
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
        self._title, self._lines, self._yes, self._no, self._default_yes = (
            title,
            lines,
            yes,
            no,
            default_yes,
        )
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._title), classes="dialog-title")
            with VerticalScroll(classes="dialog-body", can_focus=False):
                for line in self._lines:
                    yield Static(Content(line) if isinstance(line, str) else line)
            yield from self.fields()
            with Horizontal(classes="dialog-buttons"):
                yield from self.buttons()

    def fields(self) -> ComposeResult:
        """Compose what stands between the lines and the buttons."""
        yield from ()

    def buttons(self) -> ComposeResult:
        """Compose the buttons."""
        yield Button(Content(f"{self._yes}  y"), id="yes", compact=True)
        yield CloseButton(f"{self._no}  n", id="no", action=None)

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
    """Asks for a line of text. The result is what ``read`` returns for it, or None when the dialog was cancelled.

    What was typed stays until ``read`` accepts it. A choice that is clicked, or reached with up and down, is entered into the field.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
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
        """``read`` raises InputError. ``choices`` are texts to enter, each with what it means; only that is shown of an empty one."""
        self._title, self._hint, self._value, self._yes = title, hint, value, yes
        self._read, self._may_be_empty, self._suggester, self._choices = (
            read,
            may_be_empty,
            suggester,
            choices,
        )
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._title), classes="dialog-title")
            yield Static(Content(self._hint), classes="faint")
            if self._choices:
                yield from self._list()
            yield Entry(self._value, compact=True, suggester=self._suggester)
            yield Static(id="said", classes="dialog-answer")
            with Horizontal(classes="dialog-buttons"):
                yield Button(Content(f"{self._yes}  enter"), id="yes", compact=True)
                yield CloseButton("Cancel  esc", id="no")

    def _list(self) -> ComposeResult:
        """Compose the choices; the keyboard stays in the field."""
        width = max(len(text) for text, _ in self._choices)
        named = (f"{text:<{width}}  " if text else "" for text, _ in self._choices)
        lines = [
            Content.assemble(text, (meaning, "$faint"))
            for text, (_, meaning) in zip(named, self._choices, strict=True)
        ]
        listed = OptionList(*lines, compact=True, classes="choices")
        listed.can_focus = False
        listed.highlighted = next(
            (index for index, (text, _) in enumerate(self._choices) if text == self._value), None
        )
        yield listed

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
            said = Content.assemble(("✗ ", "$error"), "\n".join(map(problem_text, error.problems)))
            self.query_one("#said", Static).update(said)
            self.set_focus(self.query_one(Input))
        else:
            self.dismiss(answer)


Laid = Callable[[int], str]
"""Text laid out for a number of cells, as a table is."""
COPIED_WIDTH = 160
"""Cells of a table in the clipboard."""


class LaidOut(Static):
    """Text that is laid out again for each width."""

    def __init__(self, lay: Laid) -> None:
        self._lay = lay
        super().__init__(Content(lay(1)))

    def on_resize(self) -> None:
        self.update(Content(self._lay(self.size.width)))


class Notice(ModalScreen[bool]):
    """What happened, why, and what to do next. The result is True when the offered action was chosen."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(False)", "Close"),
        Binding("y", "copy", "Copy"),
    ]

    def __init__(
        self, title: str, lines: Sequence[str | Laid], *, offer: str = "", bad: bool = True
    ) -> None:
        self._title, self._lines, self._offer, self._bad = title, lines, offer, bad
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.set_class(self._bad, "-bad")
            dialog.set_class(any(callable(line) for line in self._lines), "-table")
            yield Static(
                Content(f"{'✗ ' if self._bad else ''}{self._title}"), classes="dialog-title"
            )
            with VerticalScroll(classes="dialog-body"):
                for line in self._lines:
                    yield (
                        Static(Content(line), classes="dialog-line")
                        if isinstance(line, str)
                        else LaidOut(line)
                    )
            with Horizontal(classes="dialog-buttons"):
                yield CloseButton(action=None)
                yield Button("Copy  y", id="copy", compact=True)
                if self._offer:
                    yield Button(Content(self._offer), id="offer", compact=True)

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#close"))

    def action_copy(self) -> None:
        lines = [line if isinstance(line, str) else line(COPIED_WIDTH) for line in self._lines]
        self.app.copy_to_clipboard("\n".join((self._title, *lines)))
        self.notify("Copied")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "copy":
            self.action_copy()
        else:
            self.dismiss(event.button.id == "offer")


KeyRow = tuple[str, str, str]
"""Keys, name and details of a command."""


def key_lines(rows: Sequence[KeyRow], width: int) -> Content:
    """Return commands in lines of ``width`` cells, what they do beside the keys."""
    keys_width = max((len(keys) for keys, _, _ in rows), default=0) + 4
    lines = []
    for keys, name, tip in rows:
        first, *more = wrap(
            f"{name}  {tip}" if tip not in ("", name) else name, max(20, width - keys_width)
        )
        lines.append(
            Content.assemble(
                (f"  {keys}".ljust(keys_width), "$accent"),
                first[: len(name)],
                (first[len(name) :], "$faint"),
            )
        )
        lines += [Content.styled(" " * keys_width + line, "$faint") for line in more]
    return Content("\n").join(lines)


class KeyRows(Static):
    """Commands with their keys, laid out again for each width."""

    def __init__(self, rows: Sequence[KeyRow]) -> None:
        self._rows = rows
        super().__init__(key_lines(rows, 1), classes="dialog-line")

    def on_resize(self) -> None:
        self.update(key_lines(self._rows, self.size.width))


class KeysHelp(ModalScreen[None]):
    """Every key of the screen below, read from its bindings, so that help and dispatch agree."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter", "dismiss(None)", "Close")
    ]

    def __init__(
        self, title: str, about: str, groups: Sequence[tuple[str, Sequence[KeyRow]]]
    ) -> None:
        self._title, self._about, self._groups = title, about, groups
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide"):
            yield Static(Content(self._title), classes="dialog-title")
            with VerticalScroll(classes="dialog-body"):
                if self._about:
                    yield Static(Content(self._about + "\n"), classes="dialog-line")
                for heading, rows in self._groups:
                    yield Static(Content(heading), classes="heading")
                    yield KeyRows(rows)
            with Horizontal(classes="dialog-buttons"):
                yield CloseButton()
