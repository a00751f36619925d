"""Figures of a report as SVG: bars beside each other, and lines over steps. They follow the viewer's light or dark colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from msgspec import Struct

from so_tui.units import significant

_WIDTH, _LABEL, _ROW, _TOP = 900, 420, 18, 34
_PLOT_HEIGHT = 260
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
_DASHES = ("", "6 3", "2 3")
"""Of lines beyond the number of colours."""
_STYLE = "<style>text{font:12px sans-serif;fill:#222}.axis{stroke:#888;fill:none}@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"


class Bar(Struct, frozen=True):
    """One row: a label, and a value for each series; None leaves one out."""

    label: str
    values: tuple[float | None, ...]


class Line(Struct, frozen=True):
    label: str
    values: tuple[float, ...]


def bars(title: str, series: Sequence[str], rows: Sequence[Bar], unit: str) -> str:
    """Return horizontal bars, a group for each row."""
    most = max((value for row in rows for value in row.values if value is not None), default=0.0) or 1.0
    room = _WIDTH - _LABEL - 110
    parts, y = _legend(series), _TOP
    for row in rows:
        parts.append(_text(_LABEL - 8, y + _ROW * len(series) / 2 + 4, row.label, "end"))
        for index, value in enumerate(row.values):
            if value is not None:
                length = room * value / most
                colour = _COLOURS[index % len(_COLOURS)]
                parts.append(f'<rect x="{_LABEL}" y="{y + 2}" width="{length:.1f}" height="{_ROW - 4}" fill="{colour}"/>')
                parts.append(_text(_LABEL + length + 6, y + _ROW - 5, f"{significant(value)} {unit}"))
            y += _ROW
        y += 8
    return _svg(title, y + 10, parts)


def lines(title: str, curves: Sequence[Line], unit: str) -> str:
    """Return curves over steps, which begin at 1."""
    values = [value for curve in curves for value in curve.values if value == value]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = (high - low) or 1.0
    longest = max((len(curve.values) for curve in curves), default=2)
    left, top, width = 70, _TOP + 16 * ((len(curves) + 1) // 2), _WIDTH - 90

    def at(index: int, value: float) -> str:
        return f"{left + width * index / max(1, longest - 1):.1f},{top + _PLOT_HEIGHT * (high - value) / span:.1f}"

    parts = [f'<path class="axis" d="M{left} {top}V{top + _PLOT_HEIGHT}H{left + width}"/>']
    parts += [_text(left - 6, top + 5, significant(high), "end"), _text(left - 6, top + _PLOT_HEIGHT, significant(low), "end")]
    parts.append(_text(left + width, top + _PLOT_HEIGHT + 16, f"{unit}, steps 1 to {longest}", "end"))
    for index, curve in enumerate(curves):
        drawn = _stroke(index)
        points = " ".join(at(step, value) for step, value in enumerate(curve.values) if value == value)
        parts.append(f'<polyline points="{points}" fill="none" {drawn}/>')
        x, y = 20 + 440 * (index % 2), _TOP + 16 * (index // 2)
        parts.append(f'<path d="M{x} {y - 4}h22" {drawn}/>' + _text(x + 28, y, curve.label))
    return _svg(title, top + _PLOT_HEIGHT + 30, parts)


def _stroke(index: int) -> str:
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return f'stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="1.5"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _legend(series: Sequence[str]) -> list[str]:
    if len(series) < 2:
        return []
    places = [(_LABEL + 150 * index, name) for index, name in enumerate(series)]
    return [
        f'<rect x="{x}" y="20" width="10" height="8" fill="{_COLOURS[index]}"/>' + _text(x + 14, 28, name)
        for index, (x, name) in enumerate(places)
    ]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img"><title>{escape(title)}</title>{_STYLE}'
    return "\n".join([head, _text(10, 14, title), *parts, "</svg>", ""])
