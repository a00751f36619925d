"""What leaves the screen for the terminal: printable characters, whatever other people wrote into what is shown or copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.cells import get_character_cell_size
from rich.segment import Segment
from textual.app import App
from textual.color import Color
from textual.filter import LineFilter
from textual.widget import Widget

from so_tui.trust.printable import printable, same_cells
from so_tui.trust.streams import console

Result = TypeVar("Result")


class PrintableCharacters(LineFilter):
    """Replaces what is not text in every line of every widget, Textual's own included, cell for cell."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(segment.text.isprintable() for segment in segments):
            return segments
        return [Segment(same_cells(text, get_character_cell_size), style, control) for text, style, control in segments]


class DrawsPrintable(Widget):
    """A widget that draws every second, and only text that is printable already: content, log lines, names from ``shorten``.

    Its lines are not checked again: Textual copies each line that it filters, which would double what the dashboard costs.
    """

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [line_filter for line_filter in super().get_line_filters() if not isinstance(line_filter, PrintableCharacters)]


class PrintableApp(App[Result]):
    """An application whose lines, clipboard and last words hold only printable text.

    ``Content`` of so_tui.ui.text spells out what is not text, so that it is seen. This is the check behind it that no widget passes by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error_console = console(stderr=True)
        self._printable = PrintableCharacters()

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._printable]

    def copy_to_clipboard(self, text: str) -> None:
        """Copy a text as it is shown: pasted into a terminal, a control character would act there."""
        super().copy_to_clipboard(printable(text))
