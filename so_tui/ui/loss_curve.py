"""A run's loss in a few hundred columns, for the sparklines and overlays of the list of runs. Read in a worker."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from so_tui.runs import RunDirectory
from so_tui.runs.metrics import MetricsReader
from so_tui.ui.series import Ema, Line, Series

COLUMNS = 400
SPARK_COLUMNS = 12
_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The smoothed loss of a run over its steps."""

    line: Line
    spark: str
    tokens_per_s: float | None

    @property
    def steps(self) -> tuple[float, float]:
        steps = self.line.steps
        assert steps is not None
        return (steps[0], steps[-1]) if len(steps) else (0.0, 0.0)


class CurveReader:
    """Reads the curves of runs repeatedly, for one thread at a time, and only what is new of each."""

    def __init__(self) -> None:
        self._readers: dict[RunDirectory, MetricsReader] = {}

    def read(self, run: RunDirectory) -> LossCurve | None:
        """Return the present curve of a run; None before its first step.

        Raises:
            OSError: The run cannot be read.
        """
        reader = self._readers.setdefault(run, MetricsReader(run))
        while reader.poll(limit_records=20_000, limit_s=0.5).more:
            pass
        first, latest = reader.first_step, reader.latest
        if first is None or latest is None:
            return None
        columns = min(COLUMNS, latest.step - first + 1)
        drawn = reader.overview("loss", columns, first, latest.step).columns
        width = (latest.step - first + 1) / columns
        steps, series, ema = array("d"), Series(), Ema(0.9 if columns > 40 else 0.5)
        for index, column in enumerate(drawn):
            if column.rows:
                steps.append(first + (index + 1) * width - 1)
                series.append(ema.add(column.last))
        return LossCurve(Line(series, len(series), steps, steps, "main"), spark(series, SPARK_COLUMNS), latest.useful_tokens_per_s_total)


def spark(series: Series, width: int) -> str:
    """Return a series as one row of bars, blank where it has no value."""
    length = len(series)
    width = min(width, length)
    if not width:
        return ""
    edges = [index * length // width for index in range(width + 1)]
    middles = [_middle(series.extremes(start, stop)) for start, stop in itertools.pairwise(edges)]
    return bars(middles)


def _middle(span: tuple[float, float] | None) -> float:
    return math.nan if span is None else (span[0] + span[1]) / 2


def bars(values: Sequence[float]) -> str:
    """Return values as bars between the least and the greatest of them."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    top = len(_LEVELS) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
