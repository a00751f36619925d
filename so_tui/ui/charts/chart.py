"""Charts: lines over the dashboard's one x axis, drawn once per change and cached as strips."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import events, on
from textual.message import Message
from textual.strip import Strip

from so_tui.runs.records import StepRecord
from so_tui.ui.charts.drawing import (
    GUTTER,
    Mark,
    RoleStyles,
    Scale,
    Spans,
    axis_row,
    cells_in,
    columns_beyond,
    fit_scale,
    gutter_text,
    joined,
    plot_key,
    plot_rows,
    spans,
    value_at,
    with_cursor,
    with_even_ticks,
)
from so_tui.ui.charts.series import Axis, Line, Named, Span, View
from so_tui.ui.text import GlyphName, glyphs_of
from so_tui.ui.textual_fixes import DrawnRowsMixin
from so_tui.ui.widgets import SIDE, framed
from so_tui.units import memory_unit, plural, significant

# How the lines of a chart are told apart: by colour, and by a letter where a colour would be used
# again or is not shown. Pure.


RUN_ROLES = tuple(f"run-{number}" for number in range(1, 9))
"""Colours of runs that are laid over another, and of GPUs, nodes and hosts beside each other."""
SIGNS = string.ascii_lowercase + string.digits[1:]


class Look(NamedTuple):
    """How one of several lines is drawn."""

    role: str
    sign: str
    """The letter that stands on the line and beside its name; empty where the colour alone
    tells.
    """


def look_of(index: int, *, coloured: bool) -> Look:
    """Return the look of one of several lines: on a screen without colours, each has a sign."""
    alone = len(RUN_ROLES) if coloured else 0
    return Look(
        RUN_ROLES[index % len(RUN_ROLES)],
        SIGNS[(index - alone) % len(SIGNS)] if index >= alone else "",
    )


# The heading of a chart, and its frame: the upper line holds the heading, and the lower one is the
# axis. Pure.


LEAST_ROWS_FOR_MORE = 8
"""Rows of a chart from which on a second row of values leaves a plot."""


Pieces = list[tuple[str, str]]
"""Texts, each with the role whose style it has."""


class _Figure(NamedTuple):
    """What stands behind the title of a chart, with the space before it."""

    pieces: Pieces
    kind: Literal["value", "raw", "note"] = "note"


def _arranged(
    title: Pieces, figures: Sequence[_Figure], room: int, height: int
) -> tuple[Pieces, Pieces]:
    """Return the values and notes that fit next to the title, and the values that do not. None is
    cut: a cut number would be a different number.

    Args:
        title: The title, and what follows it whatever else there is.
        figures: Values and notes, in their order.
        room: Cells of the title and of what stands beside it, and of the row below.
        height: Rows of the chart.
    """
    free = room - cells_in(title)
    values = sum(cells_in(figure.pieces) for figure in figures if figure.kind != "note")
    if height < LEAST_ROWS_FOR_MORE and values > free:
        # the least of what a chart says
        figures = [figure for figure in figures if figure.kind != "raw"]
    beside: Pieces = []
    below: Pieces = []
    for pieces, kind in figures:
        cells = cells_in(pieces)
        if cells <= free - cells_in(beside) and (kind == "note" or not below):
            beside += pieces
        elif kind != "note" and cells <= room - cells_in(below):
            below += pieces
    return beside, below


class _ChartFrame(NamedTuple):
    """Makes the rows of a chart of ``width`` cells, with ``inset`` cells of a frame at either side:
    1, or 0 without one.
    """

    width: int
    inset: int
    styles: Mapping[str, Style]

    def upper(self, title: Pieces, beside: Pieces) -> Strip:
        """Return the row of the heading."""
        row = [*title, *beside]
        if self.inset:
            left = [("╭─ ", "frame"), *title, (" ", "frame")]
            right = [("╮", "frame")]
            if beside:  # its first two cells are blank: one of them belongs to the line
                (text, role), *others = beside
                right = [(text[1:], role), *others, (" ─╮", "frame")]
            row = [*left, ("─" * (self.width - cells_in([*left, *right])), "frame"), *right]
        strip = Strip(joined(row, self.styles))
        return strip.adjust_cell_length(self.width, self.styles["base"])

    def row(self, row: Sequence[Segment]) -> Strip:
        """Return a row between the upper line and the lower one."""
        inside = Strip(row).adjust_cell_length(self.width - 2 * self.inset, self.styles["base"])
        return self.full_row(inside)

    def full_row(self, row: Iterable[Segment]) -> Strip:
        """Return such a row of cells that fill it: measuring them would take as long as drawing."""
        side = [Segment("│", self.styles["frame"])] * self.inset
        return Strip([*side, *row, *side], self.width)

    def lower(self, row: Sequence[Segment]) -> Strip:
        """Return the last row."""
        if not self.inset:
            return self.row(row)
        line = self.styles["frame"]
        inside = Strip(row).adjust_cell_length(self.width - 2, line)
        row_in_frame = Strip([Segment("╰", line), *inside, Segment("╯", line)])
        return row_in_frame.adjust_cell_length(self.width, self.styles["base"])


# The mouse on a chart: a click points at a position, a drag chooses a range or pushes the axis,
# the wheel zooms or pushes it.


WHEEL_PAN = 0.1
"""Share of the axis that one turn of the wheel pushes it by."""
WHEEL_ZOOM = 0.7
"""What it leaves of the axis where it zooms in."""
DRAGGED_CELLS = 2
"""Cells that the mouse moves with its button held before that is a drag and no click."""


class _Drag(NamedTuple):
    """The mouse with a button held: where that began and where it is, in cells."""

    start: int
    at: int
    pans: bool
    """Whether the axis is pushed; otherwise a range is chosen."""


# What a chart shows: one or several numbers of the step records or of the samples, with their
# title, unit and way of writing.


@dataclass(frozen=True, slots=True)
class Metric:
    """One chart, and what its heading says."""

    key: str
    """How the user's layout names it."""
    title: str
    about: str
    fields: tuple[str, ...] = ()
    """Fields of the step records, a line each."""
    unit: str = ""
    format_value: Callable[[float], str] = significant
    per: float = 1.0
    """Divisor of values before they are written."""
    in_bytes: bool = False
    """Whether values are bytes of memory, which are written in the unit of the user's choice
    instead.
    """
    zero: bool = False
    ceiling: float | None = None
    smoothing: Literal["mean", "wanted", "never"] = "wanted"
    """Whether a smoothed line is drawn always, where an EMA was chosen, or never."""
    role: str = "main"
    """Colour of the line, by what it measures."""
    roles: tuple[str, ...] = ()
    """Colours of several lines."""
    names: tuple[str, ...] = ()
    """Their names."""
    samples: tuple[str, ...] = ()
    """Numbers of the samples instead, a line for each GPU, node or host
    (``loads.sampled_value``).
    """
    limit: str = ""
    """Number of the samples that those above stay below."""
    marked: str = ""
    """Number of the samples whose presence is marked on the axis."""
    leads: bool = False
    """Whether this chart says what holds for all: what is being read, the range, evaluations, and
    steps whose loss is not a number.
    """
    notes: Callable[[StepRecord | None, bool, bool], list[str]] = lambda latest, on_gpus, roomy: []
    """Notes behind the values, of the newest step (None while a cursor shows another), on GPUs or
    not, with room for words or not.
    """

    @property
    def shown_in(self) -> tuple[float, str]:
        """Divisor of values before they are written, and their unit then."""
        return memory_unit() if self.in_bytes else (self.per, self.unit)


