"""A chart as a picture of its own (SVG), for documents: the lines, an axis of steps, and a legend. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from so_tui.trust.printable import printable_line
from so_tui.ui.series import Line
from so_tui.units import significant, thousands

WIDTH, HEIGHT = 960, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 30, 50
_MOST_POINTS = 4000
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""After Okabe and Ito; runs beyond the seventh get dashes."""


def chart_svg(title: str, lines: Sequence[Line], names: Sequence[str]) -> str:
    """Return lines over their steps; values that are not finite leave gaps.

    Args:
        title: What is drawn.
        lines: The lines.
        names: Their names, one each.
    """
    points = [_points(line) for line in lines]
    finite = [(x, y) for line in points for x, y in line if math.isfinite(y)]
    left, right = _span([x for x, _ in finite])
    low, high = _span([y for _, y in finite])

    def place(x: float, y: float) -> str:
        across = _LEFT + (WIDTH - _LEFT - _RIGHT) * (x - left) / (right - left)
        down = HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (y - low) / (high - low)
        return f"{across:.1f},{down:.1f}"

    body = [f'<text x="{_LEFT}" y="20" font-weight="bold">{_text(title)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y, x = low + share * (high - low), left + share * (right - left)
        down, across = place(left, y).partition(",")[2], place(x, low).partition(",")[0]
        body += [
            f'<path d="M{_LEFT} {down}H{WIDTH - _RIGHT}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 8}" y="{down}" text-anchor="end" dominant-baseline="middle">{significant(y)}</text>',
            f'<text x="{across}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle">{thousands(round(x))}</text>',
        ]
    for index, (line, name) in enumerate(zip(points, names, strict=True)):
        style = f'fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.5"'
        if index >= len(COLOURS):
            style += f' stroke-dasharray="{4 + index // len(COLOURS)} 3"'
        for drawn, part in groupby(line, key=lambda point: math.isfinite(point[1])):
            if drawn:
                body.append(f'<polyline {style} points="{" ".join(place(*point) for point in part)}"/>')
        at = _TOP + 18 * index
        body.append(f'<path d="M{WIDTH - 260} {at}h24" {style}/><text x="{WIDTH - 228}" y="{at + 4}">{_text(name)}</text>')
    content = "\n".join(body)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    return f'{head}\n<rect width="100%" height="100%" fill="#fff"/>\n{content}\n</svg>\n'


def _points(line: Line) -> list[tuple[float, float]]:
    """Return step and value of at most as many rows as a picture shows: of each part, its first and its extremes."""
    every = max(1, -(-line.length // _MOST_POINTS))
    found = []
    for start in range(0, line.length, every):
        extremes = line.series.extremes(start, min(line.length, start + every))
        step = line.steps[start] if line.steps is not None else float(start)
        if extremes is None:
            found.append((step, math.nan))
        else:
            found += [(step, value) for value in dict.fromkeys(extremes)]
    return found


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(text: str) -> str:
    return escape(printable_line(text)[:80])
