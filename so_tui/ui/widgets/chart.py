"""Charts: lines over the dashboard's one x axis, drawn once per change and kept as strips."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from so_tui.ui.series import Axis, Line
from so_tui.ui.text import mark_duration, significant, thousands
from so_tui.ui.widgets.plot import GLYPHS, Canvas, GlyphName, Glyphs, Scale, fit_scale, round_values, spans, ticks, time_values

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
    """The newest value of ``line`` at or before ``x`` of ``axis``; None before its first."""
    positions = line.times
    if axis.unit == "step":
        if line.steps is not None:
            positions = line.steps
        else:
            x = axis.time_of(x)
    index = bisect_right(positions, x, 0, line.length) - 1
    return line.series.value(index) if index >= 0 else None


def plot_key(lines: Sequence[Line], axis: Axis) -> tuple[object, ...]:
    """What a plot depends on: equal keys, equal plots. Values right of the stretch play no part, so a held axis keeps its plot."""
    lengths = []
    for line in lines:
        positions, end = line.times, axis.high
        if axis.unit == "step":
            positions, end = (line.steps, axis.high) if line.steps is not None else (line.times, axis.time_of(axis.high))
        beyond = line.length > 0 and positions[line.length - 1] > end
        lengths.append((id(line.series), line.role, -1 if beyond else line.length))
    return axis.unit, axis.low, axis.high, tuple(lengths)


def x_text(axis: Axis, x: float) -> str:
    """A place on the axis in words: ``1 240`` steps or ``12 m 04 s``."""
    if axis.unit == "step":
        return thousands(round(x))
    return mark_duration(max(0.0, x - axis.origin))


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
    """The plot area as segments by row, and the scale that was used: ``scale``, or what ``fit`` makes of the visible spans."""
    width, height = size
    canvas = Canvas(width, height, glyphs)
    measured = [spans(line, axis, canvas.columns) for line in lines]
    if scale is None:
        assert fit is not None
        scale = fit([found for found, _ in measured])
    for layer, (found, gaps) in enumerate(measured):
        canvas.draw(found, gaps, scale, layer, connect=lines[layer].role != "band")
    empty = styles["empty"]
    rows = [[Segment(text, empty if layer < 0 else styles[lines[layer].role]) for text, layer in canvas.row(row)] for row in range(height)]
    return rows, scale


def axis_row(axis: Axis, width: int, marks: Sequence[Mark], styles: Mapping[str, Style]) -> list[Segment]:
    """The x axis: a thin rule with round values written into it and marks on it."""
    cells: list[tuple[str, str]] = [("─", "axis")] * width
    span = axis.high - axis.low

    def column(x: float) -> int:
        return min(width - 1, max(0, int((x - axis.low) / span * width))) if span > 0 else 0

    most = max(2, width // 11)
    if axis.unit == "step":
        values = round_values(axis.low, axis.high, most, (1, 2, 5, 10))
        values = [value for value in values if value == round(value)]
    else:
        values = [axis.origin + seconds for seconds in time_values(axis.low - axis.origin, axis.high - axis.origin, most)]
    marked = {column(x): mark for mark in marks if axis.low <= (x := mark.at(axis)) <= axis.high}
    free = 0
    for value in values:
        label = x_text(axis, value)
        start = min(max(0, column(value) - len(label) // 2), width - len(label) - 1)
        if start < free or any(start <= place < start + len(label) for place in marked):
            continue
        if start > 0:
            label = f" {label} "
            start -= 1
        for offset, character in enumerate(label[: width - start]):
            cells[start + offset] = (character, "label")
        free = start + len(label) + 1
    for place, mark in marked.items():
        cells[place] = (mark.sign, mark.role)
    return joined(cells, styles)


def joined(cells: Sequence[tuple[str, str]], styles: Mapping[str, Style]) -> list[Segment]:
    """Cells of one role in a row become one segment."""
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


def gutter_text(scale: Scale, height: int, format_value: Callable[[float], str]) -> list[str]:
    """The y labels of a plot, one text of GUTTER cells per row, at most every third row named."""
    texts = [" " * GUTTER] * height
    for value in ticks(scale, max(2, height // 3 + 1)):
        place = scale.height(value, height)
        if place is not None:
            texts[height - 1 - place] = f"{format_value(value):>{GUTTER - 1}} "[-GUTTER:]
    return texts


class RoleStyles:
    """A widget's component styles by role, looked up again only when theme or focus changed: looking them up costs as much as drawing."""

    def __init__(self, prefix: str, roles: Sequence[str]) -> None:
        self._prefix, self._roles = prefix, roles
        self._key: tuple[object, ...] = ()
        self._styles: dict[str, Style] = {}

    def get(self, widget: Widget) -> dict[str, Style]:
        """The styles, and the widget's own as ``base``."""
        key = (widget.app.theme, widget.has_focus, widget.is_maximized)
        if key != self._key:
            self._key = key
            self._styles = {role: widget.get_component_rich_style(f"{self._prefix}--{role}") for role in self._roles}
            self._styles["base"] = widget.rich_style
        return self._styles


