"""Figures as SVG: curves over an axis, in the viewer's light or dark colours. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from so_tui.trust.text import printable_line
from so_tui.units import significant, thousands

_WIDTH, _TOP = 900, 34
_LEFT, _PLOT_WIDTH, _PLOT_HEIGHT = 80, 800, 320
_LONGEST_LABEL = 80
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Of curves beyond the number of colours."""
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#222}.grid{stroke:#8884;"
    "fill:none}@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"
)


def curves(title: str, drawn: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """Return curves over steps, under a legend that names all of them: of each its label and its
    points (x, y). Where y is not finite, a curve has a gap.
    """
    finite = [point for _, points in drawn for point in points if math.isfinite(point[1])]
    left, right = _span([x for x, _ in finite])
    low, high = _span([y for _, y in finite])
    bottom = _TOP + 16 * ((len(drawn) + 1) // 2) + _PLOT_HEIGHT

    def across(x: float) -> float:
        return _LEFT + _PLOT_WIDTH * (x - left) / (right - left)

    def down(y: float) -> float:
        return bottom - _PLOT_HEIGHT * (y - low) / (high - low)

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = left + share * (right - left), low + share * (high - low)
        parts.append(f'<path class="grid" d="M{_LEFT} {down(y):.1f}h{_PLOT_WIDTH}"/>')
        parts += [
            _text(_LEFT - 8, down(y) + 4, significant(y), "end"),
            _text(across(x), bottom + 18, thousands(round(x)), "middle"),
        ]
    for index, (label, points) in enumerate(drawn):
        dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
        stroke = f'stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="1.5"' + (
            f' stroke-dasharray="{dash}"' if dash else ""
        )
        for whole, part in groupby(points, key=lambda point: math.isfinite(point[1])):
            if whole:
                line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in part)
                parts.append(f'<polyline points="{line}" fill="none" {stroke}/>')
        x_label, y_label = 20 + 440 * (index % 2), _TOP + 16 * (index // 2)
        parts.append(
            f'<path d="M{x_label} {y_label - 4}h22" {stroke}/>'
            + _text(x_label + 28, y_label, label)
        )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 30}" '
        f'role="img"><title>{_safe(title)}</title>{_STYLE}'
    )
    return "\n".join([head, _text(10, 14, title), *parts, "</svg>", ""])


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    """Return a text without markup, and without what a terminal would obey: names of runs stand in
    figures.
    """
    return escape(printable_line(text)[:_LONGEST_LABEL])
