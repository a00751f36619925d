"""Numbers over time. Drawing any range of them costs as much as the chart has columns, whatever the
length of the run.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from so_tui.runs.metrics import MetricsReader, StepRows
from so_tui.runs.records import EvaluationRecord
from so_tui.runs.results import MEAN_RECORDS
from so_tui.svg import curves
from so_tui.units import mark_duration, plural, thousands

Span = tuple[float, float]
"""Two values or positions on an axis, or a step and its time."""
Unit = Literal["step", "time"]
"""What an axis counts: steps, or Unix seconds."""
FANOUT = 16
"""A range query takes under 100 comparisons at a million values, and the upper levels 14 % more
memory.
"""


class Series:
    """Append-only values with the extremes of any range of them. NaN and infinities are gaps.

    Level 0 has an entry for each value, or for the least, the greatest and the last of several.
    Each entry of a level above combines FANOUT entries of the level below. One thread appends.
    Others may read at the same time, up to a length that they learned after an append.
    """

    __slots__ = ("_gaps", "_highs", "_last", "_lows", "missing")

    def __init__(self) -> None:
        values = array("d")
        self._lows, self._highs = [values], [values]
        """By level. While no entry stands for several values, those of level 0 are one array, with
        NaN for gaps.
        """
        self._last = values
        self._gaps: array[int] = array("q")
        """Entries with a gap."""
        self.missing = 0
        """How many of the values so far are gaps."""

    def __len__(self) -> int:
        return len(self._last)  # appended to last

    def append(self, value: float) -> None:
        """Append one value."""
        self.extend((value,))

    def extend(self, values: Sequence[float], several: int = 1) -> None:
        """Append values, of which ``several`` make an entry each time."""
        if several > 1:
            self._separate()
        lows = highs = values
        if not all(map(math.isfinite, values)):
            values = [value if math.isfinite(value) else math.nan for value in values]
            lows = [math.inf if value != value else value for value in values]
            highs = [-math.inf if value != value else value for value in values]
            gaps = [index for index, value in enumerate(values) if value != value]
            self._gaps.extend(dict.fromkeys(len(self) + index // several for index in gaps))
            self.missing += len(gaps)
        if several > 1:
            lows, highs = _reduce(min, lows, several), _reduce(max, highs, several)
            values = values[several - 1 :: several]
        if self._last is not self._highs[0]:
            self._lows[0].extend(lows)
            self._highs[0].extend(highs)
        self._last.extend(values)
        self._combine()

    def halved(self) -> Series:
        """Return a series of half as many entries, an even number, each for two of this one."""
        half = Series()
        lows, highs = self._bounds(0, 0, len(self))
        half._last = self._last[1::2]
        half._lows = [array("d", _reduce(min, lows, 2))]
        half._highs = [array("d", _reduce(max, highs, 2))]
        half._gaps = array("q", dict.fromkeys(gap // 2 for gap in self._gaps))
        half.missing = self.missing
        half._combine()
        return half

    def _separate(self) -> None:
        """Let entries have a least and a greatest value besides the last one."""
        if self._last is self._highs[0]:
            self._lows[0], self._highs[0] = self._bounds(0, 0, len(self))

    def _bounds(self, level: int, start: int, stop: int) -> tuple[array[float], array[float]]:
        """Return the least and the greatest values of some entries; infinite for gaps."""
        low, high = self._lows[level][start:stop], self._highs[level][start:stop]
        if self._last is self._highs[level] and self.has_gap(start, stop):
            low = array("d", (math.inf if value != value else value for value in low))
            high = array("d", (-math.inf if value != value else value for value in high))
        return low, high

    def _combine(self) -> None:
        """Bring the upper levels up to date with level 0."""
        level = 0
        while complete := len(self._highs[level]) // FANOUT:
            if level + 1 == len(self._highs):
                self._lows.append(array("d"))
                self._highs.append(array("d"))
            done = len(self._highs[level + 1])
            if done == complete:
                return
            low, high = self._bounds(level, done * FANOUT, complete * FANOUT)
            self._lows[level + 1].extend(_reduce(min, low, FANOUT))
            self._highs[level + 1].extend(_reduce(max, high, FANOUT))
            level += 1

    def value(self, index: int) -> float:
        """Return the value at ``index``, the last one of several; NaN for a gap."""
        return self._last[index]

    def extremes(self, start: int, stop: int) -> tuple[float, float] | None:
        """Return minimum and maximum of the values ``[start, stop)``; None if there is none to
        draw.
        """
        if stop - start == 1:  # most columns of a short run
            low, high = self._lows[0][start], self._highs[0][start]
            return (low, high) if low <= high else None
        least, greatest, level = math.inf, -math.inf, 0
        while start < stop:
            lows, highs = self._lows[level], self._highs[level]
            climbs = level + 1 < len(self._lows) and stop - start > 2 * FANOUT
            head = min(stop, -(-start // FANOUT) * FANOUT) if climbs else stop
            tail = max(head, stop // FANOUT * FANOUT) if climbs else stop
            for first, last in ((start, head), (tail, stop)):
                for index in range(first, last):
                    if lows[index] < least:
                        least = lows[index]
                    if highs[index] > greatest:
                        greatest = highs[index]
            if not climbs:
                break
            start, stop, level = head // FANOUT, tail // FANOUT, level + 1
        return (least, greatest) if least <= greatest else None

    def measured(self, length: int) -> bool:
        """Return whether there is anything to draw of the first values: quickly where they end with
        a number, as nearly all do.
        """
        ended = length > 0 and math.isfinite(self.value(length - 1))
        return ended or self.extremes(0, length) is not None

    def has_gap(self, start: int, stop: int) -> bool:
        """Return whether a gap lies in ``[start, stop)``."""
        position = bisect_left(self._gaps, start)
        return position < len(self._gaps) and self._gaps[position] < stop


def _reduce(pick: Callable[..., float], values: Sequence[float], several: int) -> list[float]:
    """Return the least or the greatest of each ``several`` values."""
    return list(map(pick, *(values[first::several] for first in range(several))))


_MOST_AVERAGED = 1_000
"""Most records in a mean."""


class _TrailingMean:
    """Mean of the finite values of the last ``span`` steps, up to and including a step."""

    __slots__ = ("_span", "_steps", "_values")

    def __init__(self, span: int) -> None:
        self._span = span
        # The span follows the newest interval between records; older records may be denser.
        self._steps: deque[float] = deque(maxlen=_MOST_AVERAGED)
        self._values: deque[float] = deque(maxlen=_MOST_AVERAGED)
        """Finite ones of the last steps."""

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> list[float]:
        """Add values of later steps. Return the mean at each of them, NaN where there is no finite
        value.
        """
        means = []
        for step, value in zip(steps, values, strict=True):
            if math.isfinite(value):
                self._steps.append(step)
                self._values.append(value)
            while self._steps and self._steps[0] <= step - self._span:
                self._steps.popleft()
                self._values.popleft()
            # Summed anew: differences of sums lose digits after a value that is much larger.
            means.append(sum(self._values) / len(self._values) if self._values else math.nan)
        return means


@dataclass(slots=True)
class _ExponentialMean:
    """Exponential moving average of the finite values, corrected for the missing past of the first
    ones.
    """

    weight: float
    """That of the past at each value, from 0 to below 1."""
    _total: float = 0.0
    _share: float = 0.0

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> list[float]:
        """Add values of later steps. Return the average at each of them, NaN before the first
        finite value.
        """
        means = []
        for value in values:
            if math.isfinite(value):
                self._total = self.weight * self._total + (1 - self.weight) * value
                self._share = self.weight * self._share + (1 - self.weight)
            means.append(self._total / self._share if self._share else math.nan)
        return means


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: a series up to a length, and the positions of its values on the axes.

    Series grow in place, so lines that are equal show the same values.
    """

    series: Series
    length: int
    times: array[float] = field(compare=False)
    steps: array[float] | None = field(compare=False)
    """None for samples, which have times only."""
    role: str
    """Its style, by a key of ``Chart.ROLES`` such as ``raw`` (dimmed) or ``main``."""
    sign: str = ""
    """A letter that tells it from lines of the same colour (``look_of``); empty where none is
    needed.
    """


