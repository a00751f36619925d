"""Let only printable characters reach the terminal and the clipboard, whatever text from elsewhere contains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.cells import get_character_cell_size
from rich.segment import Segment
from textual.filter import ANSIToTruecolor, LineFilter
from textual.strip import Strip

from so_tui.trust.printable import printable, same_cells
from so_tui.trust.streams import console
from so_tui.ui.kept_lines import KeepsLines
from so_tui.ui.styling import StylesMounted

Result = TypeVar("Result")


class DrawsPrintable(KeepsLines):
    """A widget that makes its lines itself, and not of ``Content``. They are checked once more, and copied only where they are unsafe.

    Its colours are those of a theme. A line filter of Textual would check all widgets, but it copies each line: the dashboard cost 1.7
    times as much with one.
    """

    def draw_line(self, y: int) -> Strip:
        """Return one line of the content."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        strip = self.draw_line(y)
        return strip if _is_printable(strip) else Strip(_replaced(strip), strip.cell_length)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the application's filters without the one that translates the terminal's own 16 colours: there are none here."""
        return [
            filter
            for filter in super().get_line_filters()
            if not isinstance(filter, ANSIToTruecolor)
        ]


def _is_printable(segments: Iterable[Segment]) -> bool:
    return "".join([segment.text for segment in segments]).isprintable()


def _replaced(segments: Iterable[Segment]) -> list[Segment]:
    return [
        Segment(same_cells(text, get_character_cell_size), style, control)
        for text, style, control in segments
    ]


class PrintableApp(StylesMounted[Result]):
    """An application whose lines, clipboard and last words hold only printable text.

    ``Content`` of so_tui.ui.text spells out unsafe characters in what its widgets show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error_console = console(stderr=True)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy a text as it is shown: pasted into a terminal, a control character would act there."""
        super().copy_to_clipboard(printable(text))
