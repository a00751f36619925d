"""Numbers over time. Drawing any range of them costs as much as the chart has columns, whatever the
length of the run.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from so_tui.runs.index import BLOCK_STEPS, WEIGHTED, Columns, block_end, total
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import EvaluationRecord, StepRecord, is_time
from so_tui.runs.results import SINGLE_STEPS, mean_name, mean_steps
from so_tui.runs.samples import NO_EXTREMES, MinMaxPyramid
from so_tui.svg import Curve, curves

FANOUT = 16
"""A range query takes under 100 comparisons at a million values, and the pyramid 7 % more
memory.
"""


class Series:
    """Append-only values with their extremes. NaN and infinities are gaps.

    One thread appends. Others may read at the same time, up to a length that they learned after an
    append.
    """

    __slots__ = ("_extremes", "_gap_values", "_gaps", "_last")

    def __init__(self) -> None:
        self._extremes = MinMaxPyramid(FANOUT)
        self._last = array("d")
        """The last value of each of the first entries, those that stand for several values."""
        self._gaps: array[int] = array("q")
        """Entries with a gap."""
        self._gap_values: array[int] = array("q")
        """Values missing in the gaps up to each."""

    def __len__(self) -> int:
        return len(self._extremes)

    def append(self, value: float) -> None:
        """Append one value."""
        if math.isfinite(value):
            self._extremes.append(value, value)
        else:
            self._add_gap(len(self), 1)
            self._extremes.append(*NO_EXTREMES)

    def append_range(self, low: float, high: float) -> None:
        """Append the extremes of several finite values."""
        self._extremes.append(low, high)

    def extend(
        self,
        lows: Sequence[float],
        highs: Sequence[float],
        last: Sequence[float],
        missing: Sequence[float],
    ) -> None:
        """Append entries that stand for several values each, before any others: extremes, last
        value, number of values that are missing.
        """
        for index, count in enumerate(missing, len(self)):
            if count > 0:
                self._add_gap(index, int(count))
        self._last.extend(last)
        self._extremes.extend(lows, highs)

    def _add_gap(self, index: int, count: int) -> None:
        self._gap_values.append((self._gap_values[-1] if self._gap_values else 0) + count)
        self._gaps.append(index)

    def value(self, index: int) -> float:
        """Return the value at ``index``, the last one of several; NaN for a gap."""
        if index < len(self._last):
            return self._last[index] if math.isfinite(self._last[index]) else math.nan
        return (self._extremes.low(index) + self._extremes.high(index)) / 2

    def extremes(self, start: int, stop: int) -> tuple[float, float] | None:
        """Return minimum and maximum of the values ``[start, stop)``; None if there is none to
        draw.
        """
        return self._extremes.extremes(start, stop)

    def missing(self, length: int) -> int:
        """Return how many values are gaps in the first ``length`` entries."""
        gaps = bisect_left(self._gaps, length)
        return self._gap_values[gaps - 1] if gaps else 0

    def has_gap(self, start: int, stop: int) -> bool:
        """Return whether a gap lies in ``[start, stop)``."""
        position = bisect_left(self._gaps, start)
        return position < len(self._gaps) and self._gaps[position] < stop


class _TrailingMean:
    """Mean of the finite values of the last ``span`` steps, up to and including a step."""

    __slots__ = ("_counts", "_steps", "_sums", "span")

    def __init__(self, span: int) -> None:
        self.span = span
        self._steps: deque[float] = deque()
        self._sums: deque[float] = deque()
        self._counts: deque[float] = deque()

    def add(self, step: float, values: float, count: float = 1) -> None:
        """Add a value, or the sum of ``count`` values, of the steps up to ``step``. A value that is
        not finite is left out.
        """
        if count > 0 and math.isfinite(values):
            self._steps.append(step)
            self._sums.append(values)
            self._counts.append(count)

    def at(self, step: float) -> float:
        """Return the mean at a step, not before the last one that was added; NaN if there is no
        finite value.
        """
        while self._steps and self._steps[0] <= step - self.span:
            for column in (self._steps, self._sums, self._counts):
                column.popleft()
        return total(self._sums) / sum(self._counts) if self._steps else math.nan


class _ExponentialMean:
    """Exponential moving average of the finite values, corrected for the missing past of the first
    ones.
    """

    __slots__ = ("_share", "_total", "weight")

    def __init__(self, weight: float) -> None:
        """``weight`` is that of the past at each value, from 0 to below 1."""
        self.weight = weight
        self._total = self._share = 0.0

    def add(self, step: float, values: float, count: float = 1) -> None:
        """Add a value, or the sum of ``count`` values, which stand for as many equal ones. One that
        is not finite is left out.
        """
        if count > 0 and math.isfinite(values):
            kept = self.weight**count
            self._total = kept * self._total + (1 - kept) * values / count
            self._share = kept * self._share + (1 - kept)

    def add_weighted(self, step: float, values: float, count: float) -> None:
        """Add ``count`` values by their sum, in which each has the weight to the power of how many
        come after it.
        """
        if count > 0 and math.isfinite(values):
            kept = self.weight**count
            self._total = kept * self._total + (1 - self.weight) * values
            self._share = kept * self._share + (1 - kept)

    def at(self, step: float) -> float:
        """Return the average up to now; NaN if there is no finite value."""
        return self._total / self._share if self._share else math.nan


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: a series up to a length, and the positions of its values on the axes."""

    series: Series
    length: int
    times: array[float]
    steps: array[float] | None
    """None for samples, which have times only."""
    role: str
    """Component class of the chart, such as ``raw`` (dimmed), ``main``, ``second`` or ``band``."""
    sign: str = ""
    """A letter that tells it from lines of the same colour (``line_looks``); empty where none is
    needed.
    """


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis that all charts of a dashboard share."""

    unit: str
    """``step`` or ``time`` (Unix seconds)."""
    low: float
    high: float
    origin: float = 0.0
    """The time shown as 0: that of the first value."""
    steps: array[float] | None = None
    times: array[float] | None = None
    length: int = 0
    """Number of step records, which translate between the two units."""
    _found: dict[tuple[int, int, int], list[int]] = field(default_factory=dict, compare=False)
    """Indices by positions and columns. Lines with the same positions (a mean and its band, all
    nodes of a host) share them.
    """
    _time_edges: dict[int, list[float]] = field(default_factory=dict, compare=False)

    def edges(self, columns: int) -> list[float]:
        """Return the ``columns + 1`` borders of the columns, in the unit of the axis."""
        width = self.high - self.low
        return [self.low + width * index / columns for index in range(columns + 1)]

    def time_of(self, step: float) -> float:
        """Return the time of a step: interpolated between records, that of the nearest record
        outside.
        """
        if self.steps is None or self.times is None or not self.length:
            return math.inf
        right = bisect_left(self.steps, step, 0, self.length)
        if right == 0 or right == self.length:
            return self.times[min(right, self.length - 1)]
        before, after = self.steps[right - 1], self.steps[right]
        share = (step - before) / (after - before)
        return self.times[right - 1] + share * (self.times[right] - self.times[right - 1])

    def position(self, x: float) -> tuple[float, float]:
        """Return a position on the axis as step and time; the step is the last one done by then, 0
        before the first.
        """
        if self.unit == "step":
            return x, self.time_of(x)
        if self.steps is None or self.times is None:
            return 0.0, x
        done = bisect_right(self.times, x, 0, self.length)
        return (self.steps[done - 1] if done else 0.0), x

    def in_steps(self) -> tuple[float, float]:
        """Return the window in steps; for a time axis, from the step before it to the step after
        it.
        """
        if self.unit == "step" or self.steps is None or self.times is None or not self.length:
            return self.low, self.high
        first = bisect_right(self.times, self.low, 0, self.length) - 1
        last = bisect_left(self.times, self.high, 0, self.length)
        return self.steps[max(0, first)], self.steps[min(self.length - 1, last)]

    def indices(self, line: Line, columns: int) -> list[int]:
        """Return the borders of the columns as indices into ``line``: column ``c`` holds
        ``[result[c], result[c + 1])``.
        """
        by_step = self.unit == "step" and line.steps is not None
        positions = line.steps if by_step and line.steps is not None else line.times
        key = (id(positions), line.length, columns)
        if key not in self._found:
            edges = (
                self.edges(columns)
                if by_step or self.unit == "time"
                else self._edges_in_time(columns)
            )
            self._found[key] = self._search(positions, line.length, edges)
        return self._found[key]

    def _edges_in_time(self, columns: int) -> list[float]:
        if columns not in self._time_edges:
            self._time_edges[columns] = [self.time_of(edge) for edge in self.edges(columns)]
        return self._time_edges[columns]

    @staticmethod
    def _search(positions: array[float], length: int, edges: list[float]) -> list[int]:
        found: list[int] = []
        at = 0
        for edge in edges[:-1]:
            at = bisect_left(positions, edge, at, length)
            found.append(at)
        # The last column includes its right border; otherwise the newest value would never be
        # drawn.
        found.append(bisect_right(positions, edges[-1], at, length))
        return found


# A chart of the screen as a picture of its own (SVG), for documents. Pure.


_MOST_POINTS = 4000


def chart_svg(title: str, lines: Sequence[Line], names: Sequence[str], per: float = 1.0) -> str:
    """Return lines over their steps; values that are not finite leave gaps.

    Args:
        title: What is drawn.
        lines: The lines.
        names: Their names, one each.
        per: What values are divided by.
    """
    return curves(
        title, [Curve(name, _points(line, per)) for line, name in zip(lines, names, strict=True)]
    )


def _points(line: Line, per: float) -> list[tuple[float, float]]:
    """Return step and value of at most as many rows as a picture shows: of each part, its first and
    its extremes.

    Rows before the first step and after the last one, as samples have, are left out.
    """
    every = max(1, -(-line.length // _MOST_POINTS))
    found = []
    for start in range(0, line.length, every):
        extremes = line.series.extremes(start, min(line.length, start + every))
        step = line.steps[start] if line.steps is not None else float(start)
        if not math.isfinite(step):
            continue
        if extremes is None:
            found.append((step, math.nan))
        else:
            found += [(step, value / per) for value in dict.fromkeys(extremes)]
    return found


# Step records of a run, or of a window of it, as series to draw: early ones in blocks, the newest
# one by one.
#
# Where one changes into the other follows from the newest step alone, so that a run looks the same
# however and whenever it was opened.


METRICS = (
    "loss",
    "useful_tokens_per_s_total",
    "model_tflops_per_gpu",
    "mfu",
    "gradient_norm",
    "learning_rate",
    "step_s",
)
SMOOTHED = ("loss", "gradient_norm")
"""Metrics that have a mean unless others are asked for."""
NEGLIGIBLE = 1e-9
"""Share of a value in an exponential moving average below which it need not be known."""


def approximate_name(ema: float, *, here: bool) -> str:
    """Return the name of an EMA that blocks count in with their means: ``here``, or only in steps
    before.
    """
    return f"{mean_name(0, ema)} {'of' if here else 'after'} blocks"


def mean_of(metric: str) -> str:
    """Return the name of the series of a metric's means."""
    return f"{metric} mean"


