"""Read the metrics of a run: follow new records, and know all others by the blocks of their
segments.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from so_tui.runs.directory import RunDirectory
from so_tui.runs.index import (
    LARGEST_SEGMENT_BYTES,
    MEBIBYTE,
    Columns,
    IndexCache,
    PolledSegments,
    Segment,
    SegmentIndex,
    SegmentWriter,
    blocks_of,
    cut_incomplete_line,
    extend,
    index_of,
    index_path,
    no_blocks,
    read_lines,
    segments,
    size_of,
    with_few_warnings,
    write_index,
)
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
    decode_metric,
    encode_line,
)
from so_tui.trust.files import Unfit, UnfitFileError

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18
_MOST_WARNINGS = 5_000

R = TypeVar(
    "R",
    StartRecord,
    BindingRecord,
    PhaseRecord,
    CheckpointRecord,
    EvaluationRecord,
    WarningRecord,
    ResumedRecord,
    EndRecord,
)


class Progress(msgspec.Struct, frozen=True):
    """Result of one poll."""

    records: tuple[MetricRecord, ...]
    more: bool
    """The poll stopped at its limit: poll again soon."""
    behind: bool
    """It stopped before the newest record. Otherwise ``more`` concerns earlier segments alone."""
    redraw: bool
    """Steps changed without being among the records: a resume superseded some, or earlier segments
    became known. Charts must be drawn again from ``blocks`` and ``steps``.
    """


class MetricsReader:
    """Follows ``metrics/`` of one run. For one thread.

    The newest segment is read record by record, and so is every later one. Earlier ones are taken
    afterwards, the newest first, by their index. Those without one are read, and get an index in
    the user's cache. ``unread_share`` says how much is missing until then. Records are not kept:
    they are read again from their segment where they are needed.
    """

    def __init__(self, run: RunDirectory, cache: IndexCache | None = None) -> None:
        """Prepare to read a run; indexes of the reader's own are kept in ``cache``, by default in
        the user's cache folder.
        """
        self._folder = PolledSegments(run.metrics_dir)
        self._cache = cache or IndexCache()
        self._segments: dict[int, Segment] = {}
        self._unread: list[Segment] = []
        """Earlier segments that are not known yet, oldest first."""
        self._followed: list[Segment] = []
        """The segment that is read record by record, and newer ones."""
        self._known: tuple[MetricRecord, ...] | None = None
        """All records that are not steps, in order; None after a change."""
        self._cuts: dict[int, float] = {}
        self._latest: StepRecord | None = None

    # Recorded values.

    @property
    def latest(self) -> StepRecord | None:
        """Last step that is not superseded: a resume supersedes the later steps of earlier
        attempts.
        """
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
    def phases(self) -> tuple[PhaseRecord, ...]:
        """All phases, of all attempts, in order."""
        return self._all(PhaseRecord)

    @property
    def step_after_phase(self) -> bool:
        """Whether the latest step was written after the newest phase, by their order: a clock may
        be set back between them.
        """
        for segment in reversed(self._readable()):
            if segment.step_is_newer or any(
                isinstance(event, PhaseRecord) for event in segment.content.events
            ):
                return segment.step_is_newer
        return False

    @property
    def end(self) -> EndRecord | None:
        """End record of the newest attempt; None while it is alive or if it ended without one."""
        end = self._newest(EndRecord)
        return end if end and all(event.attempt <= end.attempt for event in self._events) else None

    @property
    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        return tuple(record for record in self._all(CheckpointRecord) if self._counts(record))

    @property
    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        return tuple(record for record in self._all(EvaluationRecord) if self._counts(record))

    @property
    def warnings(self) -> tuple[WarningRecord, ...]:
        return self._all(WarningRecord)

    @property
    def resumes(self) -> tuple[ResumedRecord, ...]:
        return self._all(ResumedRecord)

    @property
    def unread_share(self) -> float:
        """Share of the bytes of all segments that are not known yet; 0 once everything is."""
        if not self._unread:
            return 0.0
        unread = sum(max(1, size_of(segment.path) - segment.offset) for segment in self._unread)
        return unread / max(
            1, sum(size_of(segment.path) for segment in self._segments.values()), unread
        )

    @property
    def first_step(self) -> int | None:
        """First known step; None if there is none yet."""
        first = (segment.content.positions["first"] for segment in self._readable())
        return next((int(steps[0]) for steps in first if steps), None)

    def recent(self, count: int) -> list[StepRecord]:
        """Return the last ``count`` step records that are not superseded, oldest first. Raises
        OSError.
        """
        found: list[StepRecord] = []
        for segment in reversed(self._readable()):
            if len(found) >= count:
                break
            positions = segment.content.positions
            stop = bisect_right(positions["first"], self._cut(segment.attempt))
            start, records = stop, 0.0
            while start > 0 and records < count - len(found) + 1:
                start -= 1
                # The last block may have superseded records.
                records += positions["records"][start] if start < stop - 1 else 1
            steps = [step for step in segment.records(positions, start, stop) if self._counts(step)]
            found = [step for step in steps if not found or step.step < found[0].step] + found
        return found[-count:]

    # Charts.

    def blocks(
        self, metrics: Sequence[str], until: float = math.inf, weights: Sequence[float] = ()
    ) -> Columns:
        """Return the blocks of all known steps up to ``until``, the end of a block, with the
        columns of some metrics. Raises OSError.
        """
        columns = no_blocks(metrics, weights)
        for segment in self._readable():
            cut = min(until, self._cut(segment.attempt))
            found = self._columns_of(segment, metrics, weights)
            start = bisect_right(found["first"], columns["last"][-1]) if columns["last"] else 0
            whole = max(start, bisect_right(found["last"], cut))
            stop = max(whole, bisect_right(found["first"], cut))
            extend(columns, found, start, whole)
            if whole < stop:  # of the block in which a resume cuts, the records before it
                last = columns["last"][-1] if columns["last"] else -1
                kept = [
                    step for step in segment.records(found, whole, stop) if last < step.step <= cut
                ]
                part = blocks_of(kept, metrics, weights)
                extend(columns, part, 0, len(part["first"]))
        return columns

    def _columns_of(
        self, segment: Segment, metrics: Sequence[str], weights: Sequence[float]
    ) -> Columns:
        """Return the blocks of a segment; none if its index has disappeared: then it is read again.
        Raises OSError.
        """
        try:
            return segment.content.columns(metrics, weights)
        except OSError as error:
            if not segment.path.exists():
                raise
            _log.info("an index is made again: %s", error)
            segment.forget()
            self._unread.append(segment)
            self._unread.sort(key=lambda unread: unread.path)
            self._forget()
            return no_blocks(metrics, weights)

    def steps(self, first: float, last: float) -> Iterator[StepRecord]:
        """Yield the known records of the steps ``first`` to ``last`` that are not superseded, from
        their segments. Raises OSError.
        """
        before = first - 1
        for segment in self._readable():
            positions = segment.content.positions
            stop = bisect_right(positions["first"], min(last, self._cut(segment.attempt)))
            for step in segment.records(
                positions, bisect_left(positions["last"], before + 1), stop
            ):
                if before < step.step <= last and self._counts(step):
                    before = step.step
                    yield step

    def _readable(self) -> list[Segment]:
        """Return the segments whose records count by now: those read to their end, and those that
        are followed.
        """
        return [
            segment
            for segment in self._segments.values()
            if segment.complete or segment in self._followed
        ]

    # Following.

    def poll(self, *, limit_records: int, limit_s: float) -> Progress:
        """Read new records within the limits, and then what is unread of earlier segments.

        The first poll reads only the newest segment record by record.

        Raises:
            OSError: If the folder cannot be read.
        """
        deadline = time.monotonic() + limit_s
        self._find_segments()
        redraw = False
        records: list[MetricRecord] = []
        resumes = len(self.resumes)
        more = False
        while self._followed and not more:
            segment = self._followed[0]
            newer = len(self._followed) > 1
            if newer and not segment.offset and segment.take(self._index_of(segment)):
                redraw = True  # too slow for its records
            else:
                more = self._follow(segment, records, limit_records, deadline, newest=not newer)
            if more or not newer:
                break
            if segment.index is None:
                segment.complete = True
                segment.take(self._index_of(segment))
            del self._followed[0]
            more = time.monotonic() >= deadline
        behind = more
        while self._unread and not more:
            redraw = self._read_earlier(self._unread[-1], deadline) or redraw
            more = bool(self._unread) and time.monotonic() >= deadline
        if redraw or len(self.resumes) > resumes:
            redraw = True
            self._forget()
            self._latest = next(iter(self.recent(1)), None)
        return Progress(tuple(records), more, behind, redraw)

    def _find_segments(self) -> None:
        """Take note of new segments. The newest is followed; earlier ones, also those that appear
        late, are read after it.
        """
        new = {
            number: path
            for number, path in self._folder.poll().items()
            if number not in self._segments
        }
        newest = max(self._segments or new, default=0)
        for number, path in new.items():
            segment = self._segments[number] = Segment(path)
            (self._unread if number < newest else self._followed).append(segment)
        if new:
            self._segments = dict(sorted(self._segments.items()))
            self._unread.sort(key=lambda unread: unread.path)

    def _index_of(self, segment: Segment) -> SegmentIndex | None:
        """Return the index of a segment to which nothing is appended any more: the one beside it,
        or the reader's own.
        """
        size = size_of(segment.path)
        if segment.offset and segment.offset != size:
            return None
        return index_of(segment.path, size) or self._cache.load(segment.path)

    def _follow(
        self,
        segment: Segment,
        records: list[MetricRecord],
        limit_records: int,
        deadline: float,
        *,
        newest: bool,
    ) -> bool:
        """Read new records of a segment up to its end or to the limits. Return whether there is
        more to read.
        """
        while True:
            lines, end = read_lines(segment.path, segment.offset, _CHUNK_BYTES)
            for line in lines[: limit_records - len(records)]:
                record = decode_metric(line)
                if record is not None and segment.summary.add(record, segment.offset):
                    records.append(record)
                    self._apply(record)
                segment.offset += len(line) + 1
            if segment.offset < end or time.monotonic() >= deadline:
                return segment.offset < end or bool(lines)
            if not lines or (
                newest and end == size_of(segment.path)
            ):  # what is written to the newest after that, the next poll finds
                return False

    def _apply(self, record: MetricRecord) -> None:
        """Take account of a new record."""
        if isinstance(record, ResumedRecord):
            self._forget()
            self._latest = next(iter(self.recent(1)), None)
        elif not isinstance(record, StepRecord):
            self._known = None
        elif self._counts(record):
            self._latest = record

    def _read_earlier(self, segment: Segment, deadline: float) -> bool:
        """Take an earlier segment by its index, or read on in it. Return whether it is known to its
        end: then it counts.

        One that cannot be read is left out, as the others are worth showing without it.
        """
        try:
            if not self._read_on(segment, deadline):
                return False
        except OSError as error:
            _log.info("%s is left out: %s", segment.path, error)
            segment.forget()
        self._unread.remove(segment)
        return segment.complete

    def _read_on(self, segment: Segment, deadline: float) -> bool:
        """Read an earlier segment until the deadline. Return whether that was all of it. Raises
        OSError.
        """
        if size_of(segment.path) > LARGEST_SEGMENT_BYTES:
            raise UnfitFileError(segment.path, Unfit.TOO_LARGE, LARGEST_SEGMENT_BYTES)
        if not segment.offset:
            if segment.take(self._index_of(segment)):
                return True
            segment.remember_state()
        while segment.read_on(_CHUNK_BYTES):
            if time.monotonic() >= deadline:
                return False
        segment.complete = True
        # An incomplete last line belongs to no record; the index counts it, as its segment may be
        # found with it again.
        if segment.summary.attempt:
            content = segment.summary.encode(max(segment.offset, size_of(segment.path)))
            if not segment.take(self._cache.keep(segment.path, segment.name, content)):
                raise OSError(f"its {len(content)} bytes of index are too many, or unfit")
        return True

    # Superseded steps: a resume supersedes the later steps of earlier attempts.

    def _cut(self, attempt: int) -> float:
        """Return the last step of an attempt that is not superseded."""
        if attempt not in self._cuts:
            later = (resume.step for resume in self.resumes if resume.attempt > attempt)
            self._cuts[attempt] = min(later, default=math.inf)
        return self._cuts[attempt]

    def _counts(self, record: StepRecord | CheckpointRecord | EvaluationRecord) -> bool:
        return record.step <= self._cut(record.attempt)

    @property
    def _events(self) -> tuple[MetricRecord, ...]:
        if self._known is None:
            events = [event for segment in self._readable() for event in segment.content.events]
            self._known = tuple(with_few_warnings(events, _MOST_WARNINGS))
        return self._known

    def _forget(self) -> None:
        """Collect the events again when they are next asked for."""
        self._known = None
        self._cuts.clear()

    def _newest(self, kind: type[R]) -> R | None:
        return next((event for event in reversed(self._events) if isinstance(event, kind)), None)

    def _all(self, kind: type[R]) -> tuple[R, ...]:
        return tuple(event for event in self._events if isinstance(event, kind))


# Write metrics. Only rank 0 has a MetricsWriter.


class MetricsWriter:
    """Appends the records of one attempt to ``metrics/`` and writes an index for each closed
    segment.

    Other processes can read a record when ``append`` returns. It is not synced to the device: the
    next attempt repeats the steps that a power failure loses. Indexing a full segment of 4 MiB
    takes about 0.1 s, once in about 10,000 steps. For one thread.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, *, segment_bytes: int = 4 * MEBIBYTE
    ) -> None:
        """Create ``metrics/`` and index the segments of killed attempts. Raises OSError."""
        self._attempt = attempt
        self._folder = run.metrics_dir
        self._segments = SegmentWriter(
            run.metrics_dir, limit_bytes=segment_bytes, on_closed=lambda _: self._index_closed()
        )
        self._index_closed()

    def append(self, record: MetricRecord) -> None:
        """Write one record. Raises ValueError for a record of another attempt, OSError if the disk
        is full.
        """
        if record.attempt != self._attempt:
            raise ValueError(
                f"record of attempt {record.attempt} for the writer of attempt {self._attempt}"
            )
        self._segments.append(encode_line(record))

    def close(self) -> None:
        """Close and index the last segment. Raises OSError."""
        self._segments.close()

    def _index_closed(self) -> None:
        """Index all segments without an index. No segment may be open."""
        for path in segments(self._folder).values():
            if not index_path(path).exists():
                cut_incomplete_line(path)
                # An index is optional, so a full disk must not lose the next record because of it.
                # Writing that record reports the full disk, and the index is tried again after the
                # next segment or in the next attempt.
                with contextlib.suppress(OSError):
                    write_index(path)
