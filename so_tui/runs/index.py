"""The first floor of the min/max pyramid: beside a closed metrics segment ``000007.jsonl`` lies ``000007.index``.

One line of JSON (IndexHeader), then columns of little-endian doubles, one row for every BUCKET step records: first and last step,
count, byte offset in the segment, and for every metric the lowest and highest finite value and the last value. A reader of a metric
reads three columns, whatever the length of the run. (The floors above are built in memory, see ``pyramid``.)

An index is derived: without it (the writer was killed, the segment is still open) the reader reads the segment itself.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from so_tui.runs.codec import decode_metric, encode_line
from so_tui.runs.overview import StoredRows
from so_tui.runs.pyramid import NO_EXTREMES, extremes
from so_tui.runs.records import SCHEMA, MetricRecord, StepRecord, WarningRecord
from so_tui.runs.segments import SUFFIX
from so_tui.spec.files import write_atomic
from so_tui.structs import prepare

BUCKET = 64
"""Step records in a row. At a million records the index is 0.3 MB per metric."""

KEPT_WARNINGS = 200
"""Warnings of one segment that its index repeats; a warning at every step must not make the index as big as the segment."""

METRICS: tuple[str, ...] = tuple(
    field.name
    for field in msgspec.structs.fields(StepRecord)
    if field.name not in ("v", "attempt", "step") and field.type in (int, float, int | None, float | None)
)
"""The numeric fields of a step record that can be charted."""

_ROW = ("first", "last", "count", "offset")
_MISSING = {"min": NO_EXTREMES[0], "max": NO_EXTREMES[1], "last": math.nan}
_DOUBLE = 8


class IndexHeader(msgspec.Struct, frozen=True, kw_only=True):
    v: int = SCHEMA
    attempt: int
    """The attempt that wrote the segment (0 when it holds no record)."""
    segment_bytes: int
    rows: int
    columns: tuple[str, ...]
    events: tuple[msgspec.Raw, ...]
    """Every record of the segment that is not a step, in order."""
    latest: msgspec.Raw
    """The last step record, or null."""


prepare(IndexHeader)


class SegmentIndex:
    """An index file, read column by column when asked."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when there is none, msgspec.DecodeError when it is damaged."""
        self._path = path
        with path.open("rb") as file:
            line = file.readline()
        self._start = len(line)
        self.header = msgspec.json.decode(line, type=IndexHeader)
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
        """The step records of the rows ``first`` to ``stop`` (excluded), read from the segment. Raises OSError."""
        offsets = self.column("offset")
        start = int(offsets[first]) if first < stop else 0
        end = int(offsets[stop]) if stop < len(offsets) else self.header.segment_bytes
        with self._path.with_suffix(SUFFIX).open("rb") as file:
            file.seek(start)
            lines = file.read(end - start if first < stop else 0).split(b"\n")
        return [record for line in lines if isinstance(record := decode_metric(line), StepRecord)]

    def column(self, name: str) -> array[float]:
        """One column; without values when the writer did not know the metric. Raises OSError."""
        rows = self.header.rows
        if name not in self.header.columns:
            return array("d", [_MISSING[name.rpartition(".")[2]]]) * rows
        values = array("d")
        with self._path.open("rb") as file:
            file.seek(self._start + self.header.columns.index(name) * rows * _DOUBLE)
            values.frombytes(file.read(rows * _DOUBLE))
        return _little_endian(values)

    def rows(self, metric: str) -> StoredRows:
        """Return the rows of a metric. Raises OSError."""
        names = (f"{metric}.min", f"{metric}.max", f"{metric}.last")
        return StoredRows(self.first_steps, self.last_steps, *(self.column(name) for name in names))


def index_path(segment: Path) -> Path:
    return segment.with_suffix(".index")


def write_index(segment: Path) -> None:
    """Reads a closed segment once and writes its index. Raises OSError."""
    write_atomic(index_path(segment), _build(segment.read_bytes()))


def metric_values(records: Sequence[StepRecord], metric: str) -> list[float]:
    """A metric's values; NaN where it was not measured or this version of the record lacks it."""
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
        events=tuple(msgspec.Raw(encode_line(record)) for record in _without_flood(events)),
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


def _without_flood(events: list[MetricRecord]) -> list[MetricRecord]:
    warnings = [event for event in events if isinstance(event, WarningRecord)]
    dropped = {id(event) for event in warnings[:-KEPT_WARNINGS]}
    return [event for event in events if id(event) not in dropped]


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
