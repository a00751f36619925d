"""Extremes of ranges from a pyramid agree with those of the plain values."""

from __future__ import annotations

import math
import random

import pytest

from so_tui.runs.samples import NO_EXTREMES, MinMaxPyramid, _extremes


def some_values(count: int) -> list[float]:
    chance = random.Random(count)
    return [chance.gauss(0, 1) if chance.random() > 0.05 else math.nan for _ in range(count)]


def plain(values: list[float]) -> tuple[float, float] | None:
    least, greatest = _extremes(values)
    return (least, greatest) if least <= greatest else None


@pytest.mark.parametrize("fanout", [2, 4, 16])
@pytest.mark.parametrize("batch", [1, 37])
def test_extremes_of_any_range(fanout: int, batch: int) -> None:
    values, chance = some_values(3000), random.Random(fanout)
    pyramid = MinMaxPyramid(fanout)
    for start in range(0, len(values), batch):
        pairs = [_extremes((value,)) for value in values[start : start + batch]]
        if batch == 1:
            pyramid.append(*pairs[0])
        else:
            pyramid.extend([low for low, _ in pairs], [high for _, high in pairs])
    assert len(pyramid) == len(values)
    for _ in range(300):
        start = chance.randrange(3000)
        stop = chance.randrange(start, 3001)
        assert pyramid.extremes(start, stop) == plain(values[start:stop])


def test_values_that_are_not_finite_have_no_extremes() -> None:
    assert _extremes([math.nan, math.inf, -math.inf]) == NO_EXTREMES
    assert _extremes([math.nan, 2.0, 1.0, math.inf]) == (1.0, 2.0)
