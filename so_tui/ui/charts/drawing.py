"""From lines to cells: spans per dot column, scales, ticks and dots, then the rows of a plot, its
axis and labels, and the styles of roles.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from so_tui.ui.charts.series import Axis, Line, Span
from so_tui.ui.text import GlyphName

Spans = list[Span | None]
"""Extremes of a line by column; None where there is nothing to draw."""
OUTLIER_RANGES = 3.0
"""How many times the range of the middle half of all values a value may lie outside of it, on a
scale that leaves outliers out.
"""


SIGN_CELLS, SIGN_SHIFT = 24, 7
"""Cells between two signs on a line, and between those of two lines that follow each other."""
LARGEST, SMALLEST = 1e300, 1e-300
"""Range of what a scale shows: nearer to the limits of floats, its arithmetic would overflow."""


class _Glyphs(NamedTuple):
    """How many dots a character cell holds, and which character shows which dots."""

    bits: Sequence[Sequence[int]]
    """Bit of a dot, by column, then by row from the top."""
    characters: str
    """Character of each mask."""


_GLYPHS: dict[GlyphName, _Glyphs] = {
    "braille": _Glyphs(((1, 2, 4, 64), (8, 16, 32, 128)), "".join(map(chr, range(0x2800, 0x2900)))),
    "block": _Glyphs(((1, 4), (2, 8)), " ▘▝▀▖▌▞▛▗▚▐▜▄▙▟█"),
    "ascii": _Glyphs(((1, 2),), " '.|"),
}


@dataclass(frozen=True)
class Scale:
    """Values to heights. ``log`` is base 10; a value that cannot be shown has no height."""

    low: float
    high: float
    log: bool = False
    step: float = 0.0
    """Distance of round ticks that stand whole rows apart; 0 where none do."""

    def heights(self, found: Sequence[Span | None], dots: int) -> list[tuple[int, int] | None]:
        """Return the lowest and highest dot row of each span, counted from the bottom and clamped
        into ``0 .. dots - 1``; None where nothing can be shown.
        """
        base, end, top, shown = self.low, self.high, dots - 1, found
        if self.log:
            base, end = math.log10(base), math.log10(end)
            shown = [
                (math.log10(max(SMALLEST, span[0])), math.log10(span[1]))
                if span is not None and span[1] > 0
                else None
                for span in found
            ]
        factor = top / (end - base)
        return [
            None
            if span is None
            else (
                round(min(top, max(0, (span[0] - base) * factor))),
                round(min(top, max(0, (span[1] - base) * factor))),
            )
            for span in shown
        ]


def spans(line: Line, axis: Axis, columns: int) -> tuple[Spans, list[int]]:
    """Return the extremes of ``line`` in each dot column, and the columns that hold a gap."""
    indices = axis.indices(line, columns)
    extremes, has_gap = line.series.extremes, line.series.has_gap
    parts = list(pairwise(indices))
    found = [extremes(start, stop) if stop > start else None for start, stop in parts]
    if not has_gap(indices[0], indices[-1]):
        return found, []
    return found, [column for column, part in enumerate(parts) if has_gap(*part)]


def _without_outliers(values: list[float], *, log: bool) -> list[float]:
    """Return those values, ascending, that lie within OUTLIER_RANGES times the range of their
    middle half around it, as a scale shows them.
    """
    values.sort()
    shown = [math.log10(min(LARGEST, value)) for value in values] if log else values
    first, third = shown[len(shown) // 4], shown[3 * len(shown) // 4]
    reach = OUTLIER_RANGES * (third - first)
    return values[bisect_left(shown, first - reach) : bisect_right(shown, third + reach)]


def columns_beyond(lines: Iterable[Sequence[Span | None]], scale: Scale) -> int:
    """Return how many columns have a value outside the scale."""
    drawn = [span for line in lines for span in line if span is not None]
    return sum(
        low < scale.low or high > scale.high for low, high in drawn if high > 0 or not scale.log
    )


def fit_scale(
    lines: Iterable[Sequence[Span | None]],
    *,
    log: bool = False,
    zero: bool = False,
    ceiling: float | None = None,
    robust: bool = False,
) -> Scale:
    """Return a scale that holds all spans with a little air. ``zero`` keeps 0 on it, ``ceiling``
    that value; without values: 0 to 1.

    ``log`` is given up where no value is positive. A ``robust`` scale leaves outliers out.
    """
    values = [value for line in lines for span in line if span is not None for value in span]
    log = log and max(values, default=1.0) > 0
    if log:
        values = [value for value in values if value > 0] or [1.0]
    if robust and values:
        values = _without_outliers(values, log=log)
    ends = min(values, default=0.0), max(values, default=1.0)
    least = SMALLEST if log else -LARGEST
    low, high = (min(LARGEST, max(least, value)) for value in ends)
    if log:
        # As of values that differ in their last digit only.
        same = math.log10(low) == math.log10(high)
        return Scale(high / 2, high * 2, log) if same else Scale(low, high, log)
    if zero:
        low = min(0.0, low)
    if ceiling is not None:
        high = max(ceiling, high)
    if high - low < SMALLEST:
        pad = abs(high) * 0.1 if abs(high) > SMALLEST else 1.0
        return Scale(low if zero else low - pad, high + pad)
    pad = (high - low) * 0.05
    return Scale(low if zero and low == 0 else low - pad, high if ceiling == high else high + pad)


def with_even_ticks(scale: Scale, height: int, glyphs: GlyphName, per: float = 1.0) -> Scale:
    """Return a linear scale with as little more room as lets round values, divided by ``per``,
    stand whole rows apart in a plot of ``height`` rows.
    """
    low, high, in_row = scale.low / per, scale.high / per, dots_in_row(glyphs)
    top, span = height * in_row - 1, high - low
    room = top if low == 0 else top - 1  # the lowest dot is moved to where ticks fall on dots
    if scale.log or height < 3 or room < 1:
        return scale
    ways = []
    most = height // 2 if low else height - 1  # rows between two ticks that both are shown
    for rows in range(min(2 if height < 9 else 3, most), min(5, most) + 1):
        rough = span * rows * in_row / room
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.999999)
        ways.append((step / (rows * in_row), -rows, step))
    dot, _, step = min(ways)
    first = round((low - (top * dot - span) / 2) / dot) if low else 0
    if low > 0 > first:
        first = 0
    if abs(first) > 1e9:  # values that differ in their last digits alone have no round ticks
        return scale
    return Scale(first * dot * per, (first + top) * dot * per, step=step * per)


def dots_in_row(glyphs: GlyphName) -> int:
    return len(_GLYPHS[glyphs].bits[0])


def _round_values(
    low: float, high: float, most: int, steps: Sequence[float] = (1, 2, 2.5, 5, 10)
) -> list[float]:
    """Return at most ``most`` multiples of a round step in ``[low, high]``."""
    rough = (high - low) / max(1, most)
    if rough <= 0 or not math.isfinite(rough):
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (*steps, 10 * steps[0], 10 * steps[1]):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if step >= rough and last - first + 1 <= most:
            return [index * step for index in range(first, last + 1)]
    return []


_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * step for step in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * step for step in (1, 2, 3, 6, 12)),
    *(_DAY * step for step in (1, 2, 7)),
)


def _time_values(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` multiples of a customary length of time in ``[low, high]``
    (seconds).
    """
    for step in _TIME_STEPS:
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first + 1 <= most:
            return [float(index * step) for index in range(first, last + 1)]
    return [_DAY * days for days in _round_values(low / _DAY, high / _DAY, most)]


