"""Follow a run by polling its directory, for the screen and for commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from so_tui.runs.directory import RunDirectory, attempts_in, logs_in
from so_tui.runs.folder_names import FolderNames
from so_tui.runs.liveness import HeartbeatWatch, state_with_truth
from so_tui.runs.log import LogReader
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import (
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    PhaseRecord,
    RunState,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.runs.sample import Rollup, Sample
from so_tui.runs.samples import SampleReader
from so_tui.spec.errors import InputError


class LogLine(msgspec.Struct, frozen=True):
    """A line of the log of one host."""

    attempt: int
    host: str
    text: str


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one poll."""

    records: tuple[MetricRecord, ...] = ()
    """New records of every kind, in the order of writing."""
    samples: Mapping[str, tuple[Sample, ...]] = {}
    """New samples by host."""
    log_lines: tuple[LogLine, ...] = ()
    state: RunState | None = None
    """State corrected by ``liveness``; None if it cannot be read (yet)."""
    state_changed: bool = False
    redraw: bool = False
    """Steps changed without being among the records, as in ``metrics.Progress``: charts must be drawn again."""
    unread_share: float = 0.0
    """Share of the metrics that are still to be read, as in ``MetricsReader``."""
    more: bool = False
    """The poll stopped at its limit: poll again soon."""

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Step records among the new records."""
        return tuple(record for record in self.records if isinstance(record, StepRecord))


class RunReader:
    """Follows one run. For one thread.

    Opening and the first poll are cheap, however long the run is: only new records are read one by one. Older ones are known by their
    blocks.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        watch: HeartbeatWatch | None = None,
        log_lines: int = 1000,
        state_of: Callable[[RunDirectory, HeartbeatWatch], RunState] = state_with_truth,
    ) -> None:
        """Prepare to follow a run; nothing is read yet.

        Args:
            run: The run.
            watch: Times the heartbeats of runs on other hosts; shared by several readers.
            log_lines: Number of lines that the first poll returns of an existing log; later polls return all new lines.
            state_of: Returns the state; one that also asks the scheduler of a submitted run, if there is one.
        """
        self.run = run
        self.metrics = MetricsReader(run)
        self.state: RunState | None = None
        self._watch = watch or HeartbeatWatch()
        self._state_of = state_of
        self._log_lines = log_lines
        self._samples: dict[str, SampleReader] = {}
        self._logs: dict[str, LogReader] = {}
        self._attempts = FolderNames(run.attempts_dir)
        self._log_attempt = 0
        self._attempt = FolderNames(run.attempt_dir(0))
        """The folder of that attempt."""

    def poll(self, *, limit_records: int = 5000, limit_s: float = 0.1) -> Update:
        """Return what is new, within about ``limit_records`` and ``limit_s``. Raises OSError if the directory cannot be read."""
        deadline = time.monotonic() + limit_s
        progress = self.metrics.poll(limit_records=limit_records, limit_s=limit_s)
        samples = self._poll_samples()
        log = self._poll_log(max(0.01, deadline - time.monotonic()))
        before, self.state = self.state, self._read_state()
        return Update(
            records=progress.records,
            samples={host: new for host, new in samples.items() if new},
            log_lines=log,
            state=self.state,
            state_changed=self.state != before,
            redraw=progress.redraw,
            unread_share=self.metrics.unread_share,
            more=progress.more,
        )

    @property
    def latest(self) -> StepRecord | None:
        """Last step that is not superseded."""
        return self.metrics.latest

    @property
    def start(self) -> StartRecord | None:
        return self.metrics.start

    @property
    def binding(self) -> BindingRecord | None:
        return self.metrics.binding

    @property
    def phase(self) -> PhaseRecord | None:
        return self.metrics.phase

    @property
    def end(self) -> EndRecord | None:
        """Trainer's end record of the newest attempt."""
        return self.metrics.end

    @property
    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        return self.metrics.checkpoints

    @property
    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        return self.metrics.evaluations

    @property
    def warnings(self) -> tuple[WarningRecord, ...]:
        return self.metrics.warnings

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts with samples."""
        return tuple(self._samples)

    @property
    def log_partial(self) -> str:
        """Unfinished last line of the log, such as a running progress bar."""
        return next((reader.partial for reader in self._logs.values() if reader.partial), "")

    def recent(self, count: int) -> list[StepRecord]:
        """Return the last ``count`` step records that are not superseded, oldest first. Raises OSError."""
        return self.metrics.recent(count)

    def sample_history(self, host: str, first: float, last: float, rows: int) -> Iterator[Rollup]:
        """Yield the load of a host between two times, oldest first, in about ``rows`` rows. Raises OSError."""
        return self._sample_reader(host).history(first, last, rows)

    def _poll_samples(self) -> dict[str, tuple[Sample, ...]]:
        return {host: self._sample_reader(host).poll() for host in self.run.sample_hosts()}

    def _sample_reader(self, host: str) -> SampleReader:
        if host not in self._samples:
            self._samples[host] = SampleReader(self.run, host)
        return self._samples[host]

    def _poll_log(self, limit_s: float) -> tuple[LogLine, ...]:
        """Return new lines of the newest attempt's logs, and unread lines of earlier attempts."""
        newest = max(attempts_in(self._attempts.poll()), default=0)
        first_poll = self._log_attempt == 0
        lines = [
            LogLine(self._log_attempt, host, text)
            for host, reader in self._logs.items()
            for text in reader.poll(limit_s=limit_s)
        ]
        if newest != self._log_attempt:
            self._log_attempt, self._logs, self._attempt = (
                newest,
                {},
                FolderNames(self.run.attempt_dir(newest)),
            )
        for host, path in logs_in(self.run.attempt_dir(newest), self._attempt.poll()).items():
            if host not in self._logs:
                self._logs[host] = LogReader(path)
                tail = (
                    self._logs[host].tail(self._log_lines)
                    if first_poll
                    else self._logs[host].poll(limit_s=limit_s)
                )
                lines += [LogLine(newest, host, text) for text in tail]
        return tuple(lines)

    def _read_state(self) -> RunState | None:
        try:
            return self._state_of(self.run, self._watch)
        except InputError:
            return (
                self.state
            )  # the directory may be unreachable for a moment: a stale state is better than none
