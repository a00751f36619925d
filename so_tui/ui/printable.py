"""Let only printable characters reach the terminal and the clipboard, whatever text from elsewhere contains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.cells import get_character_cell_size
from rich.segment import Segment
from textual.app import App
from textual.color import Color
from textual.filter import LineFilter
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from so_tui.trust.printable import printable, same_cells
from so_tui.trust.streams import console

Result = TypeVar("Result")


class PrintableCharacters(LineFilter):
    """Replaces unsafe characters in every line of every widget, Textual's own included, without changing its width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return segments if _is_printable(segments) else _replaced(segments)


class DrawsPrintable(Widget):
    """A widget that draws every second. Its lines are checked like those of other widgets, but copied only where they are unsafe.

    Textual copies each line that it filters, which costs more than the check.
    """

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [line_filter for line_filter in super().get_line_filters() if not isinstance(line_filter, PrintableCharacters)]

    def render_lines(self, crop: Region) -> list[Strip]:
        strips = super().render_lines(crop)
        return [strip if _is_printable(strip) else Strip(_replaced(strip), strip.cell_length) for strip in strips]


def _is_printable(segments: Iterable[Segment]) -> bool:
    return all(segment.text.isprintable() for segment in segments)


def _replaced(segments: Iterable[Segment]) -> list[Segment]:
    return [Segment(same_cells(text, get_character_cell_size), style, control) for text, style, control in segments]


class PrintableApp(App[Result]):
    """An application whose lines, clipboard and last words hold only printable text.

    ``Content`` of so_tui.ui.text spells out unsafe characters, so that users see them. The line filter is a second check, of all widgets.
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
