"""Rows of (steps, minimum, maximum, last value) of one metric, on floors of which each folds FANOUT rows of the one below into one.

A chart of c columns over any range reads the highest floor that still has a few rows per column: its cost follows the width of the
chart, not the length of the run. Rows are appended at the end; ``minimum > maximum`` says that a row has no finite value.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from msgspec import Struct

FANOUT = 4
_ROWS_PER_COLUMN = 2
"""A row that straddles two columns counts for both: at two rows a column an extreme is drawn half a column too wide at most."""


class Column(Struct, frozen=True, array_like=True):
    """One column of a chart: a gap without a record (``rows`` 0) or without a finite value (NaN)."""

    rows: int
    """Rows that fell into the column; 0 means that nothing was recorded there."""
    minimum: float
    maximum: float
    last: float
    """The last value as it was recorded, also when it is not finite."""


class Overview(Struct, frozen=True, kw_only=True):
    """A metric over the steps ``first`` to ``last``, both included, in equal columns."""

    metric: str
    first: int
    last: int
    columns: tuple[Column, ...]


EMPTY = Column(0, math.nan, math.nan, math.nan)


class Buckets(Struct, frozen=True):
    """Rows as they are stored, in step order."""

    first: array[float]
    last: array[float]
    minimum: array[float]
    maximum: array[float]
    value: array[float]


class Floor:
    """One floor: five columns of equal length, in step order."""

    __slots__ = ("first", "last", "maximum", "minimum", "value")

    def __init__(self) -> None:
        self.first = array("d")
        self.last = array("d")
        self.minimum = array("d")
        self.maximum = array("d")
        self.value = array("d")

    def __len__(self) -> int:
        return len(self.first)

    def fold(self, below: Floor) -> None:
        """Takes in what is complete on the floor below and not here yet."""
        start, stop = len(self) * FANOUT, len(below) // FANOUT * FANOUT
        if start == stop:
            return
        cut = slice(start, stop, FANOUT)
        ends = slice(start + FANOUT - 1, stop, FANOUT)
        groups = [slice(start + offset, stop, FANOUT) for offset in range(FANOUT)]
        self.first.extend(below.first[cut])
        self.last.extend(below.last[ends])
        self.value.extend(below.value[ends])
        self.minimum.extend(map(min, *(below.minimum[group] for group in groups)))
        self.maximum.extend(map(max, *(below.maximum[group] for group in groups)))


class Pyramid:
    def __init__(self) -> None:
        self.floors = [Floor()]

    @property
    def base(self) -> Floor:
        return self.floors[0]

    def extend(self, rows: Buckets, stop: int) -> None:
        """Adds the first ``stop`` rows."""
        base = self.base
        base.first.extend(rows.first[:stop])
        base.last.extend(rows.last[:stop])
        base.minimum.extend(rows.minimum[:stop])
        base.maximum.extend(rows.maximum[:stop])
        base.value.extend(rows.value[:stop])

    def append_values(self, steps: list[int], values: list[float]) -> None:
        """Adds one row for each record."""
        base = self.base
        base.first.extend(steps)
        base.last.extend(steps)
        base.value.extend(values)
        base.minimum.extend(value if math.isfinite(value) else math.inf for value in values)
        base.maximum.extend(value if math.isfinite(value) else -math.inf for value in values)

    def fold(self) -> None:
        """Brings the upper floors up to date with the base."""
        for below, floor in zip(self.floors, self.floors[1:], strict=False):
            floor.fold(below)
        while len(self.floors[-1]) >= FANOUT * FANOUT:
            floor = Floor()
            floor.fold(self.floors[-1])
            self.floors.append(floor)

    def rows_between(self, first: float, last: float) -> int:
        """How many rows of the base touch the range."""
        return max(0, bisect_right(self.base.first, last) - bisect_left(self.base.last, first))

    def rows(self, first: float, last: float, at_least: int) -> Iterator[tuple[float, float, float, float, float]]:
        """(first step, last step, minimum, maximum, value) of rows in the range, from the highest floor with at least so many."""
        wanted, level = self.rows_between(first, last) // FANOUT, 0
        while wanted >= at_least and level + 1 < len(self.floors):
            wanted, level = wanted // FANOUT, level + 1
        done = 0  # rows of this floor that the floor above has folded in
        for floor in self.floors[level::-1]:
            start = max(done, bisect_left(floor.last, first))
            stop = bisect_right(floor.first, last)
            cut = slice(start, stop)
            yield from zip(floor.first[cut], floor.last[cut], floor.minimum[cut], floor.maximum[cut], floor.value[cut], strict=True)
            done = len(floor) * FANOUT


def overview(metric: str, pyramids: list[Pyramid], columns: int, first: int, last: int) -> Overview:
    """Draws the pyramids (in step order) into columns. ``columns`` >= 1 and ``first`` <= ``last``."""
    rows = [0] * columns
    low, high, value = [math.inf] * columns, [-math.inf] * columns, [math.nan] * columns
    scale, rightmost = columns / (last - first + 1), columns - 1
    for pyramid in pyramids:
        for row_first, row_last, row_low, row_high, row_value in pyramid.rows(first, last, _ROWS_PER_COLUMN * columns):
            right = min(int((row_last - first) * scale), rightmost)
            left = right if row_first == row_last else max(0, int((row_first - first) * scale))
            if not rows[left] or left == right:
                value[left] = row_value
            for index in range(left, right + 1):  # nearly always one
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
