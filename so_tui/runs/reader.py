"""The reading side of a run, for the screen and the plain commands: one object that follows everything in the run directory by polling."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from so_tui.runs.directory import RunDirectory
from so_tui.runs.liveness import HeartbeatWatch, state_with_truth
from so_tui.runs.log import LogReader
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.overview import Overview
from so_tui.runs.records import (
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    PhaseRecord,
    Rollup,
    RunState,
    Sample,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.runs.samples import SampleReader
from so_tui.spec.errors import InputError


class LogLine(msgspec.Struct, frozen=True):
    attempt: int
    host: str
    text: str


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What one poll brought."""

    records: tuple[MetricRecord, ...] = ()
    """New records of every kind, in the order they were written."""
    samples: Mapping[str, tuple[Sample, ...]] = {}
    """New samples by host."""
    log_lines: tuple[LogLine, ...] = ()
    state: RunState | None = None
    """The state as it is in truth; None where it cannot be read (yet)."""
    state_changed: bool = False
    superseded: bool = False
    """A resume took steps back: draw the charts again."""
    more: bool = False
    """The poll stopped at its bound: poll again soon."""

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The step records among the new records."""
        return tuple(record for record in self.records if isinstance(record, StepRecord))


class RunReader:
    """Follows one run. Opening is cheap, and so is the first poll however long the run: old records are taken over by their index and
    drawn by ``overview``; what is young comes record by record. For one thread.
    """

    def __init__(self, run: RunDirectory, *, watch: HeartbeatWatch | None = None, log_lines: int = 1000) -> None:
        """``log_lines``: how many lines of a log that exists already the first poll brings; later ones bring all."""
        self.run = run
        self.metrics = MetricsReader(run)
        self.state: RunState | None = None
        self._watch = watch or HeartbeatWatch()
        self._log_lines = log_lines
        self._samples: dict[str, SampleReader] = {}
        self._logs: dict[str, LogReader] = {}
        self._log_attempt = 0

    def poll(self, *, limit_records: int = 5000, limit_s: float = 0.1) -> Update:
        """What is new, at most about so many records in about so much time. Raises OSError when the directory cannot be read."""
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
            superseded=progress.superseded,
            more=progress.more,
        )

    @property
    def latest(self) -> StepRecord | None:
        """The last step that counts."""
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
        """How the newest attempt ended, in the trainer's words."""
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
        """Hosts whose samples are followed."""
        return tuple(self._samples)

    @property
    def log_partial(self) -> str:
        """The unfinished last line of the log: a progress bar that is still running."""
        return next((reader.partial for reader in self._logs.values() if reader.partial), "")

    def recent(self, count: int) -> list[StepRecord]:
        """The last step records that count, oldest first. Raises OSError."""
        return self.metrics.recent(count)

    def overview(self, metric: str, columns: int, first: int | None = None, last: int | None = None) -> Overview:
        """A metric over steps ``first`` to ``last`` (default: the whole run) in so many columns. Raises ValueError, OSError."""
        return self.metrics.overview(metric, columns, first, last)

    def sample_history(self, host: str, first: float, last: float, rows: int) -> tuple[Rollup, ...]:
        """What is known of a host between two times, oldest first, in about so many rows. Raises OSError."""
        return self._sample_reader(host).history(first, last, rows)

    def _poll_samples(self) -> dict[str, tuple[Sample, ...]]:
        return {host: self._sample_reader(host).poll() for host in self.run.sample_hosts()}

    def _sample_reader(self, host: str) -> SampleReader:
        if host not in self._samples:
            self._samples[host] = SampleReader(self.run, host)
        return self._samples[host]

    def _poll_log(self, limit_s: float) -> tuple[LogLine, ...]:
        """New lines of the newest attempt's logs; of earlier attempts' logs the rest that was not read yet."""
        newest = max(self.run.attempts(), default=0)
        first_look = self._log_attempt == 0
        lines = [LogLine(self._log_attempt, host, text) for host, reader in self._logs.items() for text in reader.poll(limit_s=limit_s)]
        if newest != self._log_attempt:
            self._log_attempt, self._logs = newest, {}
        for host, path in self.run.logs(newest).items():
            if host not in self._logs:
                self._logs[host] = LogReader(path)
                tail = self._logs[host].tail(self._log_lines) if first_look else self._logs[host].poll(limit_s=limit_s)
                lines += [LogLine(newest, host, text) for text in tail]
        return tuple(lines)

    def _read_state(self) -> RunState | None:
        try:
            return state_with_truth(self.run, self._watch)
        except InputError:
            return self.state  # keep what was known: the directory may be gone for a moment, and a blank says less than stale
