"""Follow a run directory for the dashboard: polled in a worker thread, handed over as frozen
snapshots.

The follower owns the series and is the only one to append. A snapshot refers to them together with
their length, so the event loop may read them while the next poll appends.
"""

from __future__ import annotations

import math
from collections import deque

from so_tui.machine.inspect import checked_machine
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.runs import HeartbeatWatch, LogLine, RunDirectory, RunReader, deleted, read_spec
from so_tui.runs import state as run_state
from so_tui.runs.liveness import unconfirmed
from so_tui.runs.records import FINAL_STATES, EvaluationRecord, RunState, Sample, StepRecord
from so_tui.runs.results import mean_steps_of
from so_tui.spec import InputError, RunSpec
from so_tui.ui.chart_metrics import Wanted
from so_tui.ui.charts.series import FollowedSteps, Line, StepSeries, evaluation_line
from so_tui.ui.snapshot import Inspected, Inspector, Loads, Position, Snapshot, before_first_step
from so_tui.ui.textual_fixes import give_back

RECENT_STEPS = 30
CLOSE_STEPS = 24_000
"""Most steps that are read one by one for a window: more than a terminal has dots for rows of
several steps.
"""
MOST_POLLS = 10
"""Polls of the reader, 0.1 s each at most, in one poll here: enough to catch up with a fast run
without freezing the screen.
"""
READ_S = 0.3
"""How long one poll may read for the charts."""


