"""Minimum and maximum of any range of a long series, at a cost that does not depend on its length.

Level 0 of the pyramid holds one pair of extremes per entry; each entry of a level above combines ``fanout`` entries of the level below.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

NO_EXTREMES = (math.inf, -math.inf)
"""Extremes of an entry without any finite value."""


def extremes(values: Iterable[float]) -> tuple[float, float]:
    """Return minimum and maximum of the finite values; ``NO_EXTREMES`` if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else NO_EXTREMES


class MinMaxPyramid:
    """Append-only extremes with coarser levels above them.

    One thread appends. Others may read at the same time, up to a length that they learned after an append.
    """

    __slots__ = ("_highs", "_lows", "fanout")

    def __init__(self, fanout: int) -> None:
        """Combine ``fanout`` entries per level. A larger value takes less memory, a smaller one gives more levels to choose from."""
        self.fanout = fanout
        self._lows: list[array[float]] = [array("d")]
        self._highs: list[array[float]] = [array("d")]

    def __len__(self) -> int:
        return len(self._highs[0])  # appended to last

    @property
    def levels(self) -> int:
        """Number of levels, at least 1."""
        return len(self._highs)

    def append(self, low: float, high: float) -> None:
        """Append one entry."""
        self._lows[0].append(low)
        self._highs[0].append(high)
        if len(self._highs[0]) % self.fanout == 0:
            self._combine()

    def extend(self, lows: Iterable[float], highs: Iterable[float]) -> None:
        """Append several entries."""
        self._lows[0].extend(lows)
        self._highs[0].extend(highs)
        self._combine()

    def low(self, index: int) -> float:
        """Return the minimum of one entry; infinity if it has none."""
        return self._lows[0][index]

    def high(self, index: int) -> float:
        """Return the maximum of one entry; minus infinity if it has none."""
        return self._highs[0][index]

    def level(self, level: int, start: int, stop: int) -> tuple[array[float], array[float]]:
        """Return minima and maxima of the entries ``[start, stop)`` of one level."""
        return self._lows[level][start:stop], self._highs[level][start:stop]

    def extremes(self, start: int, stop: int) -> tuple[float, float] | None:
        """Return minimum and maximum of the entries ``[start, stop)``; None if there is no finite value."""
        if stop - start == 1:  # most columns of a short run
            low, high = self._lows[0][start], self._highs[0][start]
            return (low, high) if low <= high else None
        least, greatest = NO_EXTREMES
        level, fanout = 0, self.fanout
        while start < stop:
            lows, highs = self._lows[level], self._highs[level]
            climbs = level + 1 < len(self._lows) and stop - start > 2 * fanout
            head = min(stop, -(-start // fanout) * fanout) if climbs else stop
            tail = max(head, stop // fanout * fanout) if climbs else stop
            for first, last in ((start, head), (tail, stop)):
                for index in range(first, last):
                    if lows[index] < least:
                        least = lows[index]
                    if highs[index] > greatest:
                        greatest = highs[index]
            if not climbs:
                break
            start, stop, level = head // fanout, tail // fanout, level + 1
        return (least, greatest) if least <= greatest else None

    def _combine(self) -> None:
        """Bring the upper levels up to date with level 0."""
        fanout, level = self.fanout, 0
        while complete := len(self._highs[level]) // fanout:
            if level + 1 == len(self._highs):
                self._lows.append(array("d"))
                self._highs.append(array("d"))
            start, stop = len(self._highs[level + 1]) * fanout, complete * fanout
            if start == stop:
                return
            lows, highs = self._lows[level], self._highs[level]
            self._lows[level + 1].extend(
                min(lows[index : index + fanout]) for index in range(start, stop, fanout)
            )
            self._highs[level + 1].extend(
                max(highs[index : index + fanout]) for index in range(start, stop, fanout)
            )
            level += 1
