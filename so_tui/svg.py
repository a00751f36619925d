"""Figures as SVG: curves over an axis, in the viewer's light or dark colours. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from so_tui.trust.text import printable_line
from so_tui.units import significant, thousands

_WIDTH, _TOP = 900, 34
_LEFT, _PLOT_WIDTH, _PLOT_HEIGHT = 90, 790, 320
_LONGEST_LABEL = 80
_LARGEST_POWER = 307
"""Of ten, whose multiples are finite."""
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Of curves beyond the number of colours."""
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#222}.grid{stroke:#8884;"
    "fill:none}@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"
)


def curves(
    title: str,
    drawn: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    log: bool = False,
    axes: tuple[str, str] = ("step", ""),
) -> str:
    """Return curves over steps, under a legend that names all of them.

    Args:
        title: The figure's title.
        drawn: Label and points (x, y) of each curve. A curve has a gap where y is not finite, or
            not above 0 on a logarithmic axis.
        log: Whether the y axis is logarithmic.
        axes: Titles of the x axis and of the y axis.
    """

    def shown(y: float) -> bool:
        return math.isfinite(y) and (y > 0 or not log)

    def height_of(y: float) -> float:
        return math.log10(y) if log else y

    finite = [point for _, points in drawn for point in points if shown(point[1])]
    left, right = _span([x for x, _ in finite])
    low, high = _span([height_of(y) for _, y in finite])
    bottom = _TOP + 16 * ((len(drawn) + 1) // 2) + _PLOT_HEIGHT

    def across(x: float) -> float:
        return _LEFT + _PLOT_WIDTH * (x - left) / (right - left)

    def down(height: float) -> float:
        return bottom - _PLOT_HEIGHT * (height - low) / (high - low)

    parts = []
    for y in _log_ticks(low, high) if log else _round_values(low, high, 5):
        at = down(height_of(y))
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}h{_PLOT_WIDTH}"/>')
        parts.append(_text(_LEFT - 8, at + 4, significant(y), "end"))
    parts += [
        _text(across(x), bottom + 18, thousands(round(x)), "middle")
        for x in _round_values(left, right, 8)
        if x == round(x)
    ]
    x_title, y_title = axes
    middle = bottom - _PLOT_HEIGHT / 2
    parts.append(_text(_LEFT + _PLOT_WIDTH / 2, bottom + 36, x_title, "middle"))
    parts.append(
        f'<g transform="rotate(-90 16 {middle:.1f})">{_text(16, middle, y_title, "middle")}</g>'
    )
    for index, (label, points) in enumerate(drawn):
        dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
        stroke = f'stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="1.5"' + (
            f' stroke-dasharray="{dash}"' if dash else ""
        )
        for whole, part in groupby(points, key=lambda point: shown(point[1])):
            if whole:
                line = " ".join(f"{across(x):.1f},{down(height_of(y)):.1f}" for x, y in part)
                parts.append(f'<polyline points="{line}" fill="none" {stroke}/>')
        x_label, y_label = 20 + 440 * (index % 2), _TOP + 16 * (index // 2)
        parts.append(
            f'<path d="M{x_label} {y_label - 4}h22" {stroke}/>'
            + _text(x_label + 28, y_label, label)
        )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 46}" '
        f'role="img"><title>{_safe(title)}</title>{_STYLE}'
    )
    return "\n".join([head, _text(10, 14, title), *parts, "</svg>", ""])


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _round_values(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` multiples of 1, 2 or 5 times a power of ten between two values."""
    rough = (high - low) / most
    if not 0 < rough < math.inf:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two values, which are given by their logarithms, or what else a
    short axis needs.
    """
    powers = range(math.floor(low), min(math.ceil(high), _LARGEST_POWER) + 1)
    for sizes in ((1,), (1, 2, 5), range(1, 10)):
        ticks = [size * 10.0**power for power in powers for size in sizes]
        inside = [tick for tick in ticks if tick and low <= math.log10(tick) <= high]
        if len(inside) >= 3:
            return inside
    return _round_values(10.0**low, 10.0**high, 5)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    """Return a text without markup, and without what a terminal would obey: names of runs stand in
    figures.
    """
    return escape(printable_line(text)[:_LONGEST_LABEL])
