"""Step records of a run, or of a window of it, as series to draw: first as columns of an overview, then record by record."""

from __future__ import annotations

import math
from array import array

from so_tui.runs import RunReader
from so_tui.runs.records import StepRecord
from so_tui.ui.series import Ema, Line, Series

METRICS = ("loss", "useful_tokens_per_s_total", "model_tflops_per_gpu", "mfu", "gradient_norm", "learning_rate", "step_s")
OVERVIEW_COLUMNS = 4000
"""Largest number of rows from an overview; no terminal has as many dots."""


class StepSeries:
    """Metrics by step. One thread appends; readers pass the length that they learned after an append."""

    def __init__(self, decay: float) -> None:
        """Use ``decay`` for the moving averages of the loss (``ema``) and of the gradient norm (``norm_ema``)."""
        self.steps, self.times = array("d"), array("d")
        self.series = {name: Series() for name in (*METRICS, "ema", "norm_ema")}
        self.coarse_until = 0.0
        """Up to this step, a row stands for several records."""
        self._ema, self._norm_ema = Ema(decay), Ema(decay)

    def __len__(self) -> int:
        return len(self.series["norm_ema"])  # appended to last

    @property
    def last_step(self) -> float:
        return self.steps[-1] if self.steps else -math.inf

    def line(self, metric: str, role: str, length: int) -> Line:
        """Return the first ``length`` rows of a metric as a line with this role."""
        return Line(self.series[metric], length, self.times, self.steps, role)

    def covers(self, low: float, high: float) -> bool:
        """Return whether all rows between two steps are present."""
        return len(self) > 0 and self.steps[0] <= low and high <= self.steps[-1]

    def add_columns(self, reader: RunReader, first: int, last: int) -> None:
        """Append the steps ``first`` to ``last`` from the reader's overview, without reading every record."""
        columns = min(OVERVIEW_COLUMNS, last - first + 1)
        drawn = {name: reader.overview(name, columns, first, last).columns for name in (*METRICS, "time")}
        width = (last - first + 1) / columns
        for index in range(columns):
            if not drawn["time"][index].rows:
                continue
            self.steps.append(float(int(first + (index + 1) * width) - 1) if width > 1 else float(first + index))
            self.times.append(drawn["time"][index].last)
            for name in METRICS:
                column = drawn[name][index]
                finite = math.isfinite(column.last)
                self.series[name].append(column.minimum if finite else math.nan, column.maximum if finite else math.nan)
            self._average(drawn["loss"][index].last, drawn["gradient_norm"][index].last)
        if width > 1:
            self.coarse_until = float(last)

    def add(self, record: StepRecord) -> None:
        """Append the next record."""
        self.steps.append(float(record.step))
        self.times.append(record.time)
        for name in METRICS:
            value = getattr(record, name)
            self.series[name].append(math.nan if value is None else float(value))
        self._average(record.loss, math.nan if record.gradient_norm is None else record.gradient_norm)

    def _average(self, loss: float, gradient_norm: float) -> None:
        self.series["ema"].append(self._ema.add(loss))
        self.series["norm_ema"].append(self._norm_ema.add(gradient_norm))
