"""Let only printable characters reach the terminal and the clipboard, whatever text from elsewhere contains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.cells import get_character_cell_size
from rich.segment import Segment
from textual.app import App
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from so_tui.trust.printable import printable, same_cells
from so_tui.trust.streams import console

Result = TypeVar("Result")


class DrawsPrintable(Widget):
    """A widget that makes its lines itself, and not of ``Content``. They are checked once more, and copied only where they are unsafe.

    A line filter of Textual would check all widgets, but it copies each line: the dashboard cost 1.7 times as much with one.
    """

    def render_lines(self, crop: Region) -> list[Strip]:
        strips = super().render_lines(crop)
        return [strip if _is_printable(strip) else Strip(_replaced(strip), strip.cell_length) for strip in strips]


def _is_printable(segments: Iterable[Segment]) -> bool:
    return all(segment.text.isprintable() for segment in segments)


def _replaced(segments: Iterable[Segment]) -> list[Segment]:
    return [Segment(same_cells(text, get_character_cell_size), style, control) for text, style, control in segments]


class PrintableApp(App[Result]):
    """An application whose lines, clipboard and last words hold only printable text.

    ``Content`` of so_tui.ui.text spells out unsafe characters in what its widgets show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error_console = console(stderr=True)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy a text as it is shown: pasted into a terminal, a control character would act there."""
        super().copy_to_clipboard(printable(text))
