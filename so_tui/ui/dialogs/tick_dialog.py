"""A dialog in which things are ticked, filtered while something is typed."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from so_tui.ui.dialogs.basic import CloseButton
from so_tui.ui.text import Content
from so_tui.ui.widgets.tick_list import TickList

Result = TypeVar("Result")
Item = TypeVar("Item")


class TickDialog(ModalScreen[Result | None], Generic[Result, Item]):
    """Has an input ``filter``, a list of things to tick, and a line ``said``, which the dialog that builds on it composes."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave without a change"),
    ]

    def on_mount(self) -> None:
        self.list_matching("")

    @property
    def ticks(self) -> TickList[Item]:
        return self.query_one(TickList)

    def buttons(self, yes: str) -> ComposeResult:
        """Compose the buttons below the list; ``yes`` says what is done with what is ticked."""
        with Horizontal(classes="dialog-buttons"):
            yield Button(Content(f"{yes}  enter"), id="yes", compact=True, action="screen.apply")
            yield CloseButton("No change  esc", id="no")

    def list_matching(self, text: str) -> None:
        """List what matches the text of the filter."""
        raise NotImplementedError

    def say(self, text: Content | str) -> None:
        """Show a line below the list."""
        self.query_one("#said", Static).update(text)

    def action_apply(self) -> None:
        """Leave with what is ticked."""
        raise NotImplementedError

    def action_leave(self) -> None:
        """Leave without a change."""
        self.dismiss(None)

    @on(TickList.Taken)
    def _take(self) -> None:
        self.action_apply()

    @on(Input.Changed, "#filter")
    def _filtered(self, event: Input.Changed) -> None:
        self.list_matching(event.value)

    @on(Input.Submitted, "#filter")
    def _to_the_list(self) -> None:
        self.set_focus(self.ticks)
