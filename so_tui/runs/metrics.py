"""Write the metrics of a run, and read them: new records as they appear, and the steps of any range
or all of them as rows.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import (
    BindingRecord,
    CheckpointRecord,
    Count,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    PhaseRecord,
    ResumedRecord,
    StartRecord,
    StepRecord,
    Time,
    WarningRecord,
    decode_metric,
    encode_line,
)
from so_tui.runs.segments import (
    MEBIBYTE,
    MOST_SEGMENTS,
    Lines,
    SegmentWriter,
    cut_incomplete_line,
    read_lines,
    read_span,
    segments,
    size_of,
)
from so_tui.trust.decoding import decoded

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18
"""Read at a time: some 400 records, after which other threads get their turn."""
_HEAD_BYTES = 1 << 14
_HEADS_S = 1.0
"""How long a poll may read the beginnings of segments, of which a run has some hundred at most."""
_PLACE_BYTES = 1 << 16
"""Least distance of the places that are remembered in a segment."""
_END_BYTES = 1 << 17
"""More than the records of a mean and the events between them usually take."""
_STEP_LINE = b'{"kind":"step"'
"""How the writer begins a step. Other lines are decoded to find out what they are."""


class Progress(msgspec.Struct, frozen=True):
    """Result of one poll."""

    records: tuple[MetricRecord, ...]
    """New records of every kind, in the order of writing."""
    more: bool
    """The poll stopped at its limit: poll again soon."""
    behind: bool
    """It stopped before the newest record. Otherwise ``more`` concerns earlier segments alone."""


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """What a run recorded besides its steps, of all attempts and in order, without what a resume
    supersedes; of warnings, which have no limit, only the newest.
    """

    start: StartRecord | None
    binding: BindingRecord | None
    phases: tuple[PhaseRecord, ...]
    end: EndRecord | None
    """End of the newest attempt; None while it is alive or if it ended without a record."""
    checkpoints: tuple[CheckpointRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    warning: WarningRecord | None
    resumes: tuple[ResumedRecord, ...]

    @property
    def phase(self) -> PhaseRecord | None:
        return self.phases[-1] if self.phases else None

    def end_of(self, attempt: int) -> EndRecord | None:
        """Return the end record of an attempt, or None."""
        return self.end if self.end is not None and self.end.attempt == attempt else None


class _Segment:
    """What was read of a segment, up to ``offset``: every record but the steps and all but the
    newest warning, and where steps begin.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.attempt = 0
        self.events: list[MetricRecord] = []
        self.warning: WarningRecord | None = None
        self.places: list[tuple[int, int]] = []
        """Some steps, ascending, and where they begin."""
        self._last_step = -1

    def add(self, record: MetricRecord, at: int) -> bool:
        """Add the record that begins at a position. Return False for a step that does not follow
        the previous one.
        """
        self.attempt = self.attempt or record.attempt
        if isinstance(record, StepRecord):
            if record.step <= self._last_step:
                return False
            self._last_step = record.step
            if self._is_due(at):
                self.places.append((record.step, at))
            return True
        if isinstance(record, WarningRecord):
            self.warning = record
        else:
            self.events.append(record)
        return True

    def add_lines(self, lines: Sequence[bytes], at: int) -> None:
        """Add the lines that begin at a position, but for those that are known. Steps are decoded
        only where a place is due.
        """
        for line in lines:
            start, at = at, at + len(line) + 1
            if start < self.offset:
                continue
            self.offset = at
            if line.startswith(_STEP_LINE) and self.places and not self._is_due(start):
                continue
            if (record := decode_metric(line)) is not None:
                self.add(record, start)

    def read_head(self, deadline: float) -> None:
        """Read up to the first step: a resume before it decides which earlier steps count. Raises
        OSError.
        """
        while not self.places and time.monotonic() < deadline:
            lines, _ = read_lines(self.path, self.offset, _HEAD_BYTES)
            if not lines:
                return
            for line in lines:
                self.add_lines((line,), self.offset)
                if self.places:
                    return

    def steps(self, place: int, last: float, stop: int | None = None) -> Iterator[StepRecord]:
        """Yield the steps up to ``last`` from one place on, as far as was read or to another place.
        Raises OSError.
        """
        before, start = self.places[place][0] - 1, self.places[place][1]
        end = self.offset if stop is None or stop >= len(self.places) else self.places[stop][1]
        for line in read_span(self.path, start, end):
            record = decode_metric(line)
            if isinstance(record, StepRecord) and record.step > before:
                if record.step > last:
                    return
                before = record.step
                yield record

    def _is_due(self, at: int) -> bool:
        return not self.places or at - self.places[-1][1] >= _PLACE_BYTES


