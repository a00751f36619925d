"""Parts of charts: rows of a plot, the x axis, the gutter of y labels, and the styles of roles."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.content import Span
from textual.strip import Strip
from textual.style import Style as VisualStyle
from textual.widget import Widget

from so_tui.ui.charts.canvas import Canvas, Glyphs, Scale, round_values, spans, ticks, time_values
from so_tui.ui.charts.series import Axis, Line
from so_tui.ui.text import Content
from so_tui.ui.textual_fixes import DrawnRowsMixin
from so_tui.units import mark_duration, thousands

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
    from so_tui.plan.plan import GPU_MARGIN

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


GUTTER = 7
"""Cells left of every plot, the same everywhere, so that plots above each other share their columns."""


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
    positions = line.times
    if axis.unit == "step":
        if line.steps is not None:
            positions = line.steps
        else:
            x = axis.time_of(x)
    index = bisect_right(positions, x, 0, line.length) - 1
    return line.series.value(index) if index >= 0 else None


def plot_key(lines: Sequence[Line], axis: Axis) -> tuple[object, ...]:
    """Return a key of a plot: equal keys, equal plots. Values right of the range are left out, so that a held axis keeps its plot."""
    lengths = []
    for line in lines:
        positions, end = line.times, axis.high
        if axis.unit == "step":
            positions, end = (
                (line.steps, axis.high)
                if line.steps is not None
                else (line.times, axis.time_of(axis.high))
            )
        beyond = line.length > 0 and positions[line.length - 1] > end
        lengths.append((id(line.series), line.role, line.sign, -1 if beyond else line.length))
    return axis.unit, axis.low, axis.high, tuple(lengths)


def x_text(axis: Axis, x: float) -> str:
    """Return a position on the axis as text: ``1,240`` steps or ``12 m 4 s``."""
    if axis.unit == "step":
        return thousands(round(x))
    return mark_duration(max(0.0, x - axis.origin))


def _tick_text(axis: Axis, x: float) -> str:
    """Return ``x_text`` with every part of a time: neighbours deep in a long run differ in the last."""
    return (
        x_text(axis, x)
        if axis.unit == "step"
        else mark_duration(max(0.0, x - axis.origin), parts=4)
    )


def plot_rows(
    lines: Sequence[Line],
    axis: Axis,
    scale: Scale | None,
    size: tuple[int, int],
    glyphs: Glyphs,
    styles: Mapping[str, Style],
    *,
    fit: Callable[[list[list[tuple[float, float] | None]]], Scale] | None = None,
) -> tuple[list[list[Segment]], Scale]:
    """Return the plot area as segments by row, and its scale: ``scale``, or the one that ``fit`` makes of the visible spans."""
    width, height = size
    canvas = Canvas(width, height, glyphs)
    measured = [spans(line, axis, canvas.columns) for line in lines]
    if scale is None:
        assert fit is not None
        scale = fit([found for found, _ in measured])
    for layer, (found, gaps) in enumerate(measured):
        role = lines[layer].role
        # In a plot of one or two rows a GPU's line would hide that of its node all along, and a value the limit that it is close to.
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

    Labels keep off the marks, unless many marks leave no room for two: then those that labels cover are not drawn.
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
    """Return round values with their first cells: few, but two besides 0 where the axis has room, so that lengths can be read off it."""
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
        return [
            value
            for value in round_values(axis.low, axis.high, most, (1, 2, 5, 10))
            if value == round(value)
        ]
    return [
        axis.origin + seconds
        for seconds in time_values(axis.low - axis.origin, axis.high - axis.origin, most)
    ]


def _placed(
    axis: Axis, width: int, values: Sequence[float], taken: Collection[int]
) -> list[tuple[int, str]]:
    """Return the labels of ``values`` that touch neither each other nor a taken cell."""
    labels: list[tuple[int, str]] = []
    free = 0
    for value in values:
        label = _tick_text(axis, value)
        start = min(max(0, _column(axis, value, width) - len(label) // 2), width - len(label) - 1)
        if start < free or any(start <= column < start + len(label) for column in taken):
            continue
        if start > 0:
            label = f" {label} "
            start -= 1
        labels.append((start, label))
        free = start + len(label) + 1
    return labels


def joined(cells: Sequence[tuple[str, str]], styles: Mapping[str, Style]) -> list[Segment]:
    """Join cells of one role in a row into one segment."""
    segments: list[Segment] = []
    text, current = "", ""
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
    """Return a row of a plot with the cursor's cell replaced; what crosses it stays visible in the cursor's colour."""
    if axis is None or cursor is None or not axis.low <= cursor <= axis.high:
        return row
    column = _column(axis, cursor, width)
    for number, (text, beside, _) in enumerate(row):
        if column < len(text):  # each character of a plot takes one cell
            at = Segment(text[column] if text[column] not in " \u2800" else "│", style)
            left, right = text[:column], text[column + 1 :]
            parts = [
                *([Segment(left, beside)] if left else []),
                at,
                *([Segment(right, beside)] if right else []),
            ]
            return [*row[:number], *parts, *row[number + 1 :]]
        column -= len(text)
    return row


def gutter_text(
    scale: Scale, height: int, format_value: Callable[[float], str], per: float = 1.0
) -> list[str]:
    """Return the y labels of a plot, one text of GUTTER cells per row, at most every third row named; values are divided by ``per``."""
    texts = [" " * GUTTER] * height
    for value in ticks(
        Scale(scale.low / per, scale.high / per, scale.log), max(2, height // 3 + 1)
    ):
        row = scale.height(value * per, height)
        if row is not None:
            texts[height - 1 - row] = f"{_label(value, format_value(value)):>{GUTTER - 1}} "
    return texts


def _label(value: float, text: str) -> str:
    """Return a value in the cells of a label, where it is written too long as ``text``; empty if no other way is shorter.

    None is cut, since a cut number is another number.
    """
    ways = [text]
    if not text.strip("-0123456789,."):
        mantissa, power = f"{value:e}".split("e")
        ways += [text.rstrip("0")] if "." in text else []
        ways += [
            f"{value / unit:g}{sign}"
            for unit, sign in ((1e6, "M"), (1e3, "k"))
            if 1 <= abs(value) / unit < 1e5
        ]
        ways.append(f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}")
    return next((way for way in ways if len(way) < GUTTER), "")


def role_css(prefix: str, roles: Mapping[str, str]) -> str:
    """Return the rules of a widget's component classes: a style for each role."""
    return "".join(f".{prefix}--{role} {{ {style}; }}\n" for role, style in roles.items() if style)


