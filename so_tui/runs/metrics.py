"""Read the metrics of a run: follow new records, and draw charts of the whole run from the indexes of its segments."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TypeVar

import msgspec

from so_tui.runs.codec import decode_metric
from so_tui.runs.directory import RunDirectory
from so_tui.runs.index import METRICS, SegmentIndex, index_path, metric_values
from so_tui.runs.overview import EMPTY, Overview, StepRows, overview
from so_tui.runs.records import (
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    PhaseRecord,
    ResumedRecord,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.runs.segments import read_lines, segments

_CHUNK_BYTES = 1 << 18
_MOST_EVENTS = 5_000
_WINDOW_ROWS = 256
"""Rows of the history (BUCKET records each) up to which a narrow range is read record by record: 16,384 records, about 50 ms."""

R = TypeVar("R", StartRecord, BindingRecord, PhaseRecord, CheckpointRecord, EvaluationRecord, WarningRecord, EndRecord)


class Progress(msgspec.Struct, frozen=True):
    """Result of one poll."""

    records: tuple[MetricRecord, ...]
    more: bool
    """The poll stopped at its limit: poll again soon."""
    redraw: bool
    """Steps changed without being among the records: a resume superseded some, or some are known by the index of their segment alone.
    Charts must be drawn again from ``overview``."""


class _Segment:
    """A segment that is read record by record, up to ``offset``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.steps: list[StepRecord] = []

    def index(self) -> SegmentIndex | None:
        """Return its index; None as long as there is none."""
        try:
            return SegmentIndex(index_path(self.path))
        except (OSError, msgspec.DecodeError):
            return None


class _Window:
    """Step records of a narrow range of the history, cached while the same range is drawn."""

    def __init__(self, key: tuple[tuple[int, int], ...], steps: list[StepRecord]) -> None:
        self.key = key
        self.steps = steps
        self.rows: dict[str, StepRows] = {}


