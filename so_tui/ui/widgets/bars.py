"""Bars made of text: how full something is, and the parts of a whole. Pure functions that return styled content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from so_tui.ui.text import Content

FULL, HALF, REST = "━", "╸", "─"
FILLS = "▂▅▇▃▁"
"""Fills of the parts of a step, by height: they differ without colour as well."""
LETTERS = "dfbxo"
"""The same in ASCII: data, forward, backward, exposed optimizer, other."""
NEARLY_FULL = 0.97
"""Share of a memory above which the next allocation may fail."""
Piece = str | tuple[str, str]
"""A text, or a text and its style, as ``Content.assemble`` takes them."""


def fill(share: float, width: int, style: str = "$accent") -> Content:
    """Return a thin bar of ``width`` cells, ``share`` of it filled (clamped to 0..1)."""
    return Content.assemble(*fill_pieces(share, width, style))


def fill_pieces(share: float, width: int, style: str) -> tuple[Piece, Piece]:
    """Return the two pieces of a bar: what is filled, and the rest."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    full, half = divmod(halves, 2)
    return (FULL * full + HALF * half, style), (REST * (width - full - half), "$rule")


def usage_style(share: float) -> str:
    """Return the colour of memory in use: a warning where less is free than the planner leaves free, and bad where nearly nothing is."""
    from so_tui.plan.types import GPU_MARGIN

    return "$error" if share > NEARLY_FULL else "$warning" if share > 1 - GPU_MARGIN else "$memory"


@dataclass(frozen=True, slots=True)
class Part:
    """One share of a whole."""

    name: str
    amount: float
    text: str
    style: str
    short_name: str = ""
    """For narrow terminals, where it differs from ``name``."""


def cells_of(amounts: Sequence[float], width: int) -> list[int]:
    """Return the cells of each share of ``width``. They sum to it, and a share above 0 gets a cell where there is room."""
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


def fill_of(index: int, plain: bool) -> str:
    """Return the fill of a part of a step; ``plain`` where the terminal shows ASCII only."""
    return (LETTERS if plain else FILLS)[index]


def stacked(parts: Sequence[Part], width: int, *, plain: bool = False) -> Content:
    """Return one bar of all parts of a step beside each other."""
    cells = cells_of([part.amount for part in parts], width)
    pieces = [
        (fill_of(index, plain) * count, part.style)
        for index, (part, count) in enumerate(zip(parts, cells, strict=True))
    ]
    return Content.assemble(*pieces)


def legend_items(parts: Sequence[Part], *, plain: bool = False) -> list[Content]:
    """Return ``▅ forward 0.84 s`` for each part above 0: its fill, its name, its amount."""
    return [
        Content.assemble(
            (fill_of(index, plain), part.style), (f" {part.name} ", "$faint"), part.text
        )
        for index, part in enumerate(parts)
        if part.amount > 0
    ]


def legend(parts: Sequence[Part], *, plain: bool = False) -> Content:
    """Return all parts in one line."""
    return Content("   ").join(legend_items(parts, plain=plain))
