"""Lines of styled text that change every second: painted from their spans, without the wrapping and layout of a Static."""

from __future__ import annotations

from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.style import Style as VisualStyle

from so_tui.ui.printable import DrawsPrintable
from so_tui.ui.text import Content
from so_tui.ui.widgets.drawing import repaint

Styles = tuple[VisualStyle | str, ...]
"""Styles that lie over each other, as a span names them."""


class StyledLines(DrawsPrintable):
    """One row for each line of ``content``; text that does not fit is cut."""

    DEFAULT_CSS = """
    StyledLines { height: auto; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.content = Content("")
        self._strips: list[Strip] = []
        self._drawn: tuple[object, ...] = ()
        self._styles_of: dict[Styles, Style] = {}

    @property
    def rows(self) -> int:
        """Rows of the content."""
        return self.content.plain.count("\n") + 1

    def update(self, content: Content) -> None:
        """Show other content, and repaint only rows that changed."""
        if content == self.content:
            return
        rows = self.rows
        self.content = content
        if self.rows != rows:
            self.refresh(layout=True)
        elif self._drawn != self._render_key():
            self.refresh()
        else:
            before, self._strips = self._strips, self._draw()
            repaint(self, before, self._strips)
            return
        self._drawn = ()

    def _render_key(self) -> tuple[object, ...]:
        return self.outer_size, self.app.theme

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return self.rows

    def notify_style_update(self) -> None:
        self._styles_of, self._drawn = {}, ()
        super().notify_style_update()

    def draw_line(self, y: int) -> Strip:
        key = self._render_key()
        if key != self._drawn:
            self._strips, self._drawn = self._draw(), key
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self._style(()))

    def _draw(self) -> list[Strip]:
        width = self.size.width
        plain = self.content.plain
        applied: list[Styles] = [()] * len(plain)
        for span in self.content.spans:
            covered = applied[span.start : span.end]
            applied[span.start : span.end] = (
                [(*styles, span.style) for styles in covered] if any(covered) else [(span.style,)] * len(covered)
            )
        strips, start = [], 0
        for line in plain.split("\n"):
            segments, at = [], start
            for styles, characters in groupby(applied[start : start + len(line)]):
                end = at + sum(1 for _ in characters)
                segments.append(Segment(plain[at:end], self._style(styles)))
                at = end
            strips.append(Strip(segments).adjust_cell_length(width, self._style(())))
            start += len(line) + 1
        return strips

    def _style(self, styles: Styles) -> Style:
        found = self._styles_of.get(styles)
        if found is None:
            style = self.visual_style
            for one in styles:
                style += self._get_style(one)
            found = self._styles_of[styles] = style.rich_style
        return found