def _single_from(first: int, latest: int) -> int:
    """Return the step from which on a run is drawn step by step; those before it are blocks."""
    whole = latest // SINGLE_STEPS * SINGLE_STEPS - SINGLE_STEPS
    return whole + 1 if whole > first else first


def evaluation_line(records: Sequence[EvaluationRecord], role: str, shift_s: float = 0.0) -> Line:
    """Return the losses of evaluations as a line, with their times moved by ``shift_s``."""
    series = Series()
    for record in records:
        series.append(record.loss)
    times, steps = (
        array("d", (record.time + shift_s for record in records)),
        array("d", (float(record.step) for record in records)),
    )
    return Line(series, len(series), times, steps, role)


class StepSeries:
    """Metrics by step, and the means of some. One thread appends; readers pass the lengths that
    they learned after an append.

    A mean at a step is that of the finite values of the last ``span`` steps. It is known at each
    single step and at the ends of blocks. With ``ema`` it is an exponential moving average with
    that weight: exact for the weights of which blocks have sums. With others, a block counts as
    that many steps with its mean, up to ``approximate_until``.
    """

    def __init__(
        self,
        span: int,
        metrics: Sequence[str] = METRICS,
        smoothed: Sequence[str] = SMOOTHED,
        ema: float | None = None,
    ) -> None:
        self.span = span
        self.ema = ema
        self.metrics = tuple(metrics)
        self.steps, self.times = array("d"), array("d")
        self.mean_steps, self.mean_times = array("d"), array("d")
        self.means = {metric: mean_of(metric) for metric in smoothed if metric in metrics}
        self.series = {name: Series() for name in (*self.metrics, *self.means.values())}
        self.coarse = 0
        """Number of rows that are blocks, the first ones."""
        self.single_from = 0
        """From this step on, a row stands for a single step."""
        self.begin = math.nan, math.nan
        """The first step and its time."""
        self._range = math.inf, -math.inf
        """Steps of which all records are here."""
        self._windows = self._new_windows()

    def _new_windows(self) -> dict[str, _TrailingMean | _ExponentialMean]:
        return {
            metric: _TrailingMean(self.span) if self.ema is None else _ExponentialMean(self.ema)
            for metric in self.means
        }

    @property
    def _memory_steps(self) -> int:
        """How many steps before it a mean depends on."""
        if self.ema is None:
            return self.span
        records = math.log(NEGLIGIBLE) / math.log(max(self.ema, NEGLIGIBLE))
        return self.span * math.ceil(records / min(self.span, BLOCK_STEPS))

    @property
    def _weights(self) -> tuple[float, ...]:
        """Weights of which blocks have sums that are needed."""
        return (self.ema,) if self.ema in WEIGHTED else ()

    def __len__(self) -> int:
        return len(self.series[self.metrics[-1]])  # appended to last

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of rows of the metrics and of the means."""
        means = len(self.series[list(self.means.values())[-1]]) if self.means else 0
        return len(self), means

    @property
    def last_step(self) -> float:
        return self.steps[-1] if self.steps else -math.inf

    @property
    def coarse_until(self) -> float:
        """The last step of the blocks; 0 if there is none."""
        return self.steps[self.coarse - 1] if self.coarse else 0.0

    @property
    def approximate_until(self) -> float:
        """The last step whose EMA is approximate; 0 if there is none."""
        return 0.0 if self.ema is None or self._weights else self.coarse_until

    def line(self, name: str, role: str, lengths: tuple[int, int]) -> Line:
        """Return the first rows of a metric or a mean as a line with this role."""
        if name in self.means.values():
            return Line(self.series[name], lengths[1], self.mean_times, self.mean_steps, role)
        return Line(self.series[name], lengths[0], self.times, self.steps, role)

    def covers(self, low: float, high: float) -> bool:
        """Return whether all rows between two steps are present."""
        return (
            len(self) > 0 and self._range[0] <= low and high <= max(self._range[1], self.last_step)
        )

    def add_whole(self, reader: MetricsReader) -> None:
        """Append all that is known of a run: blocks, then single steps. Raises OSError."""
        first, latest = reader.first_step, reader.latest
        if first is None or latest is None:
            return
        self.single_from = _single_from(first, latest.step)
        if self.single_from > first:
            self._add_blocks(
                reader.blocks((*self.metrics, "time"), self.single_from - 1, self._weights)
            )
        if self._weights:  # what is known of all blocks goes on
            self._range = self.single_from, latest.step
            for record in reader.steps(self.single_from, latest.step):
                self.add(record)
        else:
            self.add_single(reader, self.single_from, latest.step)

    def add_single(self, reader: MetricsReader, first: float, last: float) -> None:
        """Append the steps ``first`` to ``last`` one by one. Raises OSError."""
        self._windows = self._new_windows()
        self._range = first, last
        for record in reader.steps(first - self._memory_steps, last):
            if record.step >= first:
                self.add(record)
            else:
                self._add_to_windows(record)

    def _add_blocks(self, blocks: Columns) -> None:
        """Append the blocks before any step."""
        if not blocks["last"]:
            return
        begun = blocks["time.min"][0]
        self.begin = blocks["first"][0], begun if is_time(begun) else 0.0
        self.steps.extend(blocks["last"])
        before = 0.0
        for time in blocks["time.last"]:
            before = time if is_time(time) else before
            self.times.append(before)
        self.mean_steps.extend(float(block_end(step)) for step in blocks["last"])
        self.mean_times.extend(self.times)
        records = blocks["records"]
        for metric, name in self.means.items():
            window, part = self._windows[metric], "sum"
            add: Callable[[float, float, float], None] = window.add
            if isinstance(window, _ExponentialMean) and self._weights:
                part, add = WEIGHTED[window.weight], window.add_weighted
            for end, values, count in zip(
                self.mean_steps, blocks[f"{metric}.{part}"], blocks[f"{metric}.finite"], strict=True
            ):
                add(end, values, count)
                self.series[name].append(window.at(end))
        for metric in self.metrics:
            finite = blocks[f"{metric}.finite"]
            missing = [
                most - min(max(count, 0.0), most)
                for most, count in zip(records, finite, strict=True)
            ]
            low, high, newest = (blocks[f"{metric}.{part}"] for part in ("min", "max", "last"))
            self.series[metric].extend(low, high, newest, missing)
        self.coarse = len(self.steps)

    def add(self, record: StepRecord) -> None:
        """Append the next record."""
        # A mean at the end of a block that has no record of its own, as one of blocks has.
        if (
            self.mean_steps
            and self.mean_steps[-1] < (end := block_end(self.mean_steps[-1])) < record.step
        ):
            self._add_means(float(end), self.mean_times[-1])
        if not self.steps:
            self.begin = float(record.step), record.time
        self._add_to_windows(record)
        self.steps.append(float(record.step))
        self.times.append(record.time)
        self._add_means(float(record.step), record.time)
        for name in self.metrics:
            value = getattr(record, name)
            self.series[name].append(math.nan if value is None else float(value))

    def _add_to_windows(self, record: StepRecord) -> None:
        for metric, window in self._windows.items():
            value = getattr(record, metric)
            window.add(float(record.step), math.nan if value is None else float(value))

    def _add_means(self, step: float, time: float) -> None:
        self.mean_steps.append(step)
        self.mean_times.append(time)
        for metric, name in self.means.items():
            self.series[name].append(self._windows[metric].at(step))


class FollowedSteps:
    """The steps of a run as they become known, for one thread."""

    def __init__(
        self,
        reader: MetricsReader,
        metrics: Sequence[str] = METRICS,
        smoothed: Sequence[str] = SMOOTHED,
    ) -> None:
        self._reader = reader
        self._wanted: tuple[tuple[str, ...], tuple[str, ...], float | None] = (
            tuple(metrics),
            tuple(smoothed),
            None,
        )
        self._outdated = True
        """Whether the series lack steps, or have some that do not count any more."""
        self.series = StepSeries(mean_steps(0), metrics, smoothed)

    def want(self, metrics: Sequence[str], smoothed: Sequence[str], ema: float | None) -> None:
        """Have other metrics, or others smoothed, from the next update on."""
        wanted = tuple(metrics), tuple(smoothed), ema
        self._outdated = self._outdated or wanted != self._wanted
        self._wanted = wanted

    def new_series(self, span: int) -> StepSeries:
        """Return empty series of what is wanted."""
        metrics, smoothed, ema = self._wanted
        return StepSeries(span, metrics, smoothed, ema)

    def take(self, records: Sequence[StepRecord], *, redraw: bool) -> list[StepRecord]:
        """Append new records, as the result of a poll. Return those that were appended."""
        self._outdated = self._outdated or redraw
        if self._outdated:
            return []
        new = [record for record in records if record.step > self.series.last_step]
        for record in new:
            self.series.add(record)
        return new

    def update(self, span: int) -> bool:
        """Draw all steps anew where that is necessary; ``span`` is that of the means. Return
        whether it was. Raises OSError.
        """
        first, latest = self._reader.first_step, self._reader.latest
        coarser = (
            first is not None
            and latest is not None
            and _single_from(first, latest.step) != self.series.single_from
        )
        if not self._outdated and not coarser and span == self.series.span:
            return False
        series = self.new_series(span)
        series.add_whole(self._reader)
        self.series, self._outdated = series, False
        return True
