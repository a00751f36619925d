"""The field that ``/`` opens: for the text that a table is filtered by, or that a log is searched for."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from so_tui.ui.widgets.entry import Entry


class FindField(Entry):
    """Hidden until it is opened. Posts ``Input.Changed`` while something is typed, ``Input.Submitted`` on enter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "Go there"),
        Binding("escape", "screen.leave_field", "Clear"),
    ]

    DEFAULT_CSS = """
    FindField {
        display: none;
        /* Not a margin, which would narrow the widgets beside it, too. */
        &.-textual-compact { padding: 0 1; }
    }
    """

    def __init__(self, placeholder: str, *, id: str | None = None) -> None:
        super().__init__(placeholder=placeholder, compact=True, id=id)

    @property
    def needle(self) -> str:
        """The text to look for, in small letters."""
        return self.value.strip().lower()

    def open(self) -> None:
        """Show the field and give it the keyboard."""
        self.display = True
        self.screen.set_focus(self)

    def close(self) -> bool:
        """Empty and hide the field; return whether it was open."""
        was_open = bool(self.display)
        self.value = ""
        self.display = False
        return was_open
