"""Numbers over time. Drawing any range of them costs as much as the chart has columns, whatever the length of the run."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from so_tui.runs.blocks import total
from so_tui.runs.pyramid import NO_EXTREMES, MinMaxPyramid

FANOUT = 16
"""A range query takes under 100 comparisons at a million values, and the pyramid 7 % more memory."""


class Series:
    """Append-only values with their extremes. NaN and infinities are gaps.

    One thread appends. Others may read at the same time, up to a length that they learned after an append.
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
        """Append entries that stand for several values each, before any others: extremes, last value, number of values that are missing."""
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
        """Return minimum and maximum of the values ``[start, stop)``; None if there is none to draw."""
        return self._extremes.extremes(start, stop)

    def missing(self, length: int) -> int:
        """Return how many values are gaps in the first ``length`` entries."""
        gaps = bisect_left(self._gaps, length)
        return self._gap_values[gaps - 1] if gaps else 0

    def has_gap(self, start: int, stop: int) -> bool:
        """Return whether a gap lies in ``[start, stop)``."""
        position = bisect_left(self._gaps, start)
        return position < len(self._gaps) and self._gaps[position] < stop


class TrailingMean:
    """Mean of the finite values of the last ``span`` steps, up to and including a step."""

    __slots__ = ("_counts", "_steps", "_sums", "span")

    def __init__(self, span: int) -> None:
        self.span = span
        self._steps: deque[float] = deque()
        self._sums: deque[float] = deque()
        self._counts: deque[float] = deque()

    def add(self, step: float, values: float, count: float = 1) -> None:
        """Add a value, or the sum of ``count`` values, of the steps up to ``step``. A value that is not finite is left out."""
        if count > 0 and math.isfinite(values):
            self._steps.append(step)
            self._sums.append(values)
            self._counts.append(count)

    def at(self, step: float) -> float:
        """Return the mean at a step, not before the last one that was added; NaN if there is no finite value."""
        while self._steps and self._steps[0] <= step - self.span:
            for column in (self._steps, self._sums, self._counts):
                column.popleft()
        return total(self._sums) / sum(self._counts) if self._steps else math.nan


class ExponentialMean:
    """Exponential moving average of the finite values, corrected for the missing past of the first ones."""

    __slots__ = ("_share", "_total", "weight")

    def __init__(self, weight: float) -> None:
        """``weight`` is that of the past at each value, from 0 to below 1."""
        self.weight = weight
        self._total = self._share = 0.0

    def add(self, step: float, values: float, count: float = 1) -> None:
        """Add a value, or the sum of ``count`` values, which stand for as many equal ones. One that is not finite is left out."""
        if count > 0 and math.isfinite(values):
            kept = self.weight**count
            self._total = kept * self._total + (1 - kept) * values / count
            self._share = kept * self._share + (1 - kept)

    def add_weighted(self, step: float, values: float, count: float) -> None:
        """Add ``count`` values by their sum, in which each has the weight to the power of how many come after it."""
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
    """A letter that tells it from lines of the same colour (``line_looks``); empty where none is needed."""


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
    """Indices by positions and columns. Lines with the same positions (a mean and its band, all nodes of a host) share them."""
    _time_edges: dict[int, list[float]] = field(default_factory=dict, compare=False)

    def edges(self, columns: int) -> list[float]:
        """Return the ``columns + 1`` borders of the columns, in the unit of the axis."""
        width = self.high - self.low
        return [self.low + width * index / columns for index in range(columns + 1)]

    def time_of(self, step: float) -> float:
        """Return the time of a step: interpolated between records, that of the nearest record outside."""
        if self.steps is None or self.times is None or not self.length:
            return math.inf
        right = bisect_left(self.steps, step, 0, self.length)
        if right == 0 or right == self.length:
            return self.times[min(right, self.length - 1)]
        before, after = self.steps[right - 1], self.steps[right]
        share = (step - before) / (after - before)
        return self.times[right - 1] + share * (self.times[right] - self.times[right - 1])

    def position(self, x: float) -> tuple[float, float]:
        """Return a position on the axis as step and time; the step is the last one done by then, 0 before the first."""
        if self.unit == "step":
            return x, self.time_of(x)
        if self.steps is None or self.times is None:
            return 0.0, x
        done = bisect_right(self.times, x, 0, self.length)
        return (self.steps[done - 1] if done else 0.0), x

    def in_steps(self) -> tuple[float, float]:
        """Return the window in steps; for a time axis, from the step before it to the step after it."""
        if self.unit == "step" or self.steps is None or self.times is None or not self.length:
            return self.low, self.high
        first = bisect_right(self.times, self.low, 0, self.length) - 1
        last = bisect_left(self.times, self.high, 0, self.length)
        return self.steps[max(0, first)], self.steps[min(self.length - 1, last)]

    def indices(self, line: Line, columns: int) -> list[int]:
        """Return the borders of the columns as indices into ``line``: column ``c`` holds ``[result[c], result[c + 1])``."""
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
        # The last column includes its right border; otherwise the newest value would never be drawn.
        found.append(bisect_right(positions, edges[-1], at, length))
        return found
