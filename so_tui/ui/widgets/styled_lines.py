"""Lines of styled text that change every second: painted from their spans, without the wrapping and layout of a Static."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.content import Span
from textual.strip import Strip
from textual.style import Style as VisualStyle

from so_tui.ui.printable import DrawsPrintable
from so_tui.ui.text import Content
from so_tui.ui.widgets.drawing import repaint

Styles = tuple[VisualStyle | str, ...]
"""Styles that lie over each other, as a span names them."""


def pieces(content: Content) -> Iterator[tuple[str, Styles]]:
    """Yield the text of ``content`` in pieces of one style each, with the styles that lie over each other there."""
    plain, spans = content.plain, content.spans
    end = 0
    for span in spans:
        if span.start < end:
            break
        end = span.end
    else:
        yield from _beside_each_other(plain, spans)
        return
    borders = sorted(
        {0, len(plain), *(at for span in spans for at in (span.start, span.end) if at < len(plain))}
    )
    coming = deque(sorted(range(len(spans)), key=lambda number: spans[number].start))
    present: list[int] = []
    begun = 0
    styles: Styles = ()
    for start in borders[:-1]:
        while coming and spans[coming[0]].start <= start:
            present.append(coming.popleft())
        present = sorted(
            number for number in present if spans[number].end > start
        )  # a later span lies over an earlier one
        found = tuple(spans[number].style for number in present)
        if found != styles and begun < start:
            yield plain[begun:start], styles
            begun = start
        styles = found
    if begun < len(plain):
        yield plain[begun:], styles


def _beside_each_other(plain: str, spans: Sequence[Span]) -> Iterator[tuple[str, Styles]]:
    """Yield the pieces of a text whose spans do not overlap, which is nearly all of them."""
    at = 0
    for start, end, style in spans:
        if before := plain[at:start]:
            yield before, ()
        if text := plain[start:end]:
            yield text, (style,)
        at = end
    if rest := plain[at:]:
        yield rest, ()


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
            # Not left to `auto`: of two changes between which the screen is laid out, as in a resize, Textual misses the second.
            self.styles.height = self.rows
        elif self._drawn != self._render_key():
            self.refresh()
        else:
            before, self._strips = self._strips, self._draw()
            repaint(self, before, self._strips)
            return
        self._drawn = ()

    def _render_key(self) -> tuple[object, ...]:
        return (
            self.size,
            self.app.theme,
        )  # the outer size stays while it is hidden, and has no room to draw

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return self.rows

    def notify_style_update(self) -> None:
        self._styles_of, self._drawn = {}, ()
        super().notify_style_update()

    def draw_line(self, y: int) -> Strip:
        key = self._render_key()
        if key != self._drawn:
            self._strips, self._drawn = self._draw(), key
        return (
            self._strips[y]
            if y < len(self._strips)
            else Strip.blank(self.size.width, self._style(()))
        )

    def _draw(self) -> list[Strip]:
        width, base = self.size.width, self._style(())
        rows: list[list[Segment]] = [[]]
        for text, styles in pieces(self.content):
            style = self._style(styles)
            for number, part in enumerate(text.split("\n")):
                if number:
                    rows.append([])
                if part:
                    rows[-1].append(Segment(part, style))
        return [Strip(row).adjust_cell_length(width, base) for row in rows]

    def _style(self, styles: Styles) -> Style:
        found = self._styles_of.get(styles)
        if found is None:
            style = self.visual_style
            for one in styles:
                style += self._get_style(one)
            found = self._styles_of[styles] = style.rich_style
        return found
