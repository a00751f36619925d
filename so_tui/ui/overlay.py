"""Other runs whose metrics are laid over those of the run that is followed. Read in the follower's thread."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from so_tui.runs import RunDirectory
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import StepRecord
from so_tui.ui.chart_layout import Wanted
from so_tui.ui.series import Line
from so_tui.ui.step_series import FollowedSteps, StepSeries, mean_of, mean_steps
from so_tui.ui.widgets.chart import RUN_ROLES

_log = logging.getLogger(__name__)

SIGNS = "●▲■◆"
"""Marks of runs in the legend: more runs than colours differ in their marks."""
POLL_S = 5.0
"""How often a run is looked at again once all of it is known."""
READ_S = 0.2
"""How long one look may take: the followed run waits."""


def colour_of(index: int) -> tuple[str, str]:
    """Return mark and role of the run that was chosen as this one."""
    return SIGNS[index // len(RUN_ROLES) % len(SIGNS)], RUN_ROLES[index % len(RUN_ROLES)]


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

    def line(self, field: str, role: str) -> Line | None:
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
        return (self.steps.steps[self.lengths[0] - 1], self.times[self.lengths[0] - 1]) if self.lengths[0] else (0.0, 0.0)


class _Followed:
    def __init__(self, run: RunDirectory) -> None:
        self.reader = MetricsReader(run)
        self.steps = FollowedSteps(self.reader)
        self.due = 0.0
        self.wanted: Wanted | None = None
        self.shown: Overlaid | None = None


class Overlays:
    """The runs that were chosen, for one thread at a time."""

    def __init__(self) -> None:
        self._followed: dict[RunDirectory, _Followed] = {}

    def read(self, runs: Sequence[RunDirectory], wanted: Wanted, begun: float) -> tuple[Overlaid, ...]:
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
            progress = followed.reader.poll(limit_records=20_000, limit_s=READ_S)
            followed.steps.take([record for record in progress.records if isinstance(record, StepRecord)], redraw=progress.redraw)
            start, latest = followed.reader.start, followed.reader.latest
            if latest is not None:
                followed.steps.update(mean_steps(max(start.total_steps if start is not None else 0, latest.step)))
        except OSError as error:
            _log.info("%s is not laid over: %s", run.path, error)
            followed.steps.take((), redraw=True)  # records may have been read and lost
            followed.due = time.monotonic() + POLL_S
            return
        followed.due = 0.0 if progress.more else time.monotonic() + POLL_S
        series = followed.steps.series
        shift = begun - series.begin[1] if len(series) else 0.0
        times, mean_times = (array("d", (at + shift for at in column)) for column in (series.times, series.mean_times))
        followed.shown = Overlaid(run, series, series.lengths, times, mean_times, progress.more)