class _Canvas:
    """A grid of dots, ``width`` x ``height`` cells, and the layer that last drew in each cell."""

    def __init__(self, width: int, height: int, glyphs: _Glyphs) -> None:
        self.width, self.height, self.glyphs = width, height, glyphs
        self.masks = [[0] * width for _ in range(height)]
        self.layers = [[-1] * width for _ in range(height)]
        dots = range(len(glyphs.bits[0]))
        self.columns, self.dots = width * len(glyphs.bits), height * len(dots)
        self._runs = [
            [[sum(bits[first : last + 1]) for last in dots] for first in dots]
            for bits in glyphs.bits
        ]
        """Mask of a run of dots within a cell, by column, first and last dot from the top."""
        self._signs: dict[int, dict[int, str]] = {}
        """Characters in place of dots, by row and cell."""

    def _column(self, column: int, low: int, high: int, layer: int, beside: Set[int]) -> None:
        """Set the dots ``low .. high`` (from the bottom) of one dot column; a later layer takes the
        whole cell, or shares it with those of ``beside``.
        """
        cell, sub = divmod(column, len(self._runs))
        table, rows, last = self._runs[sub], len(self._runs[sub]), self.dots - 1
        first_row, first_dot = divmod(last - high, rows)
        last_row, last_dot = divmod(last - low, rows)
        for row in range(first_row, last_row + 1):
            first = first_dot if row == first_row else 0
            mask = table[first][last_dot if row == last_row else rows - 1]
            layers, masks = self.layers[row], self.masks[row]
            if layers[cell] == layer:
                masks[cell] |= mask
            elif layers[cell] in beside:
                masks[cell] |= mask
                if cell % 2:  # a cell has one colour: each has its turn
                    layers[cell] = layer
            else:
                masks[cell] = mask
                layers[cell] = layer

    def draw(
        self,
        found: Sequence[Span | None],
        gaps: Sequence[int],
        scale: Scale,
        layer: int,
        beside: Set[int] = frozenset(),
    ) -> None:
        """Draw one line or band: each column's span, joined to the one before it unless a gap lies
        between them. Columns between two spans are filled.

        Layers ``beside`` stay visible where this one is drawn: their dots remain, and every other
        shared cell keeps their colour.
        """
        broken = set(gaps)
        before: tuple[int, int, int] | None = None
        bottom = top = 0
        for column, heights in enumerate(scale.heights(found, self.dots)):
            if column in broken:
                before = None
            if heights is None:
                continue
            low, high = heights
            if before is None:
                before = column - 1, low, high
                bottom, top = low, high
            start, below, above = before
            for at in range(start + 1, column + 1):
                least, most = bottom - 1, top + 1  # touches the column before
                bottom, top = low, high
                if at < column:
                    share = (at - start) / (column - start)
                    bottom = round(below + share * (low - below))
                    top = round(above + share * (high - above))
                if bottom > most:
                    bottom = most
                elif top < least:
                    top = least
                self._column(at, bottom, top, layer, beside)
            before = None if column in broken else (column, low, high)

    def sign(self, layer: int, character: str) -> None:
        """Mark a line where it is seen, every SIGN_CELLS cells, and elsewhere than the lines before
        and after it.
        """
        seen = [
            (cell, rows)
            for cell in range(self.width)
            if (rows := [row for row in range(self.height) if self.layers[row][cell] == layer])
        ]
        if seen:
            for cell, rows in seen[layer * SIGN_SHIFT % min(SIGN_CELLS, len(seen)) :: SIGN_CELLS]:
                self._signs.setdefault(rows[len(rows) // 2], {})[cell] = character

    def row(self, row: int) -> list[tuple[str, int]]:
        """Return the characters of one row with their layer (-1: empty), neighbours of one layer
        joined.
        """
        characters = self.glyphs.characters
        cells = [characters[mask] if mask else " " for mask in self.masks[row]]
        for cell, sign in self._signs.get(row, {}).items():
            cells[cell] = sign
        text, layers = "".join(cells), self.layers[row]
        ends = [cell for cell in range(1, self.width) if layers[cell] != layers[cell - 1]]
        edges = pairwise((0, *ends, self.width))
        return [(text[start:end], layers[start]) for start, end in edges]


# Parts of charts: rows of a plot, the x axis, the gutter of y labels, and the styles of roles.


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
    glyphs: GlyphName,
    styles: Mapping[str, Style],
) -> tuple[list[list[Segment]], Scale]:
    """Return the plot area as segments by row, and its scale, which ``fit`` makes of the visible
    spans.
    """
    width, height = size
    canvas = _Canvas(width, height, _GLYPHS[glyphs])
    measured = [spans(line, axis, canvas.columns) for line in lines]
    scale = fit([found for found, _ in measured])
    for layer, (found, gaps) in enumerate(measured):
        role = lines[layer].role
        # In a plot of one or two rows a GPU's line would hide that of its node all along, and a
        # value the limit that it is close to.
        below = [(other, line.role) for other, line in enumerate(lines[:layer])]
        beside = {
            other for other, kind in below if kind == "limit" or (role == "gpu" and kind != "band")
        }
        canvas.draw(found, gaps, scale, layer, beside)
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
        named = {column for start, label in labels for column in range(start, start + len(label))}
        marked = {column: mark for column, mark in marked.items() if column not in named}
    for start, label in labels:
        cells[start : start + len(label)] = [(character, "label") for character in label]
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
        values = _round_values(axis.low, axis.high, most, (1, 2, 5, 10))
        return [value for value in values if value == round(value)]
    seconds = _time_values(axis.low - axis.origin, axis.high - axis.origin, most)
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
        if start < free or any(start - 1 <= column <= start + len(label) for column in taken):
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
    row: list[Segment], axis: Axis, cursor: float | None, width: int, style: Style
) -> list[Segment]:
    """Return a row of a plot with the cursor's cell replaced; what crosses it stays visible in the
    cursor's colour.
    """
    if not row or cursor is None or not axis.low <= cursor <= axis.high:
        return row
    column = _column(axis, cursor, width)
    before, cell, after = Strip(row, width).divide([column, column + 1, width])
    sign = cell.text.strip(" \u2800") or "│"
    return [*before, Segment(sign, style), *after]