class RoleStyles:
    """A widget's component styles by role, looked up again only when theme or focus changed: looking them up costs as much as drawing."""

    def __init__(self, prefix: str, roles: Iterable[str]) -> None:
        self._prefix, self._roles = prefix, tuple(roles)
        self._key: tuple[object, ...] = ()
        self._styles: dict[str, Style] = {}

    def get(self, widget: Widget) -> dict[str, Style]:
        """Return the styles, and the widget's own as ``base``."""
        key = (widget.app.theme, widget.has_focus, widget.is_maximized)
        if key != self._key:
            self._key = key
            self._styles = {
                role: widget.get_component_rich_style(f"{self._prefix}--{role}")
                for role in self._roles
            }
            self._styles["base"] = widget.rich_style
        return self._styles


# Lines of styled text that change every second: painted from their spans, without the wrapping and
# layout of a Static.


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


class StyledLines(DrawnRowsMixin):
    """One row for each line of ``content``; text that does not fit is cut."""

    DEFAULT_CSS = """
    StyledLines { height: auto; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.content = Content("")
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
            self._drawn = ()
        else:
            self.repaint()

    def row_key(self) -> tuple[object, ...]:
        return (
            self.size,
            self.app.theme,
        )  # the outer size stays while it is hidden, and has no room to draw

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return self.rows

    def notify_style_update(self) -> None:
        self._styles_of = {}
        super().notify_style_update()

    def draw_rows(self) -> list[Strip]:
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