class MetricsReader:
    """Follows ``metrics/`` of one run. For one thread.

    The newest segment is read record by record, and so is every later one. Of earlier ones only the
    beginning is read before it: whether a resume supersedes what comes before. ``poll`` reads the
    rest afterwards, the newest first, or ``StepRows`` does. Steps are not kept: they are read again
    from their segment where they are needed.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Prepare to read a run."""
        self.generation = 0
        """Changes when steps that were read no longer count, or others belong before them."""
        self._folder = run.metrics_dir
        self._segments: dict[int, _Segment] = {}
        self._unread: list[_Segment] = []
        """Earlier segments that are not read to their end, oldest first."""
        self._followed: list[_Segment] = []
        """The segment that is read record by record, and newer ones."""
        self._events: Events | None = None
        """None after a change."""
        self._cuts: dict[int, float] = {}
        self.whole = True
        """Whether everything that was recorded at the last poll has been read."""
        self.latest: StepRecord | None = None
        """Last step that is not superseded: a resume supersedes the later steps of earlier
        attempts.
        """

    # Recorded values.

    @property
    def events(self) -> Events:
        """What is recorded besides steps, as far as it was read."""
        if self._events is None:
            found: defaultdict[type, list[Any]] = defaultdict(list)
            newest = 0
            for event in self._all_events():
                newest = max(newest, event.attempt)
                if not isinstance(event, CheckpointRecord | EvaluationRecord) or self._counts(
                    event
                ):
                    found[type(event)].append(event)
            end = next(reversed(found[EndRecord]), None)
            warnings = [segment.warning for segment in self._segments.values() if segment.warning]
            self._events = Events(
                start=next(reversed(found[StartRecord]), None),
                binding=next(reversed(found[BindingRecord]), None),
                phases=tuple(found[PhaseRecord]),
                end=end if end and end.attempt == newest else None,
                checkpoints=tuple(found[CheckpointRecord]),
                evaluations=tuple(found[EvaluationRecord]),
                warning=next(reversed(warnings), None),
                resumes=tuple(found[ResumedRecord]),
            )
        return self._events

    def _all_events(self) -> list[MetricRecord]:
        return [event for segment in self._segments.values() for event in segment.events]

    def recent(self, count: int) -> list[StepRecord]:
        """Return the last ``count`` step records that are not superseded, oldest first: fewer where
        not all is read. Raises OSError.
        """
        found: list[StepRecord] = []
        for segment in reversed(self._segments.values()):
            if segment in self._unread:
                break
            for place in range(len(segment.places) - 1, -1, -1):
                if len(found) >= count:
                    return found[-count:]
                last = min(self.cut(segment.attempt), found[0].step - 1 if found else math.inf)
                found = [*segment.steps(place, last, place + 1), *found]
        return found[-count:]

    def steps(self, first: float, last: float) -> Iterator[StepRecord]:
        """Yield the known records of the steps ``first`` to ``last`` that are not superseded, from
        their segments. Raises OSError.
        """
        before = first - 1
        for segment in self._segments.values():
            if segment.places:
                place = bisect_right(segment.places, (before + 1, math.inf)) - 1
                for step in segment.steps(max(0, place), min(last, self.cut(segment.attempt))):
                    if step.step > before:
                        before = step.step
                        yield step

    def segments(self) -> list[_Segment]:
        """Return the segments up to the one that is followed, oldest first."""
        newer = self._followed[1:]
        return [segment for segment in self._segments.values() if segment not in newer]

    def size_of(self, segment: _Segment) -> int:
        """Return how many bytes of a segment can be read by now."""
        known = segment.offset
        return max(known, size_of(segment.path)) if segment in self._unread else known

    # Following.

    def poll(self, *, limit_records: int, limit_s: float, earlier: bool = True) -> Progress:
        """Read new records within the limits, and then what is unread of earlier segments: unless
        ``earlier``, only back to the latest step.

        The first poll reads only the newest segment record by record.

        Raises:
            OSError: If the folder cannot be read.
        """
        self._find_segments(time.monotonic() + _HEADS_S)
        deadline = time.monotonic() + limit_s
        records: list[MetricRecord] = []
        more = False
        while self._followed and not more:
            newest = len(self._followed) == 1
            more = self._follow(self._followed[0], records, limit_records, deadline, newest=newest)
            if newest:
                break
            if not more:
                del self._followed[0]
                more = time.monotonic() >= deadline
        behind = more
        while self._unread and not more and (earlier or self.latest is None):
            segment = self._unread[-1]
            self._read_on(segment, segment.offset)
            more = bool(self._unread) and time.monotonic() >= deadline
        self.whole = not more and not self._unread and len(self._segments) < MOST_SEGMENTS
        return Progress(tuple(records), more, behind)

    def _find_segments(self, deadline: float) -> None:
        """Take note of new segments. The newest is followed; earlier ones, also those that appear
        late, are read after it: only their beginnings now, and only until the deadline.
        """
        new = {
            number: path
            for number, path in segments(self._folder).items()
            if number not in self._segments
        }
        if not new:
            return
        newest = max(self._segments or new)
        late = bool(self._segments) and min(new) < newest
        for number, path in new.items():
            segment = self._segments[number] = _Segment(path)
            if number >= newest:
                self._followed.append(segment)
                continue
            self._unread.append(segment)
            try:
                segment.read_head(deadline)
            except OSError as error:
                self._leave_out(segment, error)
        self._segments = dict(sorted(self._segments.items()))
        self._unread.sort(key=lambda unread: unread.path)
        self._forget()
        if late:
            self._recount()

    def _follow(
        self,
        segment: _Segment,
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
                at, segment.offset = segment.offset, segment.offset + len(line) + 1
                record = decode_metric(line)
                if record is not None and segment.add(record, at):
                    records.append(record)
                    self._apply(record)
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
            if self.latest is not None and self.latest.step > record.step:
                self._recount()
        elif not isinstance(record, StepRecord):
            self._events = None
        elif self._counts(record):
            self.latest = record

    def lines_of(self, segment: _Segment, at: int) -> Lines:
        """Return some lines of a segment from a position on, and the position after them: of one
        that is followed, only what was read of it. Raises OSError.
        """
        if segment in self._unread:
            return self._read_on(segment, at)
        if at >= segment.offset:
            return [], at
        lines, end = read_lines(segment.path, at, min(_CHUNK_BYTES, segment.offset - at))
        return lines, end if lines else segment.offset

    def _read_on(self, segment: _Segment, at: int) -> Lines:
        """Read lines of an earlier segment from a position on, and take account of those that are
        new. Return them, and the position after them; none at its end.

        One that cannot be read is left out, as the others are worth showing without it.
        """
        try:
            lines, end = read_lines(segment.path, at, _CHUNK_BYTES)
        except OSError as error:
            self._leave_out(segment, error)
            return [], at
        known = len(segment.events)
        segment.add_lines(lines, at)
        if any(isinstance(event, ResumedRecord) for event in segment.events[known:]):
            self._forget()
            self._recount()
        self._events = None
        if not lines:
            self._unread.remove(segment)
            if self.latest is None and segment.places:
                self.latest = next(iter(self.recent(1)), None)
        return lines, end

    def _leave_out(self, segment: _Segment, error: OSError) -> None:
        _log.info("%s is left out: %s", segment.path, error)
        segment.offset, segment.events, segment.places, segment.warning = 0, [], [], None
        self._unread.remove(segment)
        self._forget()

    # Superseded steps: a resume supersedes the later steps of earlier attempts.

    def cut(self, attempt: int) -> float:
        """Return the last step of an attempt that is not superseded."""
        if attempt not in self._cuts:
            self._cuts[attempt] = min(
                (
                    event.step
                    for event in self._all_events()
                    if isinstance(event, ResumedRecord) and event.attempt > attempt
                ),
                default=math.inf,
            )
        return self._cuts[attempt]

    def _counts(self, record: StepRecord | CheckpointRecord | EvaluationRecord) -> bool:
        return record.step <= self.cut(record.attempt)

    def _forget(self) -> None:
        """Collect the events again when they are next asked for."""
        self._events = None
        self._cuts.clear()

    def _recount(self) -> None:
        """Find out which steps count, after a resume or segments that appeared late."""
        self.generation += 1
        self.latest = next(iter(self.recent(1)), None)


def records_at_end(run: RunDirectory) -> list[MetricRecord]:
    """Return the records at the end of the newest segment. Raises OSError."""
    newest = next(reversed(segments(run.metrics_dir).values()), None)
    if newest is None:
        return []
    size = size_of(newest)
    # The first of these lines may lack its beginning.
    lines = read_span(newest, max(0, size - _END_BYTES), size)
    return [record for line in lines if (record := decode_metric(line)) is not None]


_LONG = 100
"""Records that are read at once without a break."""


class StepRows:
    """The steps of a run that count, in order and each once, with the fields that a chart shows.
    For the thread of the reader.

    Each row has ``step``, ``time`` and the fields; one that was not measured is None. Segments that
    the reader has not read yet are read here, for both.
    """

    def __init__(self, reader: MetricsReader, fields: Sequence[str]) -> None:
        self._reader = reader
        self._generation = reader.generation
        numbers = [(name, float | None, None) for name in fields if name != "time"]
        row = msgspec.defstruct(
            "Row",
            [("step", Count), ("time", Time), *numbers],
            tag_field="kind",
            tag="step",
            gc=False,
        )
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(row, strict=False)
        self._read: list[_Segment] = []
        """The segments so far; the last one is read up to ``_offset``."""
        self._offset = 0
        self._last = -1

    @property
    def outdated(self) -> bool:
        """Whether rows that were read no longer count, or others belong before them: then all are
        to be read again.
        """
        return self._generation != self._reader.generation

    @property
    def unread_share(self) -> float:
        """Share of the known bytes that is still to be read."""
        sizes = [self._reader.size_of(segment) for segment in self._reader.segments()]
        read = sum(sizes[: max(0, len(self._read) - 1)]) + self._offset
        return max(0, sum(sizes) - read) / max(1, sum(sizes))

    def read(self, limit_s: float) -> Iterator[list[Any]]:
        """Yield new rows in portions, up to the newest record that the reader knows or to the
        limit. Raises OSError.
        """
        deadline = time.monotonic() + limit_s
        for segment in self._reader.segments()[max(0, len(self._read) - 1) :]:
            if segment not in self._read[-1:]:
                self._read.append(segment)
                self._offset = 0
            while True:
                lines, end = self._reader.lines_of(segment, self._offset)
                if self.outdated:
                    return
                if end == self._offset:
                    break
                self._offset = end
                if rows := self._rows(lines, self._reader.cut(segment.attempt)):
                    yield rows
                if len(rows) >= _LONG:
                    time.sleep(0)  # the screen's thread has its turn
                if time.monotonic() >= deadline:
                    return

    def _rows(self, lines: Sequence[bytes], last: float) -> list[Any]:
        rows = []
        for line in lines:
            try:
                row = decoded(self._decoder, line)
            except msgspec.DecodeError:  # another kind of record, or none
                continue
            if self._last < row.step <= last:
                self._last = row.step
                rows.append(row)
        return rows


# Write metrics. Only rank 0 has a MetricsWriter.


class MetricsWriter:
    """Appends the records of one attempt to ``metrics/``.

    Other processes can read a record when ``append`` returns. It is not synced to the device: the
    next attempt repeats the steps that a power failure loses. For one thread.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, *, segment_bytes: int = 4 * MEBIBYTE
    ) -> None:
        """Create ``metrics/``, and cut off what a killed attempt left of its last line. Raises
        OSError.
        """
        self._attempt = attempt
        self._segments = SegmentWriter(run.metrics_dir, limit_bytes=segment_bytes)
        if earlier := segments(run.metrics_dir):
            cut_incomplete_line(earlier[max(earlier)])

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
        """Close the last segment. Raises OSError."""
        self._segments.close()