class Chart(Widget, can_focus=True):
    """One titled plot. Data comes whole through ``show``; nothing is computed while lines are drawn."""

    ALLOW_MAXIMIZE = True
    ROLES = (
        "raw",
        "main",
        "second",
        "third",
        "fourth",
        "band",
        "axis",
        "label",
        "mark",
        "bad",
        "cursor",
        "title",
        "value",
        "note",
        "empty",
    )
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"chart--{role}" for role in ROLES}
    DEFAULT_CSS = """
    Chart {
        height: 1fr; width: 1fr;
        .chart--raw { color: $raw-line; }
        .chart--main { color: $accent; }
        .chart--second { color: $secondary; }
        .chart--third { color: $exposed; }
        .chart--fourth { color: $success; }
        .chart--band { color: $raw-line; }
        .chart--axis { color: $rule; }
        .chart--label { color: $faint; }
        .chart--mark { color: $success; }
        .chart--bad { color: $error; }
        .chart--cursor { color: $warning; }
        .chart--title { text-style: bold; }
        .chart--value { color: $accent; text-style: bold; }
        .chart--note { color: $faint; }
        &:focus .chart--title { color: $accent; text-style: bold underline; }
    }
    """

    class CursorMoved(Message):
        """A place on the axis was pointed at with the mouse."""

        def __init__(self, x: float) -> None:
            self.x = x
            super().__init__()

    class Zoomed(Message):
        """The wheel turned: ``factor`` below 1 looks closer, about ``x``."""

        def __init__(self, factor: float, x: float) -> None:
            self.factor, self.x = factor, x
            super().__init__()

    def __init__(
        self,
        title: str,
        *,
        unit: str = "",
        format_value: Callable[[float], str] = significant,
        zero: bool = False,
        ceiling: float | None = None,
        glyphs: GlyphName = "braille",
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.title, self.unit, self.format_value = title, unit, format_value
        self.zero, self.ceiling, self.glyphs = zero, ceiling, glyphs
        self.log_scale = False
        self.note = ""
        self.lines: tuple[Line, ...] = ()
        self.names: tuple[str, ...] = ()
        self.axis: Axis | None = None
        self.marks: tuple[Mark, ...] = ()
        self.cursor: float | None = None
        self.waiting = "waiting for the first step"
        self._strips: list[Strip] = []
        self._drawn: tuple[object, ...] = ()
        self._shown: tuple[object, ...] = ()
        self._role_styles = RoleStyles("chart", self.ROLES)
        self._plot_key: tuple[object, ...] = ()
        self._plotted: tuple[list[list[Segment]], Scale] = ([], Scale(0, 1))

    def show(
        self,
        lines: Sequence[Line],
        names: Sequence[str],
        axis: Axis | None,
        *,
        marks: Sequence[Mark] = (),
        cursor: float | None = None,
        note: str = "",
    ) -> None:
        """Take new data: ``names`` say what each line's value is called in the heading (empty: not shown there)."""
        self.lines, self.names, self.axis = tuple(lines), tuple(names), axis
        self.marks, self.cursor, self.note = tuple(marks), cursor, note
        stretch = None if axis is None else (axis.unit, axis.low, axis.high)
        # Series grow in place, so their length says whether there is anything new.
        shown = (
            tuple((id(line.series), line.length, line.role) for line in lines),
            self.names,
            stretch,
            self.marks,
            cursor,
            note,
            self.waiting,
        )
        if shown != self._shown:
            self._shown = shown
            self.redraw()

    def redraw(self) -> None:
        self._drawn = ()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        key = (self.size, self.has_focus, self.app.theme, self.glyphs)
        if key != self._drawn:
            self._strips, self._drawn = self._draw(), key
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self.rich_style)

    def notify_style_update(self) -> None:
        self._drawn = ()
        super().notify_style_update()

    def _draw(self) -> list[Strip]:
        width, height = self.size
        styles = self._role_styles.get(self)
        base = styles["base"]
        plot_width, plot_height = width - GUTTER, height - 2
        rows = [self._heading(styles)]
        if plot_width < 4 or plot_height < 1:
            return [Strip(rows[0]).adjust_cell_length(width, base)]
        if self.axis is None or not any(line.length for line in self.lines):
            rows.append([Segment(" " * GUTTER + self.waiting, styles["note"])])
        else:
            body, scale = self._plot(plot_width, plot_height, styles)
            labels = gutter_text(scale, plot_height, self.format_value)
            body = [self._with_cursor(row, plot_width, styles) for row in body]
            rows += [[Segment(label, styles["label"]), *row] for label, row in zip(labels, body, strict=True)]
            corner = f"{self.axis.unit} "[-GUTTER:].rjust(GUTTER)
            rows.append([Segment(corner, styles["label"]), *axis_row(self.axis, plot_width, self.marks, styles)])
        return [Strip(row).adjust_cell_length(width, base) for row in rows]

    def _plot(self, width: int, height: int, styles: dict[str, Style]) -> tuple[list[list[Segment]], Scale]:
        """The plot area; the one before where neither the stretch nor the lines changed (what is newer lies right of the stretch)."""
        axis = self.axis
        assert axis is not None
        key = (width, height, self.log_scale, self.glyphs, id(styles), *plot_key(self.lines, axis))
        if key != self._plot_key:
            self._plot_key = key
            self._plotted = plot_rows(self.lines, axis, None, (width, height), GLYPHS[self.glyphs], styles, fit=self._fit)
        return self._plotted

    def _fit(self, found: list[list[tuple[float, float] | None]]) -> Scale:
        return fit_scale(found, log=self.log_scale, zero=self.zero, ceiling=self.ceiling)

    def _heading(self, styles: Mapping[str, Style]) -> list[Segment]:
        segments = [Segment(self.title, styles["title"])]
        axis = self.axis
        for line, name in zip(self.lines, self.names, strict=True):
            if not name or axis is None or not line.length:
                continue
            value = line.series.value(line.length - 1) if self.cursor is None else value_at(line, axis, self.cursor)
            shown = "-" if value is None else self.format_value(value)
            segments += [
                Segment(f"  {name} ".replace("  . ", "  "), styles["note"]),
                Segment(shown, styles["label" if line.role == "raw" else "value" if line.role == "main" else line.role]),
            ]
        if self.unit:
            segments.append(Segment(f" {self.unit}", styles["note"]))
        if self.cursor is not None and axis is not None:
            segments.append(Segment(f"  at {axis.unit} {x_text(axis, self.cursor)}", styles["cursor"]))
        if self.log_scale:
            segments.append(Segment("  log y", styles["note"]))
        if self.note:
            segments.append(Segment(f"  {self.note}", styles["note"]))
        return segments

    def _with_cursor(self, row: list[Segment], width: int, styles: Mapping[str, Style]) -> list[Segment]:
        """The row with the cursor's cell replaced; a crossing line stays visible in the cursor's colour."""
        axis, cursor = self.axis, self.cursor
        if axis is None or cursor is None or not axis.low <= cursor <= axis.high:
            return row
        column = min(width - 1, int((cursor - axis.low) / (axis.high - axis.low) * width))
        left, at, right = Strip(row).divide([column, column + 1, width])
        character = at.text if at.text.strip() not in ("", "\u2800") else "│"
        return [*left, Segment(character, styles["cursor"]), *right]

    def _x_at(self, offset: int) -> float | None:
        width = self.size.width - GUTTER
        if self.axis is None or width < 1 or offset < GUTTER:
            return None
        return self.axis.low + (offset - GUTTER + 0.5) / width * (self.axis.high - self.axis.low)

    def on_click(self, event: events.Click) -> None:
        x = self._x_at(event.x)
        if x is not None:
            self.post_message(self.CursorMoved(x))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, 0.7)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 1 / 0.7)

    def _wheel(self, event: events.MouseEvent, factor: float) -> None:
        x = self._x_at(event.x)
        if x is not None:
            event.stop()
            event.prevent_default()
            self.post_message(self.Zoomed(factor, x))