Named = tuple[Line, str]
"""A line with its name in a heading or a legend; a chart hides the value of one without."""


def interpolated(xs: Sequence[float], ys: Sequence[float], length: int, x: float) -> float:
    """Return the value at ``x`` between the first points, and outside that of the nearest one."""
    right = bisect_left(xs, x, 0, length)
    if right in (0, length):
        return ys[min(right, length - 1)]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis that all charts of a dashboard share."""

    unit: Unit
    low: float
    high: float
    origin: float = 0.0
    """The time shown as 0: that of the first value."""
    steps: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    length: int = 0
    """Number of step records, which translate between the two units."""
    _found: dict[tuple[int, int, int], list[int]] = field(default_factory=dict, compare=False)
    """Indices by positions and columns. Lines with the same positions (a mean and its band, all
    nodes of a host) share them.
    """
    _time_edges: dict[int, list[float]] = field(default_factory=dict, compare=False)

    def text(self, x: float, parts: int = 2) -> str:
        """Return a position as text: ``1,240`` steps or ``12 m 4 s``, in so many parts."""
        if self.unit == "step":
            return thousands(round(x))
        return mark_duration(max(0.0, x - self.origin), parts)

    def edges(self, columns: int) -> list[float]:
        """Return the ``columns + 1`` borders of the columns, in the unit of the axis."""
        width = self.high - self.low
        return [self.low + width * index / columns for index in range(columns + 1)]

    def time_of(self, step: float) -> float:
        """Return the time of a step: interpolated between records, that of the nearest record
        outside.
        """
        if not self.length:
            return math.inf
        return interpolated(self.steps, self.times, self.length, step)

    def position(self, x: float) -> tuple[float, float]:
        """Return a position on the axis as step and time; the step is the last one done by then, 0
        before the first.
        """
        if self.unit == "step":
            return x, self.time_of(x)
        done = bisect_right(self.times, x, 0, self.length)
        return (self.steps[done - 1] if done else 0.0), x

    def in_steps(self) -> tuple[float, float]:
        """Return the window in steps; for a time axis, from the step before it to the step after
        it.
        """
        if self.unit == "step" or not self.length:
            return self.low, self.high
        first = bisect_right(self.times, self.low, 0, self.length) - 1
        last = bisect_left(self.times, self.high, 0, self.length)
        return self.steps[max(0, first)], self.steps[min(self.length - 1, last)]

    def positions(self, line: Line, x: float) -> tuple[array[float], float]:
        """Return the positions of the values of a line, and ``x`` among them."""
        if self.unit == "step" and line.steps is not None:
            return line.steps, x
        return line.times, self.time_of(x) if self.unit == "step" else x

    def indices(self, line: Line, columns: int) -> list[int]:
        """Return the borders of the columns as indices into ``line``: column ``c`` holds
        ``[result[c], result[c + 1])``.
        """
        in_time = self.unit == "step" and line.steps is None
        positions = line.times if line.steps is None or self.unit == "time" else line.steps
        key = (id(positions), line.length, columns)
        if key not in self._found:
            edges = self.edges(columns)
            if in_time and columns not in self._time_edges:
                self._time_edges[columns] = list(map(self.time_of, edges))
            *others, last = self._time_edges[columns] if in_time else edges
            found: list[int] = []
            at = 0
            for edge in others:
                at = bisect_left(positions, edge, at, line.length)
                found.append(at)
            # The last column includes its right border; otherwise the newest value would never be
            # drawn.
            self._found[key] = [*found, bisect_right(positions, last, at, line.length)]
        return self._found[key]


# What of a run the charts show: all of it, a fixed window, or the newest part as it grows. Pure.


NARROWEST = {"step": 4.0, "time": 5.0}


@dataclass(frozen=True, slots=True)
class View:
    """The unit of the axis, the window on it (None: the whole run) and the cursor. With ``tail``
    the window follows the newest value.
    """

    unit: Unit = "step"
    window: Span | None = None
    tail: bool = False
    cursor: float | None = None

    def resolved(self, extent: Span) -> Span:
        """Return the window of a run that covers ``extent``."""
        if self.window is None:
            return extent
        low, high = self.window
        if self.tail:
            return extent[1] - (high - low), extent[1]
        return low, high

    def zoomed(self, factor: float, extent: Span, about: float | None = None) -> View:
        """Zoom in for ``factor`` below 1, around ``about``: by default the cursor, else the right
        end, which stays visible.
        """
        low, high = self.resolved(extent)
        about = about if about is not None else self.cursor if self.cursor is not None else high
        about = min(high, max(low, about))
        width = max(NARROWEST[self.unit], (high - low) * factor)
        if width >= extent[1] - extent[0]:
            return replace(self, window=None, tail=False)
        share = (about - low) / (high - low) if high > low else 1.0
        return self._moved(about - share * width, width, extent)

    def _moved(self, low: float, width: float, extent: Span) -> View:
        """Move the window to begin at ``low``, within the run."""
        low = min(max(extent[0], low), extent[1] - width)
        high = low + width
        return replace(self, window=(low, high), tail=high >= extent[1] - 0.01 * width)

    def panned(self, share: float, extent: Span) -> View:
        """Move the window by a share of its width, within the run."""
        if self.window is None:
            return self
        low, high = self.resolved(extent)
        return self._moved(low + share * (high - low), high - low, extent)

    def ranged(self, low: float, high: float, extent: Span) -> View:
        """Zoom to a range, within the run."""
        low, high = max(extent[0], low), min(extent[1], high)
        width = min(max(high - low, NARROWEST[self.unit]), extent[1] - extent[0])
        return self._moved((low + high - width) / 2, width, extent)

    def at(self, x: float, extent: Span) -> View:
        """Put the cursor at ``x``, within the run, and on a whole step, so that the heading names
        the step whose values it shows.
        """
        x = min(extent[1], max(extent[0], x))
        return replace(self, cursor=float(round(x)) if self.unit == "step" else x)

    def pointed(self, columns: int, extent: Span, dots: int) -> View:
        """Move the cursor by ``columns`` of a chart ``dots`` columns wide; the window follows where
        the cursor would leave it.
        """
        low, high = self.resolved(extent)
        width = (high - low) / max(1, dots)
        if self.unit == "step":
            width = max(1.0, width)  # every key press moves it
        cursor = self.cursor if self.cursor is not None else high
        moved = self.at(cursor + columns * width, extent)
        at = moved.cursor
        assert at is not None
        if self.window is not None and not low <= at <= high:
            shift = at - low if at < low else at - high
            return replace(moved, window=(low + shift, high + shift), tail=False)
        return moved

    @property
    def range_note(self) -> str:
        """Note next to the charts while they show a part of the run."""
        return "" if self.window is None else "newest part" if self.tail else "zoomed"


# A chart of the screen as a picture of its own (SVG), for documents. Pure.


_MOST_POINTS = 4000


def write_picture(
    path: Path, title: str, lines: Sequence[Named], per: float = 1.0, *, log: bool = False
) -> str:
    """Write lines over their steps to a new file, and return their number in words. Values are
    divided by ``per``; infinite ones and NaNs leave gaps. ``log``: the y axis is logarithmic.
    Raises OSError.
    """
    drawn = [(name, _points(line, per)) for line, name in lines]
    picture = curves(title, drawn, log=log, axes=("step", title))
    with path.open("x", encoding="utf-8") as file:
        file.write(picture)
    return plural(len(lines), "line")


def _points(line: Line, per: float) -> list[tuple[float, float]]:
    """Return step and value of at most as many rows as a picture shows: of each part, its first and
    its extremes.

    Rows before the first step and after the last one, as samples have, are left out.
    """
    every = max(1, -(-line.length // _MOST_POINTS))
    found = []
    for start in range(0, line.length, every):
        extremes = line.series.extremes(start, min(line.length, start + every)) or (math.nan,)
        step = line.steps[start] if line.steps is not None else float(start)
        if math.isfinite(step):
            found += [(step, value / per) for value in dict.fromkeys(extremes)]
    return found


# Step records of a run, or of a window of it, as series to draw.
#
# Each row is a step, in runs of up to MOST_ROWS. In longer ones a row has the least, the greatest
# and the last value of several.


MOST_ROWS = 200_000
"""When a run has as many rows, they are combined: to at most half as many, also later."""
NEGLIGIBLE = 1e-9
"""Share of a value in an exponential moving average below which it need not be known."""


def mean_of(metric: str) -> str:
    """Return the name of the series of a metric's means."""
    return f"{metric} mean"


