"""Numbers over time, kept so that drawing any stretch of them costs the columns of the chart, not the length of the run."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

FAN = 16
"""Children of a block of the pyramid: 16 keeps a range query under 100 comparisons at a million values and costs 7 % memory."""


class Series:
    """Append-only values with a min/max pyramid over them. NaN and infinities are gaps.

    One thread appends; others may read at the same time as long as they ask for no more than the length they were told after an append.
    """

    __slots__ = ("_gaps", "_highs", "_lows")

    def __init__(self) -> None:
        self._lows: list[array[float]] = [array("d")]
        self._highs: list[array[float]] = [array("d")]
        self._gaps: array[int] = array("q")

    def __len__(self) -> int:
        return len(self._lows[0])

    def append(self, low: float, high: float | None = None) -> None:
        """Add one value, or one stretch of values known by its extremes."""
        high = low if high is None else high
        if not (math.isfinite(low) and math.isfinite(high)):
            self._gaps.append(len(self))
            low = high = math.nan
        self._add(0, low, high)

    def _add(self, level: int, low: float, high: float) -> None:
        if level == len(self._lows):
            self._lows.append(array("d"))
            self._highs.append(array("d"))
        lows, highs = self._lows[level], self._highs[level]
        lows.append(low)
        highs.append(high)
        if len(lows) % FAN == 0:
            self._add(level + 1, _least(lows[-FAN:]), _greatest(highs[-FAN:]))

    def value(self, index: int) -> float:
        """The value at ``index``: the middle where only its extremes are known."""
        return (self._lows[0][index] + self._highs[0][index]) / 2

    def extremes(self, start: int, stop: int) -> tuple[float, float] | None:
        """Least and greatest value in ``[start, stop)``; None when there is none that can be drawn."""
        if stop - start == 1:
            low = self._lows[0][start]
            return (low, self._highs[0][start]) if low == low else None
        least, greatest = math.inf, -math.inf
        level = 0
        while start < stop:
            lows, highs = self._lows[level], self._highs[level]
            up = level + 1 < len(self._lows) and stop - start > 2 * FAN
            head = min(stop, -(-start // FAN) * FAN) if up else stop
            tail = max(head, stop // FAN * FAN) if up else stop
            for first, last in ((start, head), (tail, stop)):
                for index in range(first, last):
                    # NaN compares false both ways, so gaps fall out by themselves.
                    if lows[index] < least:
                        least = lows[index]
                    if highs[index] > greatest:
                        greatest = highs[index]
            if not up:
                break
            start, stop, level = head // FAN, tail // FAN, level + 1
        return (least, greatest) if least <= greatest else None

    def has_gap(self, start: int, stop: int) -> bool:
        """Whether a NaN or an infinity lies in ``[start, stop)``."""
        position = bisect_left(self._gaps, start)
        return position < len(self._gaps) and self._gaps[position] < stop


def _least(values: Sequence[float]) -> float:
    return min((value for value in values if value == value), default=math.nan)


def _greatest(values: Sequence[float]) -> float:
    return max((value for value in values if value == value), default=math.nan)


class Ema:
    """Exponential moving average without the bias of its start; gaps are passed over, not averaged in."""

    __slots__ = ("_sum", "_weight", "decay")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """The average after ``value``; NaN for a value that is a gap itself."""
        if not math.isfinite(value):
            return math.nan
        self._sum = self.decay * self._sum + (1 - self.decay) * value
        self._weight = self.decay * self._weight + (1 - self.decay)
        return self._sum / self._weight


@dataclass(frozen=True, slots=True)
class Line:
    """What a chart draws: a series up to a length, and where its values stand on the axes.

    ``steps`` is None for samples, which know times only.
    """

    series: Series
    length: int
    times: array[float]
    steps: array[float] | None
    role: str
    """``raw`` (dimmed), ``main``, ``second``, ``band``: the chart's component class."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The one x axis that all charts of a dashboard share."""

    unit: str
    """``step`` or ``time`` (Unix seconds)."""
    low: float
    high: float
    origin: float = 0.0
    """The time that is written as 0: that of the first figure there is."""
    steps: array[float] | None = None
    times: array[float] | None = None
    length: int = 0
    """Step records so far: the translation between the two units."""
    _found: dict[tuple[int, int, int], list[int]] = field(default_factory=dict, compare=False)
    """Indices by positions and columns: lines that share their positions (a mean and its band, all nodes of a host) share the search."""
    _time_edges: dict[int, list[float]] = field(default_factory=dict, compare=False)

    def edges(self, columns: int) -> list[float]:
        """The ``columns + 1`` borders of the columns, in the axis's unit."""
        width = self.high - self.low
        return [self.low + width * index / columns for index in range(columns + 1)]

    def time_of(self, step: float) -> float:
        """When ``step`` was reached; between records by interpolation, outside of them the nearest record's time."""
        if self.steps is None or self.times is None or not self.length:
            return math.inf
        right = bisect_left(self.steps, step, 0, self.length)
        if right == 0 or right == self.length:
            return self.times[min(right, self.length - 1)]
        before, after = self.steps[right - 1], self.steps[right]
        share = (step - before) / (after - before)
        return self.times[right - 1] + share * (self.times[right] - self.times[right - 1])

    def in_steps(self) -> tuple[float, float]:
        """The stretch in steps; on a time axis from the step before it to the step after it."""
        if self.unit == "step" or self.steps is None or self.times is None or not self.length:
            return self.low, self.high
        first = bisect_right(self.times, self.low, 0, self.length) - 1
        last = bisect_left(self.times, self.high, 0, self.length)
        return self.steps[max(0, first)], self.steps[min(self.length - 1, last)]

    def indices(self, line: Line, columns: int) -> list[int]:
        """The first index of ``line`` in each column, and the end: column ``c`` holds ``[result[c], result[c + 1])``."""
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
        # The last column includes its right border, or the newest value would never be drawn.
        found.append(bisect_right(positions, edges[-1], at, length))
        return found