def gutter_text(
    scale: Scale,
    height: int,
    glyphs: GlyphName,
    format_value: Callable[[float], str],
    per: float = 1.0,
) -> list[str]:
    """Return the y labels of a plot, one text of GUTTER cells per row. Labels stand equally far
    apart: the ticks of the scale, or else the values of every third row. Values are divided by
    ``per``.
    """
    texts = [" " * GUTTER] * height
    in_row = dots_in_row(glyphs)
    top = max(1, height * in_row - 1)
    if scale.step:
        ticks = range(
            math.ceil(scale.low / scale.step - 1e-6), math.floor(scale.high / scale.step + 1e-6) + 1
        )
        shares = [(at * scale.step - scale.low) / (scale.high - scale.low) for at in ticks]
        named = [
            (round(share * top) // in_row, at * (scale.step / per))
            for at, share in zip(ticks, shares, strict=True)
        ]
    else:
        low, high = scale.low, scale.high
        if scale.log:
            low, high = math.log10(low), math.log10(high)
        middles = ((row, (row * in_row + (in_row - 1) / 2) / top) for row in range(0, height, 3))
        values = [(row, low + share * (high - low)) for row, share in middles]
        named = [(row, (10.0**value if scale.log else value) / per) for row, value in values]
    wide = scale.log and scale.high > 10 * scale.low
    for row, value in named:
        short = float(f"{value:.2e}"), float(f"{value:.1e}")
        ways = [_label(each, format_value(each)) for each in (*[value] * (not wide), *short[wide:])]
        texts[height - 1 - row] = f"{next(filter(None, ways), ''):>{GUTTER - 1}} "
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


class RoleStyles:
    """Styles of what a widget draws, by role, looked up again only when theme or focus changed:
    looking them up costs as much as drawing.
    """

    def __init__(self, roles: Mapping[str, str], focused: Mapping[str, str] | None = None) -> None:
        """Take the roles as they look, and those that look otherwise while the widget has the
        focus.
        """
        self._roles, self._focused = roles, {**roles, **(focused or {})}
        self._key: tuple[object, ...] = ()
        self._styles: dict[str, Style] = {}

    def get(self, widget: Widget) -> dict[str, Style]:
        """Return the styles, each also in bold, and the widget's own as ``base``."""
        key = (widget.app.theme, widget.has_focus, widget.is_maximized)
        if key != self._key:
            parse, base = widget.app.stylesheet.parse_style, widget.rich_style
            self._key, self._styles = key, {"base": base}
            for role, look in (self._focused if widget.has_focus else self._roles).items():
                style = base + parse(look).rich_style
                self._styles |= {role: style, f"bold {role}": style + BOLD}
        return self._styles
