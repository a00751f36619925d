"""Parts of charts: rows of a plot, the x axis, the gutter of y labels, and the styles of roles."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.widget import Widget

from so_tui.ui.charts.canvas import (
    Canvas,
    Glyphs,
    Scale,
    Spans,
    round_values,
    spans,
    ticks,
    time_values,
)
from so_tui.ui.charts.series import Axis, Line

GUTTER = 7
"""Cells left of every plot, the same everywhere, so that plots above each other share their
columns.
"""


BOLD = Style(bold=True)


@dataclass(frozen=True, slots=True)
class Mark:
    """An event on the x axis: a checkpoint, a resume, a loss that was not a number."""

    step: float
    time: float
    sign: str
    role: str

    def at(self, axis: Axis) -> float:
        return self.step if axis.unit == "step" else self.time


def value_at(line: Line, axis: Axis, x: float) -> float | None:
    """Return the newest value of ``line`` at or before ``x`` of ``axis``; None before its first."""
    positions, x = axis.positions(line, x)
    index = bisect_right(positions, x, 0, line.length) - 1
    return line.series.value(index) if index >= 0 else None


def plot_key(lines: Sequence[Line], axis: Axis) -> tuple[object, ...]:
    """Return a key of a plot: equal keys, equal plots. Values right of the range are left out, so
    that a held axis keeps its plot.
    """
    lengths = []
    for line in lines:
        positions, end = axis.positions(line, axis.high)
        beyond = line.length > 0 and positions[line.length - 1] > end
        lengths.append((id(line.series), line.role, line.sign, -1 if beyond else line.length))
    return axis.unit, axis.low, axis.high, tuple(lengths)


def plot_rows(
    lines: Sequence[Line],
    axis: Axis,
    fit: Callable[[list[Spans]], Scale],
    size: tuple[int, int],
    glyphs: Glyphs,
    styles: Mapping[str, Style],
) -> tuple[list[list[Segment]], Scale]:
    """Return the plot area as segments by row, and its scale, which ``fit`` makes of the visible
    spans.
    """
    width, height = size
    canvas = Canvas(width, height, glyphs)
    measured = [spans(line, axis, canvas.columns) for line in lines]
    scale = fit([found for found, _ in measured])
    for layer, (found, gaps) in enumerate(measured):
        role = lines[layer].role
        # In a plot of one or two rows a GPU's line would hide that of its node all along, and a
        # value the limit that it is close to.
        below = [(other, line.role) for other, line in enumerate(lines[:layer])]
        beside = frozenset(
            other for other, kind in below if kind == "limit" or (role == "gpu" and kind != "band")
        )
        canvas.draw(found, gaps, scale, layer, connect=role != "band", beside=beside)
    for layer, line in enumerate(lines):
        if line.sign:
            canvas.sign(layer, line.sign)
    empty = styles["empty"]
    rows = [
        [
            Segment(text, empty if layer < 0 else styles[lines[layer].role])
            for text, layer in canvas.row(row)
        ]
        for row in range(height)
    ]
    return rows, scale


def axis_row(
    axis: Axis, width: int, marks: Sequence[Mark], styles: Mapping[str, Style]
) -> list[Segment]:
    """Return the x axis: a thin rule with round values and marks.

    Labels keep off the marks, unless many marks leave no room for two: then those that labels cover
    are not drawn.
    """
    cells: list[tuple[str, str]] = [("─", "axis")] * width
    marked = {
        _column(axis, x, width): mark
        for mark in marks
        if axis.low <= (x := mark.at(axis)) <= axis.high
    }
    labels = _labels(axis, width, marked.keys())
    if len(labels) < 2 and len(marked) > width // 8:
        labels = _labels(axis, width, ())
        covered = {column for start, label in labels for column in range(start, start + len(label))}
        marked = {column: mark for column, mark in marked.items() if column not in covered}
    for start, label in labels:
        for offset, character in enumerate(label[: width - start]):
            cells[start + offset] = (character, "label")
    for column, mark in marked.items():
        cells[column] = (mark.sign, mark.role)
    return joined(cells, styles)


def _column(axis: Axis, x: float, width: int) -> int:
    span = axis.high - axis.low
    return min(width - 1, max(0, int((x - axis.low) / span * width))) if span > 0 else 0


def _labels(axis: Axis, width: int, taken: Collection[int]) -> list[tuple[int, str]]:
    """Return round values with their first cells: few, but two besides 0 where the axis has room,
    so that lengths can be read off it.
    """
    most = max(2, width // 11)
    best: list[tuple[int, str]] = []
    for number in range(most, max(most, width // 4) + 1):
        labels = _placed(axis, width, _round_positions(axis, number), taken)
        if len(labels) > len(best):
            best = labels
        if sum(label.strip() != "0" for _, label in labels) >= 2:
            return labels
    return best


def _round_positions(axis: Axis, most: int) -> list[float]:
    if axis.unit == "step":
        values = round_values(axis.low, axis.high, most, (1, 2, 5, 10))
        return [value for value in values if value == round(value)]
    seconds = time_values(axis.low - axis.origin, axis.high - axis.origin, most)
    return [axis.origin + second for second in seconds]


def _placed(
    axis: Axis, width: int, values: Sequence[float], taken: Collection[int]
) -> list[tuple[int, str]]:
    """Return the labels of ``values`` that touch neither each other nor a taken cell."""
    labels: list[tuple[int, str]] = []
    free = 0
    for value in values:
        # With every part of a time: neighbours deep in a long run differ in the last.
        label = axis.text(value, parts=4)
        start = min(max(0, _column(axis, value, width) - len(label) // 2), width - len(label) - 1)
        if start < free or any(start <= column < start + len(label) for column in taken):
            continue
        if start > 0:
            label = f" {label} "
            start -= 1
        labels.append((start, label))
        free = start + len(label) + 1
    return labels


def cells_in(pieces: Iterable[tuple[str, str]]) -> int:
    """Return the cells of texts with their roles."""
    return sum(cell_len(text) for text, _ in pieces)


def joined(cells: Sequence[tuple[str, str]], styles: Mapping[str, Style]) -> list[Segment]:
    """Join cells of one role in a row into one segment."""
    segments: list[Segment] = []
    text, current = "", ""  # a plain loop: groupby takes twice as long, in each row of each chart
    for character, role in cells:
        if role != current and text:
            segments.append(Segment(text, styles[current]))
            text = ""
        current = role
        text += character
    if text:
        segments.append(Segment(text, styles[current]))
    return segments


def with_cursor(
    row: list[Segment], axis: Axis | None, cursor: float | None, width: int, style: Style
) -> list[Segment]:
    """Return a row of a plot with the cursor's cell replaced; what crosses it stays visible in the
    cursor's colour.
    """
    if axis is None or cursor is None or not axis.low <= cursor <= axis.high:
        return row
    column = _column(axis, cursor, width)
    for number, (text, beside, _) in enumerate(row):
        if column < len(text):  # each character of a plot takes one cell
            sign = text[column] if text[column] not in " \u2800" else "│"
            parts = (text[:column], beside), (sign, style), (text[column + 1 :], beside)
            shown = [Segment(part, styled) for part, styled in parts if part]
            return [*row[:number], *shown, *row[number + 1 :]]
        column -= len(text)
    return row


def gutter_text(
    scale: Scale, height: int, format_value: Callable[[float], str], per: float = 1.0
) -> list[str]:
    """Return the y labels of a plot, one text of GUTTER cells per row, at most every third row
    named; values are divided by ``per``.
    """
    texts = [" " * GUTTER] * height
    written = Scale(scale.low / per, scale.high / per, scale.log)
    for value in ticks(written, max(2, height // 3 + 1)):
        row = scale.height(value * per, height)
        if row is not None:
            texts[height - 1 - row] = f"{_label(value, format_value(value)):>{GUTTER - 1}} "
    return texts


def _label(value: float, text: str) -> str:
    """Return a value in the cells of a label, where it is written too long as ``text``; empty if no
    other way is shorter.

    None is cut, since a cut number is another number.
    """
    ways = [text]
    if not text.strip("-0123456789,."):
        mantissa, power = f"{value:e}".split("e")
        if "." in text:
            ways.append(text.rstrip("0"))
        for unit, sign in ((1e6, "M"), (1e3, "k")):
            if 1 <= abs(value) / unit < 1e5:
                ways.append(f"{value / unit:g}{sign}")
        ways.append(f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}")
    return next((way for way in ways if len(way) < GUTTER), "")


def role_css(prefix: str, roles: Mapping[str, str]) -> str:
    """Return the rules of a widget's component classes: a style for each role."""
    return "".join(f".{prefix}--{role} {{ {style}; }}\n" for role, style in roles.items() if style)


class RoleStyles:
    """A widget's component styles by role, looked up again only when theme or focus changed:
    looking them up costs as much as drawing.
    """

    def __init__(self, prefix: str, roles: Iterable[str]) -> None:
        self._prefix, self._roles = prefix, tuple(roles)
        self._key: tuple[object, ...] = ()
        self._styles: dict[str, Style] = {}

    def get(self, widget: Widget) -> dict[str, Style]:
        """Return the styles, each also in bold, and the widget's own as ``base``."""
        key = (widget.app.theme, widget.has_focus, widget.is_maximized)
        if key != self._key:
            self._key, self._styles = key, {"base": widget.rich_style}
            for role in self._roles:
                style = widget.get_component_rich_style(f"{self._prefix}--{role}")
                self._styles |= {role: style, f"bold {role}": style + BOLD}
        return self._styles