LEAST_FRAMED, LEAST_FRAMED_ROWS = 24, 5
"""A chart of at least this many cells and rows has a frame."""
LEAST_COLUMNS = 4


class Chart(DrawnRowsMixin, can_focus=True):
    """One titled plot. Data comes whole through ``show``; nothing is computed while lines are
    drawn.

    What the mouse asks for is posted; the screen, which owns the axis, answers.
    """

    ALLOW_MAXIMIZE = True
    ALLOW_SELECT = False  # dragging zooms

    axis: Axis | None = None
    inset = 0
    """Cells of a frame at the left and at the right."""
    _drag: _Drag | None = None
    _dragged = False
    """Whether the click that follows was a drag."""

    @dataclass
    class Moved(Message):
        """The mouse asks for another view."""

        change: Callable[[View, Span], View]
        """Returns it, from the present one and the extent of the run."""

    ROLES = {
        "raw": "$raw-line",
        "main": "$run",
        "second": "$secondary",
        "third": "$exposed",
        "fourth": "$success",
        "gpu": "$gpu",
        "memory": "$memory",
        "adam": "$adam",
        "data": "$data-part",
        "forward": "$forward",
        "backward": "$backward",
        "exposed": "$exposed",
        **{role: f"${role}" for role in RUN_ROLES},
        "band": "$raw-line",
        "axis": "$rule",
        "frame": "$rule",
        "label": "$faint",
        "mark": "$success",
        "bad": "$error",
        "limit": "$warning",
        "cursor": "$warning",
        "title": "bold",
        "note": "$faint",
        "page": "$faint @click=screen.page(1)",
        "empty": "",
    }
    DEFAULT_CSS = "Chart { height: 1fr; width: 1fr; }"

    def __init__(self, metric: Metric, *, boxed: bool = True) -> None:
        super().__init__(id=metric.key)
        self.metric, self.title = metric, metric.title
        self.boxed = boxed
        """Whether it has a frame where panels have one; otherwise it stands in another's."""
        self.turns = ""
        """The number of the page, shown after the title; a click on it turns the page."""
        self.alarm = ""
        self.progress = ""
        self.log_scale = self.robust = False
        self._outside = 0
        """Columns with values that a robust scale leaves out."""
        self.notes: tuple[str, ...] = ()
        self.named: tuple[Named, ...] = ()
        self.lines: list[Line] = []
        self.marks: tuple[Mark, ...] = ()
        self.marked: tuple[Line, ...] = ()
        """Lines that are not drawn, but whose values are marked on the axis."""
        self.cursor: float | None = None
        self.waiting = "waiting for the first step"
        self._shown: tuple[object, ...] = ()
        self._role_styles = RoleStyles(
            self.ROLES, {"title": "bold underline $accent", "frame": "$accent"}
        )
        self._plot_key: tuple[object, ...] = ()
        self._plotted: tuple[list[list[Segment]], Scale] = ([], Scale(0, 1))
        self._body_key: tuple[object, ...] = ()
        self._body_rows: list[Strip] = []

    def show(
        self,
        named: Sequence[Named],
        axis: Axis | None,
        *,
        marks: Sequence[Mark] = (),
        marked: Sequence[Line] = (),
        cursor: float | None = None,
        notes: Sequence[str] = (),
        alarm: str = "",
        progress: str = "",
    ) -> None:
        """Show new data. ``progress`` says what is still to come, and ``alarm`` what is wrong; both
        follow the title.
        """
        self.named, self.axis = tuple(named), axis
        self.lines = [line for line, _ in named]
        self.marks, self.marked, self.notes = tuple(marks), tuple(marked), tuple(notes)
        self.cursor, self.alarm, self.progress = cursor, alarm, progress
        shown = (
            *(self.named, self.marked, self.marks, self.notes),
            None if axis is None else (axis.unit, axis.low, axis.high),
            *(cursor, alarm, progress, self.turns, self.waiting),
            *(self.metric.shown_in, self.log_scale, self.robust),
        )
        if shown != self._shown:
            self._shown = shown
            self.repaint()

    def on_click(self, event: events.Click) -> None:
        x = self._x_at(event.x)
        if x is not None and not self._dragged and "@click" not in event.style.meta:
            self.post_message(self.Moved(lambda view, extent: view.at(x, extent)))

    @property
    def chosen(self) -> tuple[int, int] | None:
        """First cell and end of the range that is being dragged over."""
        drag = self._drag
        if drag is None or drag.pans or abs(drag.at - drag.start) < DRAGGED_CELLS:
            return None
        return min(drag.start, drag.at), max(drag.start, drag.at)

    def _x_at(self, offset: int) -> float | None:
        cell, width = offset - self.inset - GUTTER, self.columns
        if self.axis is None or width < 1 or not 0 <= cell < width:
            return None
        return self.axis.low + (cell + 0.5) / width * (self.axis.high - self.axis.low)

    @property
    def columns(self) -> int:
        """Cells of the axis."""
        return self.size.width - 2 * self.inset - GUTTER

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._dragged = False
        if self._x_at(event.x) is not None:
            self._drag = _Drag(
                event.x, event.x, pans=event.button != 1 or event.shift or event.ctrl
            )
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        drag, first = self._drag, self.inset + GUTTER
        if drag is None or event.x == drag.at:
            return
        at = min(first + self.columns, max(first, event.x))
        if not drag.pans:
            self._drag = drag._replace(at=at)
            self.repaint()
        elif self._dragged or abs(at - drag.start) >= DRAGGED_CELLS:
            self._dragged = True
            share = (drag.start - at) / max(1, self.columns)
            self.post_message(self.Moved(lambda view, extent: view.panned(share, extent)))
            self._drag = _Drag(at, at, pans=True)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._drag is None:
            return
        chosen, self._drag = self.chosen, None
        self.release_mouse()
        if chosen is not None:
            self._dragged = True
            last = self.inset + GUTTER + self.columns - 1
            low, high = (self._x_at(min(cell, last)) for cell in chosen)
            if low is not None and high is not None:
                self.post_message(self.Moved(lambda view, extent: view.ranged(low, high, extent)))
            self.repaint()

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    @on(events.MouseScrollLeft)
    @on(events.MouseScrollRight)
    def _wheel(self, event: events.MouseEvent) -> None:
        forward = isinstance(event, events.MouseScrollDown | events.MouseScrollRight)
        sideways = isinstance(event, events.MouseScrollLeft | events.MouseScrollRight)
        x = self._x_at(event.x)
        if sideways or event.shift or event.ctrl:
            share = WHEEL_PAN if forward else -WHEEL_PAN
            self.post_message(self.Moved(lambda view, extent: view.panned(share, extent)))
        elif x is not None:
            factor = 1 / WHEEL_ZOOM if forward else WHEEL_ZOOM
            self.post_message(self.Moved(lambda view, extent: view.zoomed(factor, extent, x)))
        else:
            return
        event.stop()
        event.prevent_default()

    def row_key(self) -> tuple[object, ...]:
        return *super().row_key(), glyphs_of(self.app)

    @property
    def heading_room(self) -> int:
        """Cells of title and figures."""
        width, height = self.size
        large = width >= LEAST_FRAMED and height >= LEAST_FRAMED_ROWS
        self.inset = SIDE if self.boxed and large and framed(self) else 0
        return width - (6 if self.inset else 0)

    def draw_rows(self) -> list[Strip]:
        width, height = self.size
        room = self.heading_room
        columns = self.columns
        styles = self._role_styles.get(self)
        frame = _ChartFrame(width, self.inset, styles)
        title = self._title(room)
        beside, more = _arranged(title, list(self._figures()), room, height)
        # Values that find no room beside the title have a row of their own, where that leaves a
        # plot.
        below = joined(more, styles)
        rows = [frame.row(below)] if below and height >= LEAST_ROWS_FOR_MORE else []
        roomy = columns >= LEAST_COLUMNS and height >= 3
        if roomy and self.axis is not None and any(line.length for line in self.lines):
            rows += self._body(self.axis, columns, height - 2 - len(rows), frame)
        else:
            if roomy:
                rows.append(frame.row([Segment(" " * GUTTER + self.waiting, styles["note"])]))
            if self.inset:
                rows += [frame.row([])] * (height - 2 - len(rows))
                rows.append(frame.lower([Segment("─" * (width - 2), styles["frame"])]))
        if self.robust:  # the plot knows by now how many values it leaves out
            beside, _ = _arranged(title, list(self._figures()), room, height)
        return [frame.upper(title, beside), *rows]

    def _body(self, axis: Axis, width: int, height: int, frame: _ChartFrame) -> list[Strip]:
        """Return plot and axis, made again only where one of them changes: most steps change the
        heading alone.
        """
        styles = frame.styles
        plot, scale = self._plot(axis, width, height, styles)
        marks = self._all_marks(axis, width)
        key = (
            *(self._plot_key, axis.origin, tuple(marks), self.cursor, self.chosen),
            *(frame.width, self.inset, self.metric.shown_in),
        )
        if key == self._body_key:
            return self._body_rows
        self._body_key = key
        per, glyphs = self.metric.shown_in[0], glyphs_of(self.app)
        labels = gutter_text(scale, height, glyphs, self.metric.format_value, per)
        rows = [
            frame.full_row(
                [
                    Segment(label, styles["label"]),
                    *self._with_range(
                        with_cursor(row, axis, self.cursor, width, styles["cursor"]), width
                    ),
                ]
            )
            for label, row in zip(labels, plot, strict=True)
        ]
        unit = f" {axis.unit} "
        line = ("─" if self.inset else " ") * (GUTTER - len(unit))
        corner = [Segment(line, styles["frame"]), Segment(unit, styles["label"])]
        self._body_rows = [*rows, frame.lower([*corner, *axis_row(axis, width, marks, styles)])]
        return self._body_rows

    def _all_marks(self, axis: Axis, width: int) -> Sequence[Mark]:
        """Return the marks, and one for each of ``width`` columns where the first line has a gap or
        a marked one values.

        Those cover the others.
        """
        signs: dict[int, str] = {}
        for line in self.marked:
            found = spans(line, axis, width)[0]
            signs |= {column: "▼" for column, span in enumerate(found) if span is not None}
        if self.metric.leads and self.lines[0].series.missing:
            signs |= dict.fromkeys(spans(self.lines[0], axis, width)[1], "✗")
        if not signs:
            return self.marks
        middles = [(low + high) / 2 for low, high in pairwise(axis.edges(width))]
        bad = (Mark(middles[at], middles[at], sign, "bad") for at, sign in signs.items())
        return [*self.marks, *bad]

    def _plot(
        self, axis: Axis, width: int, height: int, styles: Mapping[str, Style]
    ) -> tuple[list[list[Segment]], Scale]:
        """Return the plot area, cached while nothing of it changes: moving a cursor does not draw
        it again, and values beyond the range are no change.
        """
        glyphs = glyphs_of(self.app)
        per = self.metric.shown_in[0]
        look = width, height, self.log_scale, self.robust, glyphs, id(styles), per
        key = look, plot_key(self.lines, axis)
        if key != self._plot_key:
            self._plot_key = key
            fit = partial(self._fit, height, glyphs)
            self._plotted = plot_rows(self.lines, axis, fit, (width, height), glyphs, styles)
        return self._plotted

    def _fit(self, height: int, glyphs: GlyphName, found: list[Spans]) -> Scale:
        metric = self.metric
        scale = fit_scale(
            found, log=self.log_scale, zero=metric.zero, ceiling=metric.ceiling, robust=self.robust
        )
        scale = with_even_ticks(scale, height, glyphs, metric.shown_in[0])
        self._outside = columns_beyond(found, scale) if self.robust else 0
        return scale

    def _title(self, room: int) -> Pieces:
        """Return the title, with the number of the page, what is still being read, and what is
        wrong.
        """
        scaled = self.log_scale or self.robust  # which must be read rather than the page
        fits = len(self.title) + 1 + len(self.turns) <= room
        turns = self.turns if fits and not scaled else ""
        others = (f" {turns}", "page"), (f"  {self.progress}", "cursor"), (f"  {self.alarm}", "bad")
        return [(self.title, "title"), *(piece for piece in others if piece[0].strip())]

    def _figures(self) -> Iterator[_Figure]:
        """Yield values and notes, each with the space before it."""
        axis, (per, unit) = self.axis, self.metric.shown_in
        for line, name in self.named:
            if not name or axis is None or not line.length:
                continue
            newest = line.series.value(line.length - 1)
            value = newest if self.cursor is None else value_at(line, axis, self.cursor)
            shown = "-" if value is None else self.metric.format_value(value / per)
            called = f"  {name} ".replace("  . ", "  ")
            if line.role == "raw":
                yield _Figure([(called, "note"), (shown, "label")], "raw")
                continue
            role = f"bold {line.role}"
            sign = [(f"  {line.sign}", role)] if line.sign else []
            yield _Figure([*sign, (called[1:] if sign else called, "note"), (shown, role)], "value")
        if unit:
            yield _Figure([(f" {unit}", "note")])
        if self.cursor is not None and axis is not None:
            yield _Figure([(f"  at {axis.unit} {axis.text(self.cursor)}", "cursor")])
        notes = ["  log y"] if self.log_scale else []
        if self.robust:
            notes.append("  robust y")
            if self._outside:
                notes.append(f", {plural(self._outside, 'column')} beyond")
        for note in (*notes, *(f"  {note}" for note in self.notes if note)):
            yield _Figure([(note, "note")])

    def _with_range(self, row: list[Segment], width: int) -> list[Segment]:
        """Return the row with the range reversed that is being dragged over."""
        if self.chosen is None:
            return row
        first, last = (min(width, max(0, cell - GUTTER - self.inset)) for cell in self.chosen)
        left, middle, right = Strip(row).divide([first, last, width])
        return [*left, *middle.apply_style(Style(reverse=True)), *right]
