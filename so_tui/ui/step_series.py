"""Step records of a run, or of a window of it, as series to draw: early ones in blocks, the newest one by one.

Where one changes into the other follows from the newest step alone, so that a run looks the same however and whenever it was opened.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

from so_tui.runs.blocks import BLOCK_STEPS, WEIGHTED, Columns, block_end
from so_tui.runs.codec import is_time
from so_tui.runs.means import SINGLE_STEPS, mean_name, mean_steps
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import EvaluationRecord, StepRecord
from so_tui.ui.series import ExponentialMean, Line, Series, TrailingMean

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
    """Return the name of an EMA that blocks count in with their means: ``here``, or only in steps before."""
    return f"{mean_name(0, ema)} {'of' if here else 'after'} blocks"


def mean_of(metric: str) -> str:
    """Return the name of the series of a metric's means."""
    return f"{metric} mean"


def single_from(first: int, latest: int) -> int:
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
    """Metrics by step, and the means of some. One thread appends; readers pass the lengths that they learned after an append.

    A mean at a step is that of the finite values of the last ``span`` steps. It is known at each single step and at the ends of blocks.
    With ``ema`` it is an exponential moving average with that weight: exact for the weights of which blocks have sums. With others, a block
    counts as that many steps with its mean, up to ``approximate_until``.
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

    def _new_windows(self) -> dict[str, TrailingMean | ExponentialMean]:
        return {
            metric: TrailingMean(self.span) if self.ema is None else ExponentialMean(self.ema)
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
        self.single_from = single_from(first, latest.step)
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
            if isinstance(window, ExponentialMean) and self._weights:
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
        """Draw all steps anew where that is necessary; ``span`` is that of the means. Return whether it was. Raises OSError."""
        first, latest = self._reader.first_step, self._reader.latest
        coarser = (
            first is not None
            and latest is not None
            and single_from(first, latest.step) != self.series.single_from
        )
        if not self._outdated and not coarser and span == self.series.span:
            return False
        series = self.new_series(span)
        series.add_whole(self._reader)
        self.series, self._outdated = series, False
        return True
