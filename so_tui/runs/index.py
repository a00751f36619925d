"""Summaries of metrics segments: ``000007.index`` belongs to ``000007.jsonl``.

An index has one line of JSON (IndexHeader), then the columns of the segment's blocks (see ``blocks``) as little-endian doubles. Opening a
run reads the indexes of its segments: 8 % of their bytes where every step is logged, but more than their bytes where only every 50th is.
The writer makes one for each segment that it closes.

Indexes are optional: where one is missing, damaged or of another version, readers read the segment and keep an index of their own (see
``index_cache``).
"""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from operator import gt
from pathlib import Path

import msgspec

from so_tui.runs.blocks import (
    EMA_WEIGHTS,
    METRICS,
    POSITIONS,
    Columns,
    append_block,
    block_end,
    missing,
    no_blocks,
    part_names,
)
from so_tui.runs.codec import decode_metric, encode_line
from so_tui.runs.records import MetricRecord, PhaseRecord, StepRecord, WarningRecord
from so_tui.runs.segments import INDEX_SUFFIX
from so_tui.spec.files import write_atomic
from so_tui.structs import prepare
from so_tui.trust.decoding import decoded
from so_tui.trust.reading import open_regular, read_bounded

VERSION = 3
MOST_WARNINGS = 200
"""Largest number of warnings in an index, so that a warning at every step does not make it as large as the segment."""
LARGEST_SEGMENT_BYTES = 64 << 20
"""Limit of segments that are indexed; a writer ends them at 4 MiB."""
LARGEST_INDEX_BYTES = 32 << 20
"""Limit of indexes in files: those of a writer's segments have less."""
_LEAST_RECORD_BYTES = 64
"""Fewer than any step record has."""
_DOUBLE = 8
_OWN_NAMES = (*POSITIONS, *part_names(METRICS, EMA_WEIGHTS))


class IndexHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of an index."""

    v: int
    attempt: int
    """Attempt that wrote the segment; 0 if it has no record."""
    segment_bytes: int
    rows: int
    columns: tuple[str, ...]
    crc32: int
    """Checksum of the columns."""
    events: tuple[msgspec.Raw, ...]
    """All records of the segment that are not steps, in order."""
    step_is_newer: bool
    """Whether the last step was written after the last phase."""


prepare(IndexHeader)
_headers = msgspec.json.Decoder(IndexHeader)


class SegmentIndex:
    """An index, of which the columns are read on demand."""

    def __init__(self, path: Path) -> None:
        """Read and check an index. Raises OSError if there is none, msgspec.DecodeError if it is damaged or of another version."""
        self._path: Path | None = path
        self._open(read_bounded(path, LARGEST_INDEX_BYTES))

    @classmethod
    def in_memory(cls, content: bytes) -> SegmentIndex:
        """Return an index that is kept nowhere else. Raises msgspec.DecodeError if it is damaged."""
        index = cls.__new__(cls)
        index._path = None
        index._open(content)
        index._content = content
        return index

    def _open(self, content: bytes) -> None:
        line, newline, columns = content.partition(b"\n")
        header = decoded(_headers, line)
        self._start = len(line) + len(newline)
        self._content = b""
        if header.v != VERSION:
            raise msgspec.DecodeError(f"the index has version {header.v}")
        if not 0 <= header.segment_bytes <= LARGEST_SEGMENT_BYTES:
            raise msgspec.DecodeError("the segment of the index is larger than a writer makes them")
        if not 0 <= header.rows * _LEAST_RECORD_BYTES <= header.segment_bytes:
            raise msgspec.DecodeError("the index has more blocks than its segment has room for")
        if header.columns[: len(POSITIONS)] != POSITIONS or len(set(header.columns)) != len(
            header.columns
        ):
            raise msgspec.DecodeError("the header of the index is damaged")
        if (
            len(header.columns) * header.rows * _DOUBLE != len(columns)
            or zlib.crc32(columns) != header.crc32
        ):
            raise msgspec.DecodeError("the columns of the index are damaged")
        self.attempt, self.segment_bytes, self.step_is_newer = (
            header.attempt,
            header.segment_bytes,
            header.step_is_newer,
        )
        self._rows = header.rows
        # Nearly always the same names: a long run has hundreds of indexes.
        self._names = _OWN_NAMES if header.columns == _OWN_NAMES else header.columns
        self.positions = self._columns_in(columns, POSITIONS)
        _check_positions(self.positions, header.segment_bytes)
        self.events = tuple(
            record for raw in header.events if (record := decode_metric(bytes(raw))) is not None
        )

    def columns(self, metrics: Iterable[str], weights: Sequence[float] = ()) -> Columns:
        """Return the blocks with the columns of some metrics. Raises OSError if the index cannot be read or has changed."""
        names = part_names(metrics, weights)
        content = self._content or self._read()
        return self.positions | self._columns_in(memoryview(content)[self._start :], names)

    def _read(self) -> bytes:
        assert self._path is not None
        size = self._start + len(self._names) * self._rows * _DOUBLE
        with open_regular(self._path) as file:
            content = file.read(size)
        if len(content) != size:
            raise OSError(f"{self._path} has changed while it was in use")
        return content

    def _columns_in(self, content: bytes | memoryview, names: Iterable[str]) -> Columns:
        """Return columns by name; those that the index does not have are filled with missing values."""
        size, at = self._rows * _DOUBLE, {name: number for number, name in enumerate(self._names)}
        found: Columns = {}
        for name in names:
            if name not in at:
                found[name] = missing(name, self._rows)
                continue
            column = array("d")
            column.frombytes(content[at[name] * size : (at[name] + 1) * size])
            found[name] = _little_endian(column)
        return found


def _check_positions(positions: Columns, segment_bytes: int) -> None:
    """Check that blocks are in order, which searches rely on, and within the segment. Raises msgspec.DecodeError."""
    first, last = positions["first"], positions["last"]
    steps = [step for row in zip(first, last, strict=True) for step in row]
    for values, limit in ((steps, 2.0**53), (positions["offset"].tolist(), float(segment_bytes))):
        if not all(0 <= value <= limit for value in values) or any(map(gt, values, values[1:])):
            raise msgspec.DecodeError("the blocks of the index are out of order")
    if any(block_end(row) != block_end(end) for row, end in zip(first, last, strict=True)):
        raise msgspec.DecodeError("the blocks of the index have other borders")
    if not all(1 <= records <= segment_bytes for records in positions["records"]):
        raise msgspec.DecodeError("the blocks of the index have impossible sizes")


class SegmentSummary:
    """What an index says, made record by record while a segment is read."""

    def __init__(self) -> None:
        self.attempt = 0
        self.events: list[MetricRecord] = []
        self.step_is_newer = False
        self._warnings = 0
        self._last_step: int | None = None
        self._complete: Columns = {}
        """Of the blocks before the newest; empty until there is one: a long run has hundreds of summaries that stay empty."""
        self._block: list[StepRecord] = []
        self._block_offset = 0

    def add(self, record: MetricRecord, offset: int) -> bool:
        """Add the next record, which begins at ``offset``. Return False for a step that does not come after the one before."""
        self.attempt = self.attempt or record.attempt
        if not isinstance(record, StepRecord):
            self.events.append(record)
            if isinstance(record, PhaseRecord):
                self.step_is_newer = False
            self._warnings += isinstance(record, WarningRecord)
            if self._warnings > 20 * MOST_WARNINGS:
                self.events, self._warnings = (
                    with_few_warnings(self.events, MOST_WARNINGS),
                    MOST_WARNINGS,
                )
            return True
        if self._last_step is not None and record.step <= self._last_step:
            return False
        self._last_step, self.step_is_newer = record.step, True
        if self._block and block_end(record.step) != block_end(self._block[0].step):
            self._complete = self._complete or no_blocks(METRICS, EMA_WEIGHTS)
            append_block(self._complete, METRICS, self._block, self._block_offset, EMA_WEIGHTS)
            self._block = []
        if not self._block:
            self._block_offset = offset
        self._block.append(record)
        return True

    @property
    def positions(self) -> Columns:
        return self.columns(())

    def columns(self, metrics: Iterable[str], weights: Sequence[float] = ()) -> Columns:
        """Return the blocks with the columns of some metrics, that of the newest steps included."""
        metrics = tuple(metrics)
        known = self._complete
        columns = (
            {name: known[name][:] for name in (*POSITIONS, *part_names(metrics, weights))}
            if known
            else no_blocks(metrics, weights)
        )
        if self._block:
            append_block(columns, metrics, self._block, self._block_offset, weights)
        return columns

    def encode(self, segment_bytes: int) -> bytes:
        """Return the index of a segment that was read to its end."""
        columns = self.columns(METRICS, EMA_WEIGHTS)
        content = b"".join(_little_endian(column).tobytes() for column in columns.values())
        header = IndexHeader(
            v=VERSION,
            attempt=self.attempt,
            segment_bytes=segment_bytes,
            rows=len(columns["first"]),
            columns=tuple(columns),
            crc32=zlib.crc32(content),
            events=tuple(
                msgspec.Raw(encode_line(record))
                for record in with_few_warnings(self.events, MOST_WARNINGS)
            ),
            step_is_newer=self.step_is_newer,
        )
        return msgspec.json.encode(header).replace(b"\n", b"") + b"\n" + content


def index_path(segment: Path) -> Path:
    """Return the path of the index of a segment."""
    return segment.with_suffix(INDEX_SUFFIX)


def index_of(segment: Path, segment_bytes: int) -> SegmentIndex | None:
    """Return the index beside a segment of this size; None if there is none that can be used."""
    try:
        index = SegmentIndex(index_path(segment))
    except (OSError, msgspec.DecodeError):
        return None
    return index if index.segment_bytes == segment_bytes else None


def write_index(segment: Path) -> None:
    """Read a closed segment and write its index. Raises OSError."""
    content, summary, offset = segment.read_bytes(), SegmentSummary(), 0
    for line in content.split(b"\n")[:-1]:
        if (record := decode_metric(line)) is not None:
            summary.add(record, offset)
        offset += len(line) + 1
    # The umask of a run that is not shared takes the rest of the mode.
    write_atomic(index_path(segment), summary.encode(len(content)), mode=0o640)


def with_few_warnings(events: list[MetricRecord], most: int) -> list[MetricRecord]:
    """Return the events with only the newest ``most`` warnings, the only kind without a limit."""
    warnings = [event for event in events if isinstance(event, WarningRecord)]
    dropped = {id(event) for event in warnings[: max(0, len(warnings) - most)]}
    return [event for event in events if id(event) not in dropped]


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


def size_of(path: Path) -> int:
    """Return the size of a segment; 0 if it is gone."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - once for each segment: a method of Path costs twice as much
    except OSError:
        return 0
