"""A metric over a range of steps, drawn into the columns of a chart.

The cost follows the width of the chart, not the length of the run: rows are read from the coarsest level of their pyramid that still has a
few rows per column.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from msgspec import Struct

from so_tui.runs.pyramid import MinMaxPyramid

FANOUT = 4
_ROWS_PER_COLUMN = 2
"""A row that straddles two columns counts in both: with two rows per column, an extreme is drawn at most half a column too wide."""


class Column(Struct, frozen=True, array_like=True):
    """One column of a chart. It is a gap if it has no record (``rows`` 0) or no finite value (NaN)."""

    rows: int
    """Rows in the column; 0 if nothing was recorded."""
    minimum: float
    maximum: float
    last: float
    """The last recorded value, which may not be finite."""


class Overview(Struct, frozen=True, kw_only=True):
    """A metric over the steps ``first`` to ``last`` (inclusive), in columns of equal width."""

    metric: str
    first: int
    last: int
    columns: tuple[Column, ...]


EMPTY = Column(0, math.nan, math.nan, math.nan)


class StoredRows(Struct, frozen=True):
    """Rows of one metric as an index stores them: columns of equal length, in step order."""

    first: array[float]
    last: array[float]
    minimum: array[float]
    maximum: array[float]
    value: array[float]


class StepRows:
    """Rows of one metric in step order, with a pyramid over their extremes.

    A row stands for one or more consecutive records: its first and last step, its extremes and its last value.
    """

    def __init__(self) -> None:
        self._first = array("d")
        self._last = array("d")
        self._value = array("d")
        self._extremes = MinMaxPyramid(FANOUT)

    def __len__(self) -> int:
        return len(self._value)

    def extend(self, rows: StoredRows, stop: int) -> None:
        """Append the first ``stop`` rows of an index."""
        self._first.extend(rows.first[:stop])
        self._last.extend(rows.last[:stop])
        self._value.extend(rows.value[:stop])
        self._extremes.extend(rows.minimum[:stop], rows.maximum[:stop])

    def append_values(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Append one row per record."""
        self._first.extend(steps)
        self._last.extend(steps)
        self._value.extend(values)
        self._extremes.extend(
            (value if math.isfinite(value) else math.inf for value in values),
            (value if math.isfinite(value) else -math.inf for value in values),
        )

    def rows_between(self, first: float, last: float) -> int:
        """Return how many rows overlap a range of steps."""
        return max(0, bisect_right(self._first, last) - bisect_left(self._last, first))

    def rows(self, first: float, last: float, at_least: int) -> Iterator[tuple[float, float, float, float, float]]:
        """Yield (first step, last step, minimum, maximum, value) of rows that overlap a range of steps.

        Args:
            first: First step of the range.
            last: Last step of the range, inclusive.
            at_least: Number of rows wanted; coarser levels are used as long as they have as many.
        """
        wanted, level = self.rows_between(first, last) // FANOUT, 0
        while wanted >= at_least and level + 1 < self._extremes.levels:
            wanted, level = wanted // FANOUT, level + 1
        begin, end = bisect_left(self._last, first), bisect_right(self._first, last)
        covered = 0  # rows of level 0 that coarser levels have combined
        for current in range(level, -1, -1):
            size = FANOUT**current
            complete = len(self) // size
            start = max(covered, begin) // size
            stop = min(complete, -(-end // size))
            if start < stop:
                base = slice(start * size, stop * size, size)
                ends = slice((start + 1) * size - 1, stop * size, size)
                minima, maxima = self._extremes.level(current, start, stop)
                yield from zip(self._first[base], self._last[ends], minima, maxima, self._value[ends], strict=True)
            covered = complete * size


def overview(metric: str, parts: Sequence[StepRows], columns: int, first: int, last: int) -> Overview:
    """Draw rows into columns.

    Args:
        metric: Name of the metric.
        parts: Rows of the metric, in step order.
        columns: Number of columns, at least 1.
        first: First step of the range.
        last: Last step of the range, inclusive and not before ``first``.
    """
    rows = [0] * columns
    low, high, value = [math.inf] * columns, [-math.inf] * columns, [math.nan] * columns
    scale, rightmost = columns / (last - first + 1), columns - 1
    for part in parts:
        for row_first, row_last, row_low, row_high, row_value in part.rows(first, last, _ROWS_PER_COLUMN * columns):
            right = min(int((row_last - first) * scale), rightmost)
            left = right if row_first == row_last else max(0, int((row_first - first) * scale))
            if not rows[left] or left == right:
                value[left] = row_value
            for index in range(left, right + 1):  # nearly always a single column
                rows[index] += 1
                if row_low < low[index]:
                    low[index] = row_low
                if row_high > high[index]:
                    high[index] = row_high
            for index in range(left + 1, right + 1):
                value[index] = row_value
    return Overview(metric=metric, first=first, last=last, columns=tuple(map(_column, rows, low, high, value)))


def _column(rows: int, low: float, high: float, value: float) -> Column:
    if not rows:
        return EMPTY
    return Column(rows, low, high, value) if low <= high else Column(rows, math.nan, math.nan, value)