class MetricsReader:
    """Follows ``metrics/`` of one run. For one thread.

    The history consists of the leading segments with an index, whose columns are read when drawn. The tail is the rest, usually the last
    segment (4 MiB on disk), whose records are in memory. Following never reads a byte twice.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.metrics_dir
        self._known: set[int] = set()
        self._history: list[SegmentIndex] = []
        self._tail: list[_Segment] = []
        self._events: list[MetricRecord] = []
        self._latest: StepRecord | None = None
        self._step_is_newer = False
        self._history_rows: dict[str, StepRows] = {}
        self._tail_rows: dict[str, StepRows] = {}
        self._window = _Window((), [])

    # Recorded values.

    @property
    def latest(self) -> StepRecord | None:
        """Last step that is not superseded: a resume supersedes the later steps of earlier attempts."""
        return self._latest

    @property
    def start(self) -> StartRecord | None:
        return self._newest(StartRecord)

    @property
    def binding(self) -> BindingRecord | None:
        return self._newest(BindingRecord)

    @property
    def phase(self) -> PhaseRecord | None:
        return self._newest(PhaseRecord)

    @property
    def step_after_phase(self) -> bool:
        """Whether the latest step was written after the newest phase, by their order: a clock may be set back between them."""
        return self._step_is_newer

    @property
    def end(self) -> EndRecord | None:
        """End record of the newest attempt; None while it is alive or if it ended without one."""
        end = self._newest(EndRecord)
        return end if end and all(event.attempt <= end.attempt for event in self._events) else None

    @property
    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        return self._all(CheckpointRecord)

    @property
    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        return self._all(EvaluationRecord)

    @property
    def warnings(self) -> tuple[WarningRecord, ...]:
        return self._all(WarningRecord)

    @property
    def resumes(self) -> tuple[ResumedRecord, ...]:
        return tuple(event for event in self._events if isinstance(event, ResumedRecord))

    @property
    def first_step(self) -> int | None:
        """First recorded step; None if there is none yet."""
        for index in self._history:
            if index.header.rows:
                return int(index.first_steps[0])
        return next((segment.steps[0].step for segment in self._tail if segment.steps), None)

    def recent(self, count: int) -> list[StepRecord]:
        """Return the last ``count`` step records that are not superseded, oldest first. Raises OSError."""
        found = self._tail_steps()[-count:]
        for index in reversed(self._history):
            stop = self._valid_rows(index)
            while len(found) < count and stop > 0:
                stop -= 1
                found = self._steps_of(index, stop, stop + 1) + found
        return found[-count:]

    # Following.

    def poll(self, *, limit_records: int, limit_s: float) -> Progress:
        """Read new records within the limits.

        The first poll reads only the newest segment record by record. Older segments with an index become history.

        Raises:
            OSError: If the folder cannot be read.
        """
        deadline = time.monotonic() + limit_s
        listing = segments(self._folder)
        newest = next(reversed(listing.values()), None)
        for number, path in listing.items():
            if number not in self._known:
                self._known.add(number)
                self._tail.append(_Segment(path))
        records: list[MetricRecord] = []
        resumes = len(self.resumes)
        more = by_index = False
        for segment in list(self._tail):
            if len(records) >= limit_records or time.monotonic() >= deadline:
                more = True
                break
            index = segment.index() if segment is self._tail[0] else None  # before reading: a segment with an index does not grow any more
            if index is not None and segment.offset == 0 and segment.path != newest:
                self._take_history(index)
                by_index = True
                continue
            more = self._read(segment, records, limit_records, deadline)
            if more:
                break
            if index is not None:
                self._take_history(index, already_read=True)
        return Progress(tuple(records), more, by_index or len(self.resumes) > resumes)

    def _read(self, segment: _Segment, records: list[MetricRecord], limit_records: int, deadline: float) -> bool:
        """Read a segment to its end or to the limits. Return whether there is more to read."""
        while True:
            lines, end = read_lines(segment.path, segment.offset, _CHUNK_BYTES)
            taken = lines[: limit_records - len(records)]
            for line in taken:
                segment.offset += len(line) + 1
                record = decode_metric(line)
                if record is not None:
                    records.append(record)
                    self._apply(record, segment)
            if segment.offset < end or time.monotonic() >= deadline:
                return segment.offset < end or bool(lines)
            if not lines:
                return False

    def _apply(self, record: MetricRecord, segment: _Segment | None) -> None:
        if isinstance(record, StepRecord):
            if self._counts(record):
                self._latest = record
                # An index keeps the events of its segment apart from the latest step, so there the times must do.
                self._step_is_newer = segment is not None or self.phase is None or record.time > self.phase.time
                if segment is not None:
                    segment.steps.append(record)
            return
        self._events.append(record)
        if isinstance(record, PhaseRecord):
            self._step_is_newer = False
        if len(self._events) > _MOST_EVENTS:
            self._events = _without_old_warnings(self._events)
        if isinstance(record, ResumedRecord):
            self._supersede()

    # Superseded steps: a resume supersedes the later steps of earlier attempts.

    def _cut(self, attempt: int) -> float:
        """Return the last step of an attempt that is not superseded."""
        return min((resume.step for resume in self.resumes if resume.attempt > attempt), default=math.inf)

    def _counts(self, record: StepRecord | CheckpointRecord | EvaluationRecord) -> bool:
        return record.step <= self._cut(record.attempt)

    def _supersede(self) -> None:
        for segment in self._tail:
            segment.steps = [step for step in segment.steps if self._counts(step)]
        self._events = [e for e in self._events if not isinstance(e, (CheckpointRecord, EvaluationRecord)) or self._counts(e)]
        self._history_rows.clear()
        self._tail_rows.clear()
        self._window = _Window((), [])
        self._latest = next(iter(self.recent(1)), None)

    # Charts.

    def overview(self, metric: str, columns: int, first: int | None = None, last: int | None = None) -> Overview:
        """Return a metric over a range of steps in columns, with gaps where nothing was recorded.

        Args:
            metric: Name of a numeric field of step records.
            columns: Number of columns.
            first: First step; that of the run if absent.
            last: Last step, inclusive; that of the run if absent.

        Raises:
            ValueError: If step records do not have the metric.
        """
        if metric not in METRICS:
            raise ValueError(f"no metric {metric!r}; there are {', '.join(METRICS)}")
        begin = first if first is not None else self.first_step
        end = last if last is not None else self._latest.step if self._latest else None
        if begin is None or end is None or end < begin:
            return Overview(metric=metric, first=begin or 0, last=begin or 0, columns=(EMPTY,) * columns)
        history = self._rows_of_history(metric)
        if history.rows_between(begin, end) < min(columns, _WINDOW_ROWS):
            history = self._rows_of_window(metric, begin, end)
        return overview(metric, [history, self._rows_of_tail(metric)], columns, begin, end)

    def _rows_of_history(self, metric: str) -> StepRows:
        if metric not in self._history_rows:
            rows = self._history_rows[metric] = StepRows()
            for index in self._history:
                self._add_history(metric, rows, index)
        return self._history_rows[metric]

    def _add_history(self, metric: str, rows: StepRows, index: SegmentIndex) -> None:
        """Append the rows of a segment; for a row with superseded steps, the records before them."""
        whole = bisect_right(index.last_steps, self._cut(index.header.attempt))
        rows.extend(index.rows(metric), whole)
        steps = self._steps_of(index, whole, self._valid_rows(index))
        rows.append_values([step.step for step in steps], metric_values(steps, metric))

    def _valid_rows(self, index: SegmentIndex) -> int:
        return bisect_right(index.first_steps, self._cut(index.header.attempt))

    def _steps_of(self, index: SegmentIndex, start: int, stop: int) -> list[StepRecord]:
        return [step for step in index.steps_between(start, stop) if self._counts(step)]

    def _rows_of_window(self, metric: str, first: int, last: int) -> StepRows:
        """Return the history between two steps record by record, for ranges with few records."""
        key = tuple((bisect_left(index.last_steps, first), bisect_right(index.first_steps, last)) for index in self._history)
        if self._window.key != key:
            spans = zip(self._history, key, strict=True)
            self._window = _Window(key, [step for index, (start, stop) in spans for step in self._steps_of(index, start, stop)])
        steps, rows = self._window.steps, self._window.rows
        if metric not in rows:
            rows[metric] = StepRows()
            rows[metric].append_values([step.step for step in steps], metric_values(steps, metric))
        return rows[metric]

    def _rows_of_tail(self, metric: str) -> StepRows:
        rows = self._tail_rows.setdefault(metric, StepRows())
        steps = self._tail_steps()[len(rows) :]
        rows.append_values([step.step for step in steps], metric_values(steps, metric))
        return rows

    def _tail_steps(self) -> list[StepRecord]:
        return [step for segment in self._tail for step in segment.steps]

    def _take_history(self, index: SegmentIndex, *, already_read: bool = False) -> None:
        """Move the first segment of the tail to the history."""
        del self._tail[0]
        self._history.append(index)
        self._tail_rows.clear()
        for metric, rows in self._history_rows.items():
            self._add_history(metric, rows, index)
        if not already_read:
            for record in (*index.events, *((index.latest,) if index.latest else ())):
                self._apply(record, None)

    def _newest(self, kind: type[R]) -> R | None:
        return next((event for event in reversed(self._events) if isinstance(event, kind)), None)

    def _all(self, kind: type[R]) -> tuple[R, ...]:
        return tuple(event for event in self._events if isinstance(event, kind))


def _without_old_warnings(events: list[MetricRecord]) -> list[MetricRecord]:
    """Return the events without the older half of the warnings, the only kind without a limit."""
    warnings = [event for event in events if isinstance(event, WarningRecord)]
    dropped = {id(event) for event in warnings[: len(warnings) // 2]}
    return [event for event in events if id(event) not in dropped]
