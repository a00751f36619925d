"""Everything known about a run at one poll, as the screen draws it: frozen, and handed from the follower's thread to the event loop."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from so_tui.machine.types import Machine
from so_tui.plan.types import Plan
from so_tui.runs import LogLine, RunDirectory
from so_tui.runs.placement import RankPlacement
from so_tui.runs.records import (
    FINAL_STATES,
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    PhaseRecord,
    ResumedRecord,
    RunState,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.spec import RunSpec
from so_tui.ui.inspected import Inspected
from so_tui.ui.loads import GpuView, NodeView, Sampled
from so_tui.ui.series import Axis, Line, Series
from so_tui.ui.step_series import StepSeries, mean_of

PARTS = ("data_s", "forward_s", "backward_s", "exposed_optimizer_s", "other_s")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything known about a run at one poll."""

    run: RunDirectory
    spec: RunSpec | None
    plan: Plan | None
    machine: Machine | None
    state: RunState | None
    start: StartRecord | None
    phase: PhaseRecord | None
    phases: tuple[PhaseRecord, ...]
    """What it did before the first step of its newest attempt; empty once there is one."""
    binding: BindingRecord | None
    end: EndRecord | None
    latest: StepRecord | None
    recent: tuple[StepRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    evaluations: Line | None
    """Loss on held-out data; None before the first evaluation."""
    resumes: tuple[ResumedRecord, ...]
    warnings: tuple[WarningRecord, ...]
    whole: StepSeries
    lengths: tuple[int, int]
    """Rows of ``whole`` and of its means."""
    unread_share: float
    """Share of the run's records that are still to be read; 0 once the charts are complete."""
    closer: StepSeries | None
    """The window that was zoomed to, where the whole run shows several steps per row."""
    nodes: tuple[NodeView, ...]
    gpus: tuple[GpuView, ...]
    placement: tuple[RankPlacement, ...]
    """Where the ranks were last seen."""
    sampled: Mapping[str, tuple[Sampled, ...]]
    """Numbers of the samples that charts want, by name."""
    inspected: Inspected | None
    """What is known of the cursor's position; nodes and GPUs show its samples then."""
    averaged: bool
    """Nodes and GPUs show means over the training, because the run has ended and its host now does other work."""
    log_lines: tuple[LogLine, ...]
    log_partial: str
    heartbeat_age_s: float
    """Seconds since the supervisor's heartbeat last moved, by this process's clock."""
    read_error: str = ""
    """Why this poll could not read; everything else is as of the poll before."""
    deleted: bool = False
    """The run's folder does not exist any more; everything else is as of the poll before."""
    stop_asked: bool = False
    checking: bool = False
    """Whether the run still lives is not known yet: its processes cannot be seen from here, and its heartbeat is old."""

    @property
    def length(self) -> int:
        """Number of rows of ``whole``."""
        return self.lengths[0]

    @property
    def live(self) -> bool:
        return self.state is not None and self.state.state not in FINAL_STATES and not self.deleted

    @property
    def training(self) -> bool:
        """Whether steps are being made, so that the newest figures are current."""
        return (
            self.live
            and not self.checking
            and self.state is not None
            and self.state.state == "training"
        )

    @property
    def starting(self) -> bool:
        """Whether the newest attempt is on its way to its first step."""
        return self.live and before_first_step(self.state, self.latest)

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks train on GPUs; assumed until the binding is known."""
        ranks = (
            self.binding.ranks
            if self.binding is not None
            else self.plan.binding
            if self.plan is not None
            else ()
        )
        return not ranks or any(rank.gpu is not None for rank in ranks)

    @property
    def hosts(self) -> int:
        return len({node.host for node in self.nodes})

    @property
    def steps(self) -> array[float]:
        return self.whole.steps

    @property
    def times(self) -> array[float]:
        return self.whole.times

    @property
    def series(self) -> dict[str, Series]:
        return self.whole.series

    def has(self, metric: str) -> bool:
        """Return whether a metric has been read; which are follows from what the charts show."""
        return metric in self.whole.series

    def is_smoothed(self, metric: str) -> bool:
        """Return whether there is a mean of a metric."""
        return metric in self.whole.means

    def line(self, metric: str, role: str, axis: Axis | None = None) -> Line:
        """Return a metric, in full detail where that was read for the window that ``axis`` shows."""
        closer = self.closer
        if closer is not None and axis is not None and closer.covers(*axis.in_steps()):
            return closer.line(metric, role, closer.lengths)
        return self.whole.line(metric, role, self.lengths)

    def mean_line(self, metric: str, role: str, axis: Axis | None = None) -> Line:
        """Return the mean of a metric over the last steps at each step."""
        return self.line(mean_of(metric), role, axis)

    def approximate_until(self, axis: Axis | None) -> float:
        """Return the last step whose EMA is approximate where ``axis`` shows it; 0 if there is none."""
        low, high = (0.0, 0.0) if axis is None else axis.in_steps()
        exact = (
            axis is None
            or (self.closer is not None and self.closer.covers(low, high))
            or self.whole.approximate_until < low
        )
        return 0.0 if exact else self.whole.approximate_until

    def standing(self, x: float, unit: str) -> float:
        """Return ``x``, or the nearest last position of a block where only blocks are known, so that position and values agree."""
        coarse = self.whole.coarse
        positions = self.whole.steps if unit == "step" else self.whole.times
        axis = Axis(unit, x, x, 0.0, self.steps, self.times, self.length)
        if (
            not coarse
            or x > positions[coarse - 1]
            or (self.closer is not None and self.closer.covers(*axis.in_steps()))
        ):
            return x
        right = bisect_left(positions, x, 0, coarse)
        return min(positions[max(0, right - 1) : right + 1], key=lambda position: abs(position - x))

    @property
    def examined(self) -> tuple[StepRecord, ...]:
        """The step at the cursor, or the newest ones."""
        return (
            self.recent
            if self.inspected is None or self.inspected.step is None
            else (self.inspected.step,)
        )

    def recent_median(self, name: str) -> float:
        """Return the median of a field of the newest step records; NaN where none has it."""
        return median_of(self.recent, name)


def before_first_step(state: RunState | None, latest: StepRecord | None) -> bool:
    """Return whether a state is one before the first step of its attempt; ``latest`` is the last step of all attempts."""
    begun = state is not None and latest is not None and latest.attempt >= state.attempt
    return state is not None and not begun and state.state in ("starting", "loading", "training")


def mean_of_parts(records: Sequence[StepRecord]) -> tuple[float, ...]:
    """Return the means of PARTS over some steps, at least one: unlike medians, they sum to the mean of the steps' time."""
    return tuple(sum(getattr(record, name) for record in records) / len(records) for name in PARTS)


def median_of(records: Sequence[StepRecord], name: str) -> float:
    """Return the median of a field of step records; NaN where none has it."""
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return statistics.median(values) if values else math.nan
