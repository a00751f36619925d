"""Other runs whose metrics are laid over those of the run that is followed. Read in the follower's thread."""

from __future__ import annotations

import logging
import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from so_tui.runs import RunDirectory, RunReader, read_state, readable_spec
from so_tui.runs.means import mean_steps_of
from so_tui.runs.sample import Sample
from so_tui.ui.chart_layout import Wanted
from so_tui.ui.chart_metrics import EVALUATIONS, Metric
from so_tui.ui.loads import Loads
from so_tui.ui.series import Line
from so_tui.ui.step_series import FollowedSteps, StepSeries, evaluation_line, mean_of

_log = logging.getLogger(__name__)

POLL_S = 5.0
"""How often a run is looked at again once all of it is known."""
READ_S = 0.2
"""How long one look may take: the followed run waits."""


@dataclass(frozen=True, slots=True)
class Overlaid:
    """What is known of another run."""

    run: RunDirectory
    steps: StepSeries
    lengths: tuple[int, int]
    times: array[float]
    mean_times: array[float]
    """When its rows would be if it had begun with the followed run."""
    more: bool = False
    """Whether some of it is still to be read."""
    evaluations: Line | None = None
    """Loss on held-out data; None without evaluations."""
    sampled: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """Numbers of the samples by name, a line for each GPU, node or host."""

    def lines(self, metric: Metric, role: str, sign: str = "") -> list[Line]:
        """Return the lines of a metric of which there is any value. They look alike: they are the run's."""
        if metric.key == EVALUATIONS:
            found = [] if self.evaluations is None else [self.evaluations]
        elif metric.samples:
            found = [line for name in metric.samples for line in self.sampled.get(name, ())]
        else:
            found = [line for name in metric.fields if (line := self._line(name, role)) is not None]
        return [
            replace(line, role=role, sign=sign)
            for line in found
            if line.series.extremes(0, line.length) is not None
        ]

    def _line(self, field: str, role: str) -> Line | None:
        """Return a field of the step records, its mean where there is one; None where it has not been read."""
        name = mean_of(field) if field in self.steps.means else field
        if name not in self.steps.series:
            return None
        line = self.steps.line(name, role, self.lengths)
        times = self.mean_times if name != field else self.times
        return Line(line.series, line.length, times, line.steps, role)

    @property
    def end(self) -> tuple[float, float]:
        """Its last step, and when that would be; zeros before the first."""
        return (
            (self.steps.steps[self.lengths[0] - 1], self.times[self.lengths[0] - 1])
            if self.lengths[0]
            else (0.0, 0.0)
        )


class _Followed:
    def __init__(self, run: RunDirectory) -> None:
        self.spec = readable_spec(run)
        self.reader = RunReader(run, log_lines=1, state_of=lambda of, _: read_state(of))
        self.steps = FollowedSteps(self.reader.metrics)
        self.loads = Loads(self.reader)
        self.newest: dict[str, Sample] = {}
        """The newest sample of each host that has not been added to the loads: they begin once all steps are known, where wanted."""
        self.due = 0.0
        self.wanted: Wanted | None = None
        self.shown: Overlaid | None = None

    def add_samples(self, new: Mapping[str, tuple[Sample, ...]], names: tuple[str, ...]) -> None:
        """Add new samples to the loads, of which these numbers are kept. Raises OSError."""
        self.loads.want(names)
        begun = self.steps.series.begin[1]
        added = {host: (sample, *new.get(host, ())) for host, sample in self.newest.items()}
        for host, samples in (dict(new) | added).items():
            self.loads.add(host, samples, begun)
        self.newest = {}

    def sampled(self, shift_s: float) -> dict[str, tuple[Line, ...]]:
        """Return the numbers of the samples, at their steps, with their times moved."""
        places: dict[int, tuple[array[float], array[float]]] = {}
        found: dict[str, tuple[Line, ...]] = {}
        for name, numbers in self.loads.sampled().items():
            lines = []
            for number in numbers:
                if id(number.times) not in places:
                    moved = array("d", (at + shift_s for at in number.times))
                    places[id(number.times)] = (
                        moved,
                        steps_at(number.times, number.length, self.steps.series),
                    )
                lines.append(Line(number.series, number.length, *places[id(number.times)], "main"))
            found[name] = tuple(lines)
        return found


class Overlays:
    """The runs that were chosen, for one thread at a time."""

    def __init__(self) -> None:
        self._followed: dict[RunDirectory, _Followed] = {}

    def read(
        self, runs: Sequence[RunDirectory], wanted: Wanted, begun: float
    ) -> tuple[Overlaid, ...]:
        """Return what is known of these runs by now; ``begun`` is when the followed run did its first step."""
        self._followed = {run: self._followed.get(run) or _Followed(run) for run in runs}
        found = []
        for run, followed in self._followed.items():
            if followed.wanted != wanted or time.monotonic() >= followed.due:
                self._look(run, followed, wanted, begun)
            if followed.shown is not None:
                found.append(followed.shown)
        return tuple(found)

    def _look(self, run: RunDirectory, followed: _Followed, wanted: Wanted, begun: float) -> None:
        """Read what is new of a run. One that cannot be read keeps what is known of it."""
        followed.steps.want(wanted.fields, wanted.smoothed, wanted.ema)
        followed.wanted = wanted
        try:
            update = followed.reader.poll(limit_records=20_000, limit_s=READ_S)
            followed.steps.take(update.steps, redraw=update.redraw)
            start, latest = followed.reader.start, followed.reader.latest
            if latest is not None:
                total_steps = start.total_steps if start is not None else 0
                followed.steps.update(mean_steps_of(followed.spec, total_steps, latest.step))
            if wanted.samples and not update.more:
                followed.add_samples(update.samples, wanted.samples)
            else:
                followed.newest |= {host: samples[-1] for host, samples in update.samples.items()}
        except OSError as error:
            _log.info("%s is not laid over: %s", run.path, error)
            followed.steps.take((), redraw=True)  # records may have been read and lost
            followed.due = time.monotonic() + POLL_S
            return
        followed.due = 0.0 if update.more else time.monotonic() + POLL_S
        series = followed.steps.series
        shift = begun - series.begin[1] if len(series) else 0.0
        times, mean_times = (
            array("d", (at + shift for at in column))
            for column in (series.times, series.mean_times)
        )
        evaluated = followed.reader.evaluations
        followed.shown = Overlaid(
            run,
            series,
            series.lengths,
            times,
            mean_times,
            update.more,
            evaluations=evaluation_line(evaluated, "main", shift) if evaluated else None,
            sampled=followed.sampled(shift) if wanted.samples else {},
        )


def steps_at(times: Sequence[float], length: int, series: StepSeries) -> array[float]:
    """Return at which step of a run each of the first times is: between two steps, and infinite before the first and after the last."""
    rows = len(series)
    found = array("d")
    for time_s in times[:length]:
        right = bisect_left(series.times, time_s, 0, rows)
        if right == rows or time_s < series.begin[1]:
            step = math.inf if right == rows else -math.inf
        else:
            before = (series.steps[right - 1], series.times[right - 1]) if right else series.begin
            whole = series.times[right] - before[1]
            step = before[0] + (series.steps[right] - before[0]) * (
                (time_s - before[1]) / whole if whole > 0 else 1.0
            )
        found.append(max(step, found[-1]) if found else step)
    return found
