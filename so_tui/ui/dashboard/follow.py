"""Follow a run directory for the dashboard: polled in a worker thread, handed over as frozen
snapshots.

The follower owns the series and is the only one to append. A snapshot refers to them together with
their length, so the event loop may read them while the next poll appends.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from so_tui.machine.inspect import checked_machine
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.runs import (
    HeartbeatWatch,
    LogLine,
    RunDirectory,
    RunReader,
    deleted,
    read_spec,
    read_state,
    readable_spec,
)
from so_tui.runs import state as run_state
from so_tui.runs.liveness import unconfirmed
from so_tui.runs.records import FINAL_STATES, RunState, Sample, StepRecord
from so_tui.runs.results import mean_steps_of
from so_tui.spec import InputError, RunSpec
from so_tui.ui.charts.series import FollowedSteps, Line, Span, StepSeries, Wanted, evaluation_line
from so_tui.ui.dashboard.view import Overlaid, steps_at
from so_tui.ui.snapshot import Inspected, Loads, Snapshot, inspect
from so_tui.ui.textual_fixes import give_back

_log = logging.getLogger(__name__)

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


class _ReadRun:
    """What has been read of a run: its records, its steps as series, and its samples."""

    def __init__(self, reader: RunReader, spec: RunSpec | None = None) -> None:
        self.run = reader.run
        self.spec = spec
        self._reader = reader
        self._steps = FollowedSteps(reader.metrics)
        self._loads = Loads(reader)
        self._new_samples: dict[str, tuple[Sample, ...]] = {}
        """Read, but not added to the loads yet, which need the times of the steps."""

    @property
    def _whole(self) -> StepSeries:
        return self._steps.series

    def _read_steps(self, wanted: Wanted, limit_s: float) -> bool:
        """Read new steps. Return whether there are more."""
        state, latest = self._reader.state, self._reader.metrics.latest
        total, last = state.total_steps if state else 0, latest.step if latest else 0
        return self._steps.read(wanted, mean_steps_of(self.spec, total, last), limit_s)

    def _add_samples(self) -> None:
        """Add new samples to the loads. Raises OSError; the rest is added later."""
        for host in tuple(self._new_samples):
            self._loads.add(host, self._new_samples[host], self._whole.begin[1])
            del self._new_samples[host]


class RunFollower(_ReadRun):
    """Follows one run for one thread at a time."""

    def __init__(self, run: RunDirectory) -> None:
        from so_tui.launch.lifecycle import current_state

        self._watch = HeartbeatWatch()
        super().__init__(RunReader(run, watch=self._watch, state_of=current_state))
        self._inspected: Inspected | None = None
        self._attempt = -1
        self._plan: Plan | None = None
        self._machine: Machine | None = None
        self._checking = False
        self._closer: StepSeries | None = None
        self._recent: tuple[StepRecord, ...] = ()
        self._generation = -1
        """The generation of the metrics that ``_recent`` belongs to; -1 until it is read."""
        self._released = False
        """Whether the last poll combined rows, or read the last of many: the screen does not hold
        what that took any more.
        """

    def poll(
        self, wanted: Wanted, window: Span | None = None, cursor: Span | None = None
    ) -> Snapshot:
        """Read what is new of what is ``wanted``, the steps in ``window`` in full detail, and what
        was at ``cursor``.

        A directory that cannot be read now is reported in ``read_error``; earlier data stays.
        """
        lines: list[LogLine] = []
        steps: list[StepRecord] = []
        read_error = ""
        try:
            for _ in range(MOST_POLLS):
                update = self._reader.poll(earlier=False)
                lines += update.log_lines
                steps += update.steps
                for host, new in update.samples.items():
                    self._new_samples[host] = (*self._new_samples.get(host, ()), *new)
                self._read_attempt(update.state)
                if not update.behind:
                    break
            complete = self._read_all_steps(wanted, steps)
            self._loads.want(wanted.samples)
            # What was sampled before the first step is not shown.
            if complete or len(self._whole):
                self._add_samples()
            if complete:
                self._loads.average(self._whole.times)
            self._read_window(wanted, window)
            self._inspect(cursor)
            state = self._reader.state
            self._checking = state is not None and unconfirmed(self.run, state, self._watch)
        except OSError as error:
            read_error = f"{error.strerror or error} ({error.filename or self.run.path})"
            self._generation = -1  # steps may be lost
        return self._snapshot(tuple(lines), read_error)

    def _read_all_steps(self, wanted: Wanted, new: list[StepRecord]) -> bool:
        """Read new steps, also for a window that reaches to the newest. Return whether all are
        known. ``new`` are the records that this poll has read one by one.
        """
        metrics = self._reader.metrics
        if self._released:
            give_back()
        before, newest = self._whole, self._whole.last_step
        was_complete = not self._steps.unread_share
        more = self._read_steps(wanted, READ_S)
        if self._closer is not None:
            if self._whole is not before:
                self._closer = None
            elif self._closer.last_step == newest:
                self._closer.extend([*metrics.steps(newest + 1, math.inf)])
        completed = not (more or was_complete)
        self._recent = (*self._recent, *new)[-RECENT_STEPS:]
        known = self._generation == metrics.generation and self._recent[-1:] == (metrics.latest,)
        if completed or not known:
            self._generation = metrics.generation
            self._recent = tuple(metrics.recent(RECENT_STEPS))
        self._released = self._whole.halvings > before.halvings or completed
        return not more

    def _read_window(self, wanted: Wanted, window: Span | None) -> None:
        """Read the steps of ``window`` one by one where rows stand for several, and as many again
        on both sides.
        """
        whole = self._whole
        first, last = whole.begin[0], whole.last_step
        low, high = (
            (first, last)
            if window is None
            else (max(first, math.floor(window[0])), min(last, math.ceil(window[1])))
        )
        width = high - low
        if not whole.halvings or width > CLOSE_STEPS:
            self._closer = None
        elif (
            self._closer is None
            or not self._closer.covers(low, high)
            or self._closer.last_step - self._closer.steps[0] > 2 * CLOSE_STEPS
        ):
            margin = min(width, (CLOSE_STEPS - width) / 2)
            closer = StepSeries(whole.span, wanted)
            closer.add_window(
                self._reader.metrics, max(first, low - margin), min(last, high + margin)
            )
            self._closer = closer

    def _inspect(self, cursor: Span | None) -> None:
        """Read what was at the cursor, once."""
        known = self._inspected
        if cursor is None:
            self._inspected = None
        elif known is None or known.position != cursor or not known.samples:
            self._inspected = inspect(self._reader, cursor)

    def _read_attempt(self, state: RunState | None) -> None:
        """Read plan and machine of the newest attempt, once each."""
        import msgspec

        from so_tui.launch.launch import read_launch
        from so_tui.launch.lifecycle import newest_attempt

        if state is None or (state.attempt == self._attempt and self._plan is not None):
            return
        # A queued run has a plan, but its job makes another one for its node.
        queued = state.state == "queued"
        self._attempt = -1 if queued else state.attempt
        # Not written yet, or by another version: the dashboard leaves out what only they contain.
        with suppress(OSError, InputError, msgspec.DecodeError):
            self.spec = self.spec or read_spec(self.run)
            attempt = newest_attempt(self.run, state)
            launch = read_launch(self.run, attempt, own=False)
            self._plan = launch.plan
            if not queued:
                self._machine = checked_machine(launch.machine, self.run.launch_path(attempt))

    def _snapshot(self, lines: tuple[LogLine, ...], read_error: str) -> Snapshot:
        reader, metrics, state = self._reader, self._reader.metrics, self._reader.state
        return Snapshot(
            run=self.run,
            spec=self.spec,
            plan=self._plan,
            state=state,
            events=metrics.events,
            latest=metrics.latest,
            recent=self._recent,
            evaluations=evaluation_line(metrics.events.evaluations, "second"),
            whole=self._whole,
            length=len(self._whole),
            unread_share=self._steps.unread_share,
            closer=self._closer,
            hosts=self._loads.view(self._machine, self._inspected),
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


# Other runs whose metrics are laid over those of the run that is followed. Read in its thread.


OVERLAY_POLL_S = 5.0
"""How often a run is looked at again once all of it is known."""
OVERLAY_READ_S = 0.2
"""How long one look may take: the followed run waits."""


class _OverlaidRun(_ReadRun):
    def __init__(self, run: RunDirectory) -> None:
        super().__init__(
            RunReader(run, log_lines=1, state_of=lambda of, _: read_state(of)), readable_spec(run)
        )
        self.due = 0.0
        self.wanted: Wanted | None = None
        self.shown: Overlaid | None = None

    def look(self, wanted: Wanted, begun: float) -> None:
        """Read what is new. A run that cannot be read keeps what is known of it; its loads begin
        once all steps are known, where wanted.
        """
        self.wanted = wanted
        try:
            update = self._reader.poll(limit_records=20_000, limit_s=OVERLAY_READ_S, earlier=False)
            more = self._read_steps(wanted, OVERLAY_READ_S) or update.more
            add = bool(wanted.samples) and not more
            for host, new in update.samples.items():
                kept = self._new_samples.get(host, ())
                self._new_samples[host] = (*kept, *new) if add else new[-1:]
            if add:
                self._loads.want(wanted.samples)
                self._add_samples()
        except OSError as error:
            _log.info("%s is not laid over: %s", self.run.path, error)
            self.due = time.monotonic() + OVERLAY_POLL_S
            return
        self.due = 0.0 if more else time.monotonic() + OVERLAY_POLL_S
        series = self._whole
        shift_s = begun - series.begin[1] if len(series) else 0.0
        evaluations = evaluation_line(self._reader.metrics.events.evaluations, "main", shift_s)
        self.shown = Overlaid(
            self.run,
            series,
            array("d", (at + shift_s for at in series.times)),
            more,
            [evaluations] if evaluations else [],
            self._sampled(shift_s) if wanted.samples else {},
        )

    def _sampled(self, shift_s: float) -> dict[str, tuple[Line, ...]]:
        """Return the numbers of the samples, at their steps, with their times moved."""
        sampled = self._loads.store.sampled()
        parts = {id(line.times): line for lines in sampled.values() for line in lines}
        moved = {
            part: replace(
                line,
                times=array("d", (at + shift_s for at in line.times)),
                steps=steps_at(line.times, line.length, self._whole),
            )
            for part, line in parts.items()
        }
        return {
            name: tuple(replace(moved[id(line.times)], series=line.series) for line in lines)
            for name, lines in sampled.items()
        }


class Overlays:
    """The runs that were chosen, for one thread at a time."""

    def __init__(self) -> None:
        self._read: dict[RunDirectory, _OverlaidRun] = {}

    def read(
        self, runs: Sequence[RunDirectory], wanted: Wanted, begun: float
    ) -> tuple[Overlaid, ...]:
        """Return what is known of these runs by now; ``begun`` is when the followed run did its
        first step.
        """
        self._read = {run: self._read.get(run) or _OverlaidRun(run) for run in runs}
        for overlaid in self._read.values():
            if overlaid.wanted != wanted or time.monotonic() >= overlaid.due:
                overlaid.look(wanted, begun)
        return tuple(one.shown for one in self._read.values() if one.shown is not None)
