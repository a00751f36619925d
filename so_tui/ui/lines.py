"""Lines and bars of styled text, painted without the layout of a Static."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.segment import Segment
from textual.strip import Strip

from so_tui.ui.text import Content
from so_tui.ui.textual_fixes import DrawnRowsMixin
from so_tui.units import duration

# Bars made of text: how full something is, and the parts of a whole. Pure functions that return
# styled content.


FULL, HALF, REST = "━", "╸", "─"
FILLS = "▂▅▇▃▁"
"""Fills of the parts of a step, by height: they differ without colour as well."""
LETTERS = "dfbxo"
"""The same in ASCII: data, forward, backward, exposed optimizer, other."""
NEARLY_FULL = 0.97
"""Share of a memory above which the next allocation may fail."""
Piece = str | tuple[str, str]
"""A text, or a text and its style, as ``Content.assemble`` takes them."""
Pieces = list[Piece]


def fill_pieces(share: float, width: int, style: str) -> tuple[Piece, Piece]:
    """Return the two pieces of a bar: what is filled, and the rest."""
    full, half = divmod(round(min(1.0, max(0.0, share)) * width * 2), 2)
    return (FULL * full + HALF * half, style), (REST * (width - full - half), "$rule")


@dataclass(frozen=True, slots=True)
class Part:
    """One share of a whole."""

    name: str
    amount: float
    text: str
    style: str
    fill: str
    """Its character in a bar."""


STEP_PARTS = {
    "data": "$data-part",
    "forward": "$forward",
    "backward": "$backward",
    "optimizer exposed": "$exposed",
    "other": "$other-part",
}
"""Names and colours of the parts of a step."""


def step_parts(seconds: Sequence[float], *, plain: bool) -> list[Part]:
    """Return the first parts of a step; ``plain`` where the terminal shows ASCII only."""
    fills = LETTERS if plain else FILLS
    return [
        Part(name, amount, duration(amount), style, fill)
        for (name, style), amount, fill in zip(STEP_PARTS.items(), seconds, fills, strict=False)
    ]


def cells_of(amounts: Sequence[float], width: int) -> list[int]:
    """Return the cells of each share of ``width``. They sum to it, and a share above 0 gets a cell
    where there is room.
    """
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    cells = [max(1, int(amount / total * width)) if amount > 0 else 0 for amount in amounts]
    # Give or take at the largest parts, where a cell more or less shows least.
    while (excess := sum(cells) - width) != 0:
        largest = max(range(len(cells)), key=lambda index: cells[index])
        if excess > 0 and cells[largest] <= 1:
            break
        cells[largest] -= 1 if excess > 0 else -1
    return cells


def stacked(parts: Sequence[Part], width: int) -> Content:
    """Return one bar of all parts of a step beside each other."""
    cells = cells_of([part.amount for part in parts], width)
    pieces = [(part.fill * count, part.style) for part, count in zip(parts, cells, strict=True)]
    return Content.assemble(*pieces)


def legend(parts: Iterable[Part]) -> list[Content]:
    """Return ``▅ forward 0.84 s`` for each part: its fill, its name, its amount."""
    return [
        Content.assemble((part.fill, part.style), (f" {part.name} ", "$faint"), part.text)
        for part in parts
    ]


# Lines of styled text that change every second: painted from their spans, without the wrapping and
# layout of a Static.


class StyledLines(DrawnRowsMixin):
    """One row for each line of ``content``; text that does not fit is cut."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.content = Content("")
        self.styles.height = 1

    @property
    def rows(self) -> int:
        """Rows of the content."""
        return self.content.plain.count("\n") + 1

    @property
    def shown_rows(self) -> int:
        """Rows that the lines take; none while they are hidden."""
        return self.rows if self.display else 0

    def update(self, content: Content) -> None:
        """Show other content, and repaint only rows that changed."""
        if content == self.content:
            return
        rows = self.rows
        self.content = content
        if self.rows != rows:
            # Not left to `auto`: of two changes between which the screen is laid out, as in a
            # resize, Textual misses the second.
            self.styles.height = self.rows
            self._drawn = ()
        else:
            self.repaint()

    def row_key(self) -> tuple[object, ...]:
        return (
            self.size,
            self.app.theme,
        )  # the outer size stays while it is hidden, and has no room to draw

    def draw_rows(self) -> list[Strip]:
        rows: list[list[Segment]] = [[]]
        parse = self.app.stylesheet.parse_style
        for text, style in self.content.render(self.visual_style, "", parse):
            for number, part in enumerate(text.split("\n")):
                if number:
                    rows.append([])
                if part:
                    rows[-1].append(Segment(part, style.rich_style))
        width, base = self.size.width, self.visual_style.rich_style
        return [Strip(row).adjust_cell_length(width, base) for row in rows]
