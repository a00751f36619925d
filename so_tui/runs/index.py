"""Summaries of closed metrics segments: ``000007.index`` belongs to ``000007.jsonl``.

An index has one line of JSON (IndexHeader), then columns of little-endian doubles with one row per BUCKET step records: first and last
step, count, byte offset in the segment, and for every metric the minimum and maximum finite value and the last value. Reading a metric
takes three columns, whatever the length of the run. Coarser levels are built in memory (see ``pyramid``).

Indexes are optional: without one (the writer was killed, or the segment is still open) the reader reads the segment itself.
"""

from __future__ import annotations

import math
import os
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property
from io import BufferedReader
from operator import gt
from pathlib import Path

import msgspec

from so_tui.runs.codec import decode_metric, encode_line
from so_tui.runs.overview import StoredRows
from so_tui.runs.pyramid import NO_EXTREMES, extremes
from so_tui.runs.records import SCHEMA, MetricRecord, StepRecord, WarningRecord
from so_tui.runs.segments import INDEX_SUFFIX, SUFFIX
from so_tui.spec.files import write_atomic
from so_tui.structs import prepare
from so_tui.trust.decoding import decoded
from so_tui.trust.reading import open_regular

BUCKET = 64
"""Step records per row. At a million records, an index takes 0.3 MB per metric."""

MOST_WARNINGS = 200
"""Largest number of warnings in an index, so that a warning at every step does not make it as large as the segment."""

METRICS: tuple[str, ...] = tuple(
    field.name
    for field in msgspec.structs.fields(StepRecord)
    if field.name not in ("v", "attempt", "step") and field.type in (int, float, int | None, float | None)
)
"""Numeric fields of a step record that can be charted."""

_ROW = ("first", "last", "count", "offset")
_MISSING = {"min": NO_EXTREMES[0], "max": NO_EXTREMES[1], "last": math.nan}
_DOUBLE = 8


class IndexHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of an index."""

    v: int = SCHEMA
    attempt: int
    """Attempt that wrote the segment; 0 if it has no record."""
    segment_bytes: int
    rows: int
    columns: tuple[str, ...]
    events: tuple[msgspec.Raw, ...]
    """All records of the segment that are not steps, in order."""
    latest: msgspec.Raw
    """Last step record, or null."""


prepare(IndexHeader)
_headers = msgspec.json.Decoder(IndexHeader)
_LONGEST_HEADER_BYTES = 16 << 20
_LARGEST_BYTES = 64 << 20
"""Limit of an index and of its segment, which a writer ends at 4 MiB."""


def _check_header(header: IndexHeader, columns_bytes: int) -> None:
    """Check that the columns are all there and in order. Raises msgspec.DecodeError if not: the segment itself is read instead."""
    if header.rows < 0 or header.segment_bytes < 0 or not set(_ROW) <= set(header.columns):
        raise msgspec.DecodeError("the header of the index is damaged")
    if len(header.columns) * header.rows * _DOUBLE != columns_bytes:
        raise msgspec.DecodeError("the index has another size than its header says")
    if columns_bytes > _LARGEST_BYTES or header.segment_bytes > _LARGEST_BYTES:
        raise msgspec.DecodeError("the index or its segment is larger than a writer makes them")


def _check_rows(first: array[float], last: array[float], offsets: array[float], segment_bytes: int) -> None:
    """Check that rows are in order, which searches rely on, and within the segment. Raises msgspec.DecodeError."""
    steps = [step for row in zip(first, last, strict=True) for step in row]
    for values, limit in ((steps, 2.0**53), (offsets.tolist(), float(segment_bytes))):
        if not all(0 <= value <= limit for value in values) or any(map(gt, values, values[1:])):
            raise msgspec.DecodeError("the rows of the index are damaged")


class SegmentIndex:
    """An index file, of which columns are read on demand."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises OSError if there is no index, msgspec.DecodeError if it is damaged."""
        self._path = path
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST_BYTES + _LONGEST_HEADER_BYTES:
                raise msgspec.DecodeError("the index is larger than a writer makes it")
            line = BufferedReader(file).readline(_LONGEST_HEADER_BYTES)
        self._start = len(line)
        self.header = decoded(_headers, line)
        _check_header(self.header, size - len(line))
        _check_rows(self.first_steps, self.last_steps, self.column("offset"), self.header.segment_bytes)
        self.events = tuple(record for raw in self.header.events if (record := decode_metric(bytes(raw))) is not None)
        latest = decode_metric(bytes(self.header.latest))
        self.latest = latest if isinstance(latest, StepRecord) else None

    @cached_property
    def first_steps(self) -> array[float]:
        """First step of each row."""
        return self.column("first")

    @cached_property
    def last_steps(self) -> array[float]:
        """Last step of each row."""
        return self.column("last")

    def steps_between(self, first: int, stop: int) -> list[StepRecord]:
        """Return the step records of the rows ``[first, stop)``, read from the segment. Raises OSError."""
        offsets = self.column("offset")
        start = int(offsets[first]) if first < stop else 0
        end = int(offsets[stop]) if stop < len(offsets) else self.header.segment_bytes
        with open_regular(self._path.with_suffix(SUFFIX)) as file:
            file.seek(start)
            lines = file.read(end - start if first < stop else 0).split(b"\n")
        return [record for line in lines if isinstance(record := decode_metric(line), StepRecord)]

    def column(self, name: str) -> array[float]:
        """Return one column; filled with missing values if the writer did not have the metric. Raises OSError."""
        rows = self.header.rows
        if name not in self.header.columns:
            return array("d", [_MISSING[name.rpartition(".")[2]]]) * rows
        values = array("d")
        with open_regular(self._path) as file:
            file.seek(self._start + self.header.columns.index(name) * rows * _DOUBLE)
            values.frombytes(file.read(rows * _DOUBLE))
        return _little_endian(values)

    def rows(self, metric: str) -> StoredRows:
        """Return the rows of a metric. Raises OSError."""
        names = (f"{metric}.min", f"{metric}.max", f"{metric}.last")
        return StoredRows(self.first_steps, self.last_steps, *(self.column(name) for name in names))