@lru_cache(maxsize=32)
def evaluation_line(
    records: tuple[EvaluationRecord, ...], role: str, shift_s: float = 0.0
) -> Line | None:
    """Return the losses of evaluations as a line, with their times moved by ``shift_s``; None
    without any. The same evaluations are the same line, which need not be drawn again.
    """
    if not records:
        return None
    series = Series()
    series.extend([record.loss for record in records])
    times = array("d", (record.time + shift_s for record in records))
    steps = array("d", (float(record.step) for record in records))
    return Line(series, len(series), times, steps, role)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What charts need to know of the steps and samples."""

    fields: tuple[str, ...] = ()
    """Fields of the step records."""
    smoothed: tuple[str, ...] = ()
    """Those of them that have a mean."""
    ema: float | None = None
    """Weight of the past in an exponential moving average; None: the mean of the last steps."""
    samples: tuple[str, ...] = ()
    """Numbers of the samples."""


class StepSeries:
    """Metrics by step, and the means of some. One thread appends; readers pass the length that they
    learned after an append.

    A mean at a step is that of the finite values of the last ``span`` steps; with an EMA it is an
    exponential moving average with that weight.
    """

    def __init__(self, span: int, wanted: Wanted) -> None:
        self.span, self.wanted = span, wanted
        self.steps, self.times = array("d"), array("d")
        self.means = {field: mean_of(field) for field in wanted.smoothed if field in wanted.fields}
        self.series = {name: Series() for name in (*self.means.values(), *wanted.fields)}
        self.halvings = 0
        """How often rows were combined: most stand for two to the power of that many steps."""
        self.begin = math.nan, math.nan
        """The first step and its time."""
        self._range = math.inf, -math.inf
        """Steps of which all records are here, of a window."""
        self._windows = {
            metric: _TrailingMean(span) if wanted.ema is None else _ExponentialMean(wanted.ema)
            for metric in self.means
        }

    @property
    def _memory_steps(self) -> int:
        """How many steps before it a mean depends on."""
        ema = self.wanted.ema
        if ema is None:
            return self.span
        records = math.log(NEGLIGIBLE) / math.log(max(ema, NEGLIGIBLE))
        return self.span * math.ceil(records / min(self.span, MEAN_RECORDS))

    def __len__(self) -> int:
        return len(self.times)  # appended to last

    @property
    def last_step(self) -> float:
        return self.steps[-1] if self.steps else -math.inf

    def line(self, name: str, role: str, length: int) -> Line:
        """Return the first rows of a metric or a mean as a line with this role."""
        return Line(self.series[name], length, self.times, self.steps, role)

    def covers(self, low: float, high: float) -> bool:
        """Return whether all rows between two steps are present."""
        return (
            len(self) > 0 and self._range[0] <= low and high <= max(self._range[1], self.last_step)
        )

    def add_window(self, reader: MetricsReader, first: float, last: float) -> None:
        """Append the steps ``first`` to ``last`` of a run one by one. Raises OSError."""
        self._range = first, last
        records = list(reader.steps(first - self._memory_steps, last))
        before = sum(record.step < first for record in records)
        self._add_means(records[:before])
        self.extend(records[before:])

    def extend(self, rows: Sequence[Any]) -> None:
        """Append later rows: step records, or what ``StepRows`` yields."""
        if not rows:
            return
        if not self.steps:
            self.begin = float(rows[0].step), rows[0].time
        values = self._add_means(rows) | {name: _values(rows, name) for name in self.wanted.fields}
        steps, times = _values(rows, "step"), _values(rows, "time")
        several = 1 << self.halvings
        whole = len(rows) // several * several
        for name, series in self.series.items():
            series.extend(values[name][:whole], several)
            series.extend(values[name][whole:])
        self.steps.extend([*steps[several - 1 : whole : several], *steps[whole:]])
        self.times.extend([*times[several - 1 : whole : several], *times[whole:]])

    def halved(self) -> StepSeries:
        """Return series of half as many rows, an even number, to which more can be appended.
        Nothing can be to these any more.
        """
        half = StepSeries(self.span, self.wanted)
        half.steps, half.times = self.steps[1::2], self.times[1::2]
        half.series = {name: series.halved() for name, series in self.series.items()}
        half.halvings, half.begin, half._windows = self.halvings + 1, self.begin, self._windows
        return half

    def _add_means(self, rows: Sequence[Any]) -> dict[str, list[float]]:
        steps = _values(rows, "step")
        return {
            name: self._windows[metric].extend(steps, _values(rows, metric))
            for metric, name in self.means.items()
        }


def _values(rows: Sequence[Any], name: str) -> list[float]:
    """Return a column of rows, with NaN for what was not measured."""
    values = list(map(attrgetter(name), rows))
    return [math.nan if value is None else value for value in values] if None in values else values


class FollowedSteps:
    """The steps of a run as they become known, for one thread."""

    def __init__(self, reader: MetricsReader, *, most_rows: int = MOST_ROWS) -> None:
        self._reader, self._most_rows = reader, most_rows
        self.series = StepSeries(1, Wanted())
        """What is drawn."""
        self.unread_share = 0.0
        """How much of the run is still to be read before it is drawn to its end."""
        self._rows: StepRows | None = None
        self._next = self.series
        """What is read: ``series`` themselves, unless those are still whole while all is read
        again.
        """
        self._left: list[Any] = []
        """Rows that are too few for one that stands for several."""

    def read(self, wanted: Wanted, span: int, limit_s: float) -> bool:
        """Read what the reader has found since, or all again where that is necessary, for about
        ``limit_s``; ``span`` is that of the means. Return whether there is more. Raises OSError.
        """
        wanted, now = replace(wanted, samples=()), self._next
        if self._rows is None or self._rows.outdated or (now.wanted, now.span) != (wanted, span):
            self._rows = StepRows(self._reader, wanted.fields)
            self._next, self._left = StepSeries(span, wanted), []
        for rows in self._rows.read(limit_s):
            self._left += rows
            self._add(len(self._left) >> self._next.halvings << self._next.halvings)
        self.unread_share = self._rows.unread_share
        if not self.unread_share:
            self._add(len(self._left))
        if not self.unread_share or self._next.last_step >= self.series.last_step:
            self.series = self._next
        return self.unread_share > 0

    def _add(self, count: int) -> None:
        self._next.extend(self._left[:count])
        del self._left[:count]
        shown = self._next is self.series
        while len(self._next) % 2 == 0 and len(self._next) >= self._most_rows // (
            2 if self._next.halvings else 1
        ):
            self._next = self._next.halved()
        if shown:
            self.series = self._next