class RunFollower:
    """Follows one run for one thread at a time."""

    def __init__(self, run: RunDirectory) -> None:
        from so_tui.launch.lifecycle import current_state

        self.run = run
        self._watch = HeartbeatWatch()
        self._reader = RunReader(run, watch=self._watch, state_of=current_state)
        self._loads = Loads(self._reader)
        self._inspector = Inspector(self._reader)
        self._inspected: Inspected | None = None
        self._evaluations: tuple[EvaluationRecord, ...] = ()
        self._evaluation_line: Line | None = None
        self._attempt = -1
        self._spec: RunSpec | None = None
        self._plan: Plan | None = None
        self._machine: Machine | None = None
        self._new_samples: deque[tuple[str, tuple[Sample, ...]]] = deque()
        """Read, but not added to the loads yet, which need the times of the steps."""
        self._steps = FollowedSteps(self._reader.metrics)
        self._checking = False
        self._closer: StepSeries | None = None
        self._recent: tuple[StepRecord, ...] = ()
        self._released = False
        """Whether the last poll combined rows, or read the last of many: the screen does not hold
        what that took any more.
        """

    @property
    def _whole(self) -> StepSeries:
        return self._steps.series

    def poll(
        self,
        window: tuple[float, float] | None = None,
        wanted: Wanted | None = None,
        cursor: Position | None = None,
    ) -> Snapshot:
        """Read what is new, the steps in ``window`` in full detail, and what was at ``cursor``;
        ``wanted`` are other metrics than before.

        A directory that cannot be read now is reported in ``read_error``; earlier data stays.
        """
        lines: list[LogLine] = []
        read_error = ""
        if wanted is not None:
            self._steps.want(wanted.fields, wanted.smoothed, wanted.ema)
        try:
            for _ in range(MOST_POLLS):
                update = self._reader.poll(earlier=False)
                lines += update.log_lines
                self._new_samples += update.samples.items()
                self._read_attempt(update.state)
                if not update.behind:
                    break
            complete = self._read_steps()
            if wanted is not None:
                self._loads.want(wanted.samples)
            # What was sampled before the first step is not shown.
            if complete or len(self._whole):
                while self._new_samples:
                    self._loads.add(*self._new_samples[0], self._whole.begin[1])
                    self._new_samples.popleft()
            if complete:
                self._loads.average(self._whole.times)
            self._read_window(window)
            self._inspected = self._inspector.read(cursor)
            self._loads.inspected = self._inspected.samples if self._inspected is not None else {}
            state = self._reader.state
            self._checking = state is not None and unconfirmed(self.run, state, self._watch)
        except OSError as error:
            read_error = f"{error.strerror or error} ({error.filename or self.run.path})"
        return self._snapshot(tuple(lines), read_error)

    def _read_steps(self) -> bool:
        """Read new steps, also for a window that reaches to the newest. Return whether all are
        known.
        """
        if self._released:
            give_back()
        before, newest = self._whole, self._whole.last_step
        was_complete = not self._steps.unread_share
        state, latest = self._reader.state, self._reader.metrics.latest
        total, last = state.total_steps if state else 0, latest.step if latest else 0
        more = self._steps.read(mean_steps_of(self._spec, total, last), READ_S)
        if self._closer is not None:
            if self._whole is not before:
                self._closer = None
            elif self._closer.last_step == newest:
                self._closer.extend([*self._reader.metrics.steps(newest + 1, math.inf)])
        newest_known = self._recent[-1] if self._recent else None
        if self._reader.metrics.latest != newest_known or not (more or was_complete):
            self._recent = tuple(self._reader.metrics.recent(RECENT_STEPS))
        combined = self._whole.halvings > before.halvings
        self._released = combined or not (more or was_complete)
        return not more

    def _read_window(self, window: tuple[float, float] | None) -> None:
        """Read the steps of ``window`` one by one where rows stand for several, and as many again
        on both sides.
        """
        whole = self._whole
        if not whole.halvings:
            self._closer = None
            return
        first, last = whole.begin[0], whole.last_step
        low, high = (
            (first, last)
            if window is None
            else (max(first, math.floor(window[0])), min(last, math.ceil(window[1])))
        )
        width = high - low
        if width > CLOSE_STEPS:
            self._closer = None
        elif (
            self._closer is None
            or not self._closer.covers(low, high)
            or self._closer.last_step - self._closer.steps[0] > 2 * CLOSE_STEPS
        ):
            margin = min(width, (CLOSE_STEPS - width) / 2)
            closer = self._steps.new_series(whole.span)
            closer.add_window(
                self._reader.metrics, max(first, low - margin), min(last, high + margin)
            )
            self._closer = closer

    def _read_attempt(self, state: RunState | None) -> None:
        """Read plan and machine of the newest attempt, once each."""
        import msgspec

        from so_tui.launch.launch import read_launch
        from so_tui.launch.lifecycle import newest_attempt

        if state is None or (state.attempt == self._attempt and self._plan is not None):
            return
        self._attempt = state.attempt
        try:
            self._spec = self._spec or read_spec(self.run)
            if (
                state.state == "queued"
            ):  # the plan of what waits; its job makes another one for its node
                self._plan = read_launch(self.run, newest_attempt(self.run, state), own=False).plan
                self._attempt = -1
                return
            launch = read_launch(self.run, state.attempt, own=False)
            self._plan = launch.plan
            self._machine = checked_machine(launch.machine, self.run.launch_path(state.attempt))
        except (OSError, InputError, msgspec.DecodeError):
            # not written yet, or by another version: the dashboard leaves out what only they
            # contain
            return

    def _snapshot(self, lines: tuple[LogLine, ...], read_error: str) -> Snapshot:
        reader, metrics, state = self._reader, self._reader.metrics, self._reader.state
        # They are few, and a resume removes some.
        if metrics.evaluations != self._evaluations:
            self._evaluations = metrics.evaluations
            line = evaluation_line(metrics.evaluations, "second")
            self._evaluation_line = line if line.length else None
        return Snapshot(
            run=self.run,
            spec=self._spec,
            plan=self._plan,
            machine=self._machine,
            state=state,
            start=metrics.start,
            phase=metrics.phase,
            phases=metrics.phases if before_first_step(state, metrics.latest) else (),
            binding=metrics.binding,
            end=metrics.end,
            latest=metrics.latest,
            recent=self._recent,
            checkpoints=metrics.checkpoints,
            evaluations=self._evaluation_line,
            resumes=metrics.resumes,
            warnings=metrics.warnings,
            whole=self._whole,
            length=len(self._whole),
            unread_share=self._steps.unread_share,
            closer=self._closer,
            nodes=self._loads.nodes(self._machine),
            gpus=self._loads.gpus(),
            placement=self._loads.placement(),
            sampled=self._loads.sampled(),
            inspected=self._inspected,
            averaged=self._loads.averaged,
            log_lines=lines,
            log_partial=reader.log_partial,
            heartbeat_age_s=self._watch.unchanged_s(self.run, state)
            if state is not None and state.state not in FINAL_STATES
            else 0.0,
            read_error=read_error,
            deleted=deleted(self.run),
            stop_asked="stop" in run_state.pending(self.run),
            checking=self._checking,
        )
