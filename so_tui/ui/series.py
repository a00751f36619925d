"""Numbers over time. Drawing any range of them costs as much as the chart has columns, whatever the length of the run."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from so_tui.runs.pyramid import NO_EXTREMES, MinMaxPyramid

FANOUT = 16
"""A range query takes under 100 comparisons at a million values, and the pyramid 7 % more memory."""


class Series:
    """Append-only values with their extremes. NaN and infinities are gaps.

    One thread appends. Others may read at the same time, up to a length that they learned after an append.
    """

    __slots__ = ("_extremes", "_gaps")

    def __init__(self) -> None:
        self._extremes = MinMaxPyramid(FANOUT)
        self._gaps: array[int] = array("q")

    def __len__(self) -> int:
        return len(self._extremes)

    def append(self, low: float, high: float | None = None) -> None:
        """Append one value, or the extremes of several values."""
        high = low if high is None else high
        if math.isfinite(low) and math.isfinite(high):
            self._extremes.append(low, high)
        else:
            self._gaps.append(len(self))
            self._extremes.append(*NO_EXTREMES)

    def value(self, index: int) -> float:
        """Return the value at ``index``: the middle if only extremes are known, NaN for a gap."""
        return (self._extremes.low(index) + self._extremes.high(index)) / 2

    def extremes(self, start: int, stop: int) -> tuple[float, float] | None:
        """Return minimum and maximum of the values ``[start, stop)``; None if there is none to draw."""
        return self._extremes.extremes(start, stop)

    def gaps(self, length: int) -> int:
        """Return how many of the first ``length`` entries are gaps."""
        return bisect_left(self._gaps, length)

    def has_gap(self, start: int, stop: int) -> bool:
        """Return whether a gap lies in ``[start, stop)``."""
        position = bisect_left(self._gaps, start)
        return position < len(self._gaps) and self._gaps[position] < stop


class Ema:
    """Exponential moving average with bias correction. Gaps are skipped."""

    __slots__ = ("_sum", "_weight", "decay")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Add a value and return the average; NaN if the value is a gap."""
        if not math.isfinite(value):
            return math.nan
        self._sum = self.decay * self._sum + (1 - self.decay) * value
        self._weight = self.decay * self._weight + (1 - self.decay)
        return self._sum / self._weight


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: a series up to a length, and the positions of its values on the axes."""

    series: Series
    length: int
    times: array[float]
    steps: array[float] | None
    """None for samples, which have times only."""
    role: str
    """Component class of the chart: ``raw`` (dimmed), ``main``, ``second``, ``band``."""


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
            edges = self.edges(columns) if by_step or self.unit == "time" else self._edges_in_time(columns)
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