def index_path(segment: Path) -> Path:
    """Return the path of the index of a segment."""
    return segment.with_suffix(INDEX_SUFFIX)


def write_index(segment: Path) -> None:
    """Read a closed segment and write its index. Raises OSError."""
    write_atomic(index_path(segment), _build(segment.read_bytes()), mode=0o640)  # the umask of a run that is not shared takes the rest


def metric_values(records: Sequence[StepRecord], metric: str) -> list[float]:
    """Return the values of a metric; NaN where it was not measured or the record does not have it."""
    values = (getattr(record, metric, None) for record in records)
    return [math.nan if value is None else float(value) for value in values]


def _build(content: bytes) -> bytes:
    steps: list[StepRecord] = []
    offsets: list[int] = []
    events: list[MetricRecord] = []
    offset = 0
    for line in content.split(b"\n")[:-1]:
        record = decode_metric(line)
        if isinstance(record, StepRecord):
            steps.append(record)
            offsets.append(offset)
        elif record is not None:
            events.append(record)
        offset += len(line) + 1
    columns = {name: array("d") for name in _ROW}
    for start in range(0, len(steps), BUCKET):
        bucket = steps[start : start + BUCKET]
        row = (bucket[0].step, bucket[-1].step, len(bucket), offsets[start])
        for name, value in zip(_ROW, row, strict=True):
            columns[name].append(value)
    for metric in METRICS:
        columns |= _metric_columns(metric, metric_values(steps, metric))
    header = IndexHeader(
        attempt=next((record.attempt for record in (*steps[:1], *events[:1])), 0),
        segment_bytes=len(content),
        rows=len(columns["first"]),
        columns=tuple(columns),
        events=tuple(msgspec.Raw(encode_line(record)) for record in _with_few_warnings(events)),
        latest=msgspec.Raw(encode_line(steps[-1]) if steps else b"null"),
    )
    line = msgspec.json.encode(header).replace(b"\n", b"") + b"\n"
    return line + b"".join(_little_endian(column).tobytes() for column in columns.values())


def _metric_columns(metric: str, values: list[float]) -> dict[str, array[float]]:
    low, high, last = array("d"), array("d"), array("d")
    for start in range(0, len(values), BUCKET):
        bucket = values[start : start + BUCKET]
        least, greatest = extremes(bucket)
        low.append(least)
        high.append(greatest)
        last.append(bucket[-1])
    return {f"{metric}.min": low, f"{metric}.max": high, f"{metric}.last": last}


def _with_few_warnings(events: list[MetricRecord]) -> list[MetricRecord]:
    warnings = [event for event in events if isinstance(event, WarningRecord)]
    dropped = {id(event) for event in warnings[:-MOST_WARNINGS]}
    return [event for event in events if id(event) not in dropped]


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
