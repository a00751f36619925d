"""Summaries of metrics segments: ``000007.index`` belongs to ``000007.jsonl``.

An index has one line of JSON (IndexHeader), then the columns of the segment's blocks (see
``blocks``) as little-endian doubles. Opening a run reads the indexes of its segments: 8 % of their
bytes where every step is logged, but more than their bytes where only every 50th is. The writer
makes one for each segment that it closes.

Indexes are optional: where one is missing, damaged or of another version, readers read the segment
and keep an index of their own (see ``index_cache``).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import stat
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import gt, mul
from pathlib import Path
from typing import Any

import msgspec

from so_tui.folders import cache_home
from so_tui.runs.directory import FolderNames
from so_tui.runs.records import (
    MetricRecord,
    PhaseRecord,
    StepRecord,
    WarningRecord,
    decode_metric,
    encode_line,
)
from so_tui.spec.check import write_atomic
from so_tui.trust.decoding import decoded, prepare
from so_tui.trust.files import (
    UnfitFileError,
    distrust_of_file,
    distrust_of_folder,
    open_descriptor,
    open_regular,
    private_folder,
    read_bounded,
)

# Steps in blocks: what charts need of BLOCK_STEPS consecutive steps, however many records there
# are.
#
# A block ends at a multiple of BLOCK_STEPS. So blocks are the same whoever makes them and wherever
# a segment or an attempt begins, and the mean of as many steps as one or more blocks have is exact
# at their ends. Blocks are rows of columns of doubles:
#
# first, last first and last step with a record records number of records offset position in the
# segment of the first one METRIC.min, METRIC.max, METRIC.last, METRIC.sum, METRIC.finite least and
# greatest finite value, last value, sum and number of the finite values METRIC.ema50 ...
# METRIC.ema99 sum of the finite values, each times a weight (0.50 ... 0.99) to the power of how
# many come after it: what an exponential moving average with that weight needs to be exact at the
# ends of blocks


BLOCK_STEPS = 50
POSITIONS = ("first", "last", "records", "offset")
PARTS = ("min", "max", "last", "sum", "finite")
EMA_WEIGHTS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Weights of exponential moving averages that are exact at the ends of blocks."""
WEIGHTED = {weight: f"ema{100 * weight:.0f}" for weight in EMA_WEIGHTS}
"""Parts with the weighted sums, by weight."""
_WEIGHTS = {part: weight for weight, part in WEIGHTED.items()}
_POWERS = {
    weight: tuple(weight**later for later in range(BLOCK_STEPS - 1, -1, -1))
    for weight in EMA_WEIGHTS
}

Columns = dict[str, "array[float]"]


def _is_number(kind: Any) -> bool:
    return kind in (int, float, int | None, float | None)


METRICS: tuple[str, ...] = tuple(
    field.name
    for field in msgspec.structs.fields(StepRecord)
    if field.name not in ("v", "attempt", "step") and _is_number(field.type)
)
"""Numeric fields of a step record that can be charted."""

_MISSING = {
    "min": math.inf,
    "max": -math.inf,
    "last": math.nan,
    "sum": 0.0,
    "finite": 0.0,
    **dict.fromkeys(_WEIGHTS, 0.0),
}


def block_end(step: float) -> int:
    """Return the last step of the block that a step belongs to."""
    return -(-int(step) // BLOCK_STEPS) * BLOCK_STEPS


def _part_names(metrics: Iterable[str], weights: Iterable[float] = ()) -> list[str]:
    """Return the names of the columns of some metrics, with the sums of some of EMA_WEIGHTS."""
    parts = (*PARTS, *(WEIGHTED[weight] for weight in weights))
    return [f"{metric}.{part}" for metric in metrics for part in parts]


def no_blocks(metrics: Iterable[str], weights: Iterable[float] = ()) -> Columns:
    """Return the columns of no blocks."""
    return {name: array("d") for name in (*POSITIONS, *_part_names(metrics, weights))}


def missing(name: str, rows: int) -> array[float]:
    """Return a column of a metric that was not recorded."""
    return array("d", [_MISSING[name.rpartition(".")[2]]]) * rows


def total(values: Iterable[float]) -> float:
    """Return the exact sum of finite values, rounded once; infinity or NaN where it is too
    large.
    """
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def _metric_values(records: Sequence[StepRecord], metric: str) -> list[float]:
    """Return the values of a metric; NaN where it was not measured."""
    return [
        math.nan if value is None else float(value)
        for value in (getattr(record, metric) for record in records)
    ]


def _weighted_sum(values: Sequence[float], weight: float) -> float:
    """Return the sum of a block's finite values, each times one of EMA_WEIGHTS to the power of how
    many come after it.
    """
    return float(sum(map(mul, values, _POWERS[weight][BLOCK_STEPS - len(values) :])))


def _append_block(
    columns: Columns,
    metrics: Iterable[str],
    records: Sequence[StepRecord],
    offset: float,
    weights: Sequence[float] = (),
) -> None:
    """Append the block of these records, at least one."""
    for name, position in zip(
        POSITIONS, (records[0].step, records[-1].step, len(records), offset), strict=True
    ):
        columns[name].append(position)
    for metric in metrics:
        values = _metric_values(records, metric)
        finite = [value for value in values if math.isfinite(value)]
        parts = (
            (min(finite), max(finite), values[-1], total(finite), len(finite))
            if finite
            else (math.inf, -math.inf, values[-1], 0.0, 0.0)
        )
        for part, value in zip(PARTS, parts, strict=True):
            columns[f"{metric}.{part}"].append(value)
        for weight in weights:
            columns[f"{metric}.{WEIGHTED[weight]}"].append(_weighted_sum(finite, weight))


def blocks_of(
    records: Iterable[StepRecord], metrics: Sequence[str], weights: Sequence[float] = ()
) -> Columns:
    """Return the blocks of records in step order."""
    columns, block = no_blocks(metrics, weights), list[StepRecord]()
    for record in records:
        if block and block_end(record.step) != block_end(block[0].step):
            _append_block(columns, metrics, block, 0.0, weights)
            block = []
        block.append(record)
    if block:
        _append_block(columns, metrics, block, 0.0, weights)
    return columns


def extend(columns: Columns, more: Mapping[str, array[float]], start: int, stop: int) -> None:
    """Append the rows ``[start, stop)`` of later blocks; a first one that continues the last block
    is merged into it.
    """
    if (
        start < stop
        and columns["last"]
        and block_end(columns["last"][-1]) == block_end(more["first"][start])
    ):
        for name, column in columns.items():
            metric, _, part = name.rpartition(".")
            if part in _WEIGHTS:
                kept = _WEIGHTS[part] ** max(0.0, more[f"{metric}.finite"][start])
                column[-1] = kept * column[-1] + more[name][start]
            else:
                column[-1] = _merged(part, column[-1], more[name][start])
        start += 1
    for name, column in columns.items():
        column.extend(more[name][start:stop])


def _merged(part: str, earlier: float, later: float) -> float:
    match part:
        case "first" | "offset":
            return earlier
        case "last":
            return later
        case "min":
            return min(earlier, later)
        case "max":
            return max(earlier, later)
    return earlier + later  # records, sum, finite


# Numbered files of lines, written by one process. A file does not change once a higher number
# exists.


MEBIBYTE = 1 << 20
SUFFIX = ".jsonl"
INDEX_SUFFIX = ".index"
_BLOCK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 8 * MEBIBYTE
"""Limit of a record. The binding of a thousand ranks takes less than one."""


def segments(folder: Path, stem: str = "", suffix: str = SUFFIX) -> dict[int, Path]:
    """Return the segments ``<stem>000001.jsonl`` of a folder by number, ascending; empty if the
    folder is missing.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - faster than a Path for each name
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return _numbered(folder, names, stem, suffix)


def _numbered(folder: Path, names: Iterable[str], stem: str, suffix: str) -> dict[int, Path]:
    found = {}
    for name in names:
        number = name[len(stem) : -len(suffix)]
        if (
            name.startswith(stem)
            and name.endswith(suffix)
            and number.isdecimal()
            and number.isascii()
            and len(number) <= 12
        ):
            found[int(number)] = folder / name
    return dict(sorted(found.items()))


class PolledSegments:
    """The segments of a folder that is polled, as ``segments`` returns them. For one thread."""

    def __init__(self, folder: Path, stem: str = "") -> None:
        self._folder, self._stem = folder, stem
        self._names = FolderNames(folder)
        self._listed: tuple[str, ...] = ()
        self._found: dict[int, Path] = {}

    def poll(self) -> dict[int, Path]:
        """Return the segments by number: the same ones until others appear. Raises OSError."""
        names = self._names.poll()
        if names is not self._listed:
            self._listed, self._found = names, _numbered(self._folder, names, self._stem, SUFFIX)
        return self._found


def read_lines(path: Path, offset: int, limit_bytes: int) -> tuple[list[bytes], int]:
    """Return the complete lines from ``offset`` on, without newlines, and the offset after them.

    Reads about ``limit_bytes``, more if a single line is longer. An incomplete last line is left
    for the next call. A file that does not exist, or is no regular file, reads as empty, and so
    does the rest of a file after a line that is longer than any record.
    """
    try:
        descriptor = open_descriptor(path)
    except (FileNotFoundError, UnfitFileError):
        return [], offset
    try:
        unread_bytes = os.fstat(descriptor).st_size - offset
        if unread_bytes <= 0:
            return [], offset
        block = os.pread(descriptor, min(limit_bytes, unread_bytes), offset)
        if b"\n" not in block:
            parts, at = [block], offset + len(block)
            while (
                b"\n" not in parts[-1]
                and at - offset < LONGEST_LINE_BYTES
                and (more := os.pread(descriptor, MEBIBYTE, at))
            ):
                parts.append(more)
                at += len(more)
            block = b"".join(parts)
    finally:
        os.close(descriptor)
    end = block.rfind(b"\n") + 1
    return block[:end].split(b"\n")[:-1], offset + end


def read_span(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the complete lines between two offsets, without newlines; otherwise as
    ``read_lines``.
    """
    while start < end:
        lines, reached = read_lines(path, start, min(MEBIBYTE, end - start))
        if reached == start:
            return
        yield from lines
        start = reached


def cut_incomplete_line(path: Path) -> None:
    """Cut off what a killed writer or a full disk left of a segment's last line. Only for a segment
    that nobody writes.

    Raises:
        OSError: It cannot be read or written.
    """
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


class SegmentWriter:
    """Appends lines to the newest segment and starts another one when it is full.

    Each line is one write, so lines never mix, and a crash can only leave the last line incomplete.
    A writer never changes segments of other writers: after a restart it continues with the next
    number. For one thread.
    """

    def __init__(
        self,
        folder: Path,
        stem: str = "",
        *,
        limit_bytes: int = 4 * MEBIBYTE,
        on_closed: Callable[[Path], None] | None = None,
    ) -> None:
        """Create the folder, but not its parent, so that a deleted run stays deleted. Raises
        OSError.
        """
        self._folder = folder
        self._stem = stem
        self._limit_bytes = limit_bytes
        self._on_closed = on_closed
        self._path: Path | None = None
        self._fd = -1
        self._size = 0
        self._incomplete = False
        folder.mkdir(exist_ok=True)

    def append(self, line: bytes) -> None:
        """Write a line that ends in a newline. After an OSError (disk full), the next line starts
        on a new line.
        """
        if self._path is not None and self._size + len(line) > self._limit_bytes:
            self.close()
        if self._path is None:
            self._open_next()
        data = b"\n" + line if self._incomplete else line
        self._incomplete = True
        while data:
            written = os.write(self._fd, data)  # short only when the disk fills up
            self._size += written
            data = data[written:]
        self._incomplete = False

    def close(self) -> None:
        """Close the current segment; no more lines are appended to it, even if an OSError says that
        some of it is lost.
        """
        if self._path is None:
            return
        closed, self._path, self._size, self._incomplete = self._path, None, 0, False
        os.close(self._fd)  # once: after an error, too, its number is free for another file
        if self._on_closed is not None:
            self._on_closed(closed)

    def _open_next(self) -> None:
        # A segment that was lost may have left its index, which would pass for one of a new segment
        # of the same number.
        used = (
            *segments(self._folder, self._stem),
            *segments(self._folder, self._stem, INDEX_SUFFIX),
        )
        number = max(used, default=0) + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while True:
            path = self._folder / f"{self._stem}{number:06d}{SUFFIX}"
            try:
                self._fd = os.open(path, flags, 0o640)
            except FileExistsError:
                number += 1
                continue
            self._path = path
            return


VERSION = 3
MOST_WARNINGS = 200
"""Largest number of warnings in an index, so that a warning at every step does not make it as large
as the segment.
"""
LARGEST_SEGMENT_BYTES = 64 << 20
"""Limit of segments that are indexed; a writer ends them at 4 MiB."""
LARGEST_INDEX_BYTES = 32 << 20
"""Limit of indexes in files: those of a writer's segments have less."""
_LEAST_RECORD_BYTES = 64
"""Fewer than any step record has."""
_DOUBLE = 8
_OWN_NAMES = (*POSITIONS, *_part_names(METRICS, EMA_WEIGHTS))


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
        """Read and check an index. Raises OSError if there is none, msgspec.DecodeError if it is
        damaged or of another version.
        """
        self._path: Path | None = path
        self._open(read_bounded(path, LARGEST_INDEX_BYTES))

    @classmethod
    def in_memory(cls, content: bytes) -> SegmentIndex:
        """Return an index that is kept nowhere else. Raises msgspec.DecodeError if it is
        damaged.
        """
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
        """Return the blocks with the columns of some metrics. Raises OSError if the index cannot be
        read or has changed.
        """
        names = _part_names(metrics, weights)
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
        """Return columns by name; those that the index does not have are filled with missing
        values.
        """
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
    """Check that blocks are in order, which searches rely on, and within the segment. Raises
    msgspec.DecodeError.
    """
    first, last = positions["first"], positions["last"]
    steps = [step for row in zip(first, last, strict=True) for step in row]
    for values, limit in ((steps, 2.0**53), (positions["offset"].tolist(), float(segment_bytes))):
        if not all(0 <= value <= limit for value in values) or any(map(gt, values, values[1:])):
            raise msgspec.DecodeError("the blocks of the index are out of order")
    if any(block_end(row) != block_end(end) for row, end in zip(first, last, strict=True)):
        raise msgspec.DecodeError("the blocks of the index have other borders")
    if not all(1 <= records <= segment_bytes for records in positions["records"]):
        raise msgspec.DecodeError("the blocks of the index have impossible sizes")


class _SegmentSummary:
    """What an index says, made record by record while a segment is read."""

    def __init__(self) -> None:
        self.attempt = 0
        self.events: list[MetricRecord] = []
        self.step_is_newer = False
        self._warnings = 0
        self._last_step: int | None = None
        self._complete: Columns = {}
        """Of the blocks before the newest; empty until there is one: a long run has hundreds of
        summaries that stay empty.
        """
        self._block: list[StepRecord] = []
        self._block_offset = 0

    def add(self, record: MetricRecord, offset: int) -> bool:
        """Add the next record, which begins at ``offset``. Return False for a step that does not
        come after the one before.
        """
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
            _append_block(self._complete, METRICS, self._block, self._block_offset, EMA_WEIGHTS)
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
            {name: known[name][:] for name in (*POSITIONS, *_part_names(metrics, weights))}
            if known
            else no_blocks(metrics, weights)
        )
        if self._block:
            _append_block(columns, metrics, self._block, self._block_offset, weights)
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
    content, summary, offset = segment.read_bytes(), _SegmentSummary(), 0
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


# The reader's own indexes, for segments that have none beside them: those of older versions, and
# of runs that were killed.
#
# They are kept in the user's cache folder, since a reader never writes into a run. An entry is
# named by a hash of what the segment was when it was read (path, inode, size, times of change), so
# that one of another content is never found. Only this user can read or write the folder, its size
# is limited, and its content may be deleted at any time.


LIMIT_BYTES = 256 << 20
"""Indexes of about five million steps."""
MEMORY_BYTES = 128 << 20
"""Limit of the indexes of one reader that stay in memory."""
_STALE_S = 86_400.0
"""An entry is marked as used at most once in this time."""

_log = logging.getLogger(__name__)


def _fingerprint(segment: Path) -> str:
    """Return a name for a segment in its present state. Raises OSError."""
    found = segment.stat()
    path = os.path.abspath(segment)  # noqa: PTH100 - Path.absolute keeps `..`
    what = (path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return hashlib.sha256(repr(what).encode("utf-8", "surrogateescape")).hexdigest()[:40]


class IndexCache:
    """Keeps indexes of segments for one reader. Several processes may use one folder at the same
    time.

    What does not go into the folder stays in memory: an index that is too large, and all after
    those that fill half of the folder's limit. So no reader deletes its own indexes again, however
    long its run is.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        """Use a folder, by default the user's; it is made when an index is kept for the first
        time.
        """
        self._folder = folder or cache_home() / "metrics"
        self._limit_bytes = limit_bytes
        self._used_bytes: int | None = None
        self._kept_bytes = 0
        self._memory_bytes = 0

    def load(self, segment: Path) -> SegmentIndex | None:
        """Return the index of a segment in its present state, if it is kept."""
        try:
            path = self._folder / f"{_fingerprint(segment)}{INDEX_SUFFIX}"
            if distrust_of_folder(self._folder) is not None or distrust_of_file(path) is not None:
                return None
            index = SegmentIndex(path)
            if time.time() - path.stat().st_mtime > _STALE_S:
                with contextlib.suppress(OSError):  # a cache that cannot be written serves as well
                    os.utime(path)
        except (OSError, msgspec.DecodeError) as error:
            _log.info("the index of %s is not used: %s", segment, error)
            return None
        return index

    def keep(self, segment: Path, name: str, content: bytes) -> SegmentIndex | None:
        """Keep an index, and return it. If it cannot be kept, it stays in memory; None if it is
        unfit, or too much is in memory already.

        Args:
            segment: The segment.
            name: Its fingerprint before it was read.
            content: The encoded index.
        """
        try:
            index = SegmentIndex.in_memory(content)
        except msgspec.DecodeError as error:
            _log.info("%s cannot be indexed: %s", segment, error)
            return None
        try:
            if (
                len(content) <= min(LARGEST_INDEX_BYTES, self._limit_bytes // 2 - self._kept_bytes)
                and _fingerprint(segment) == name
            ):
                path = private_folder(self._folder) / f"{name}{INDEX_SUFFIX}"
                self._make_room(len(content))
                write_atomic(path, content)
                self._kept_bytes += len(content)
                return SegmentIndex(path)
        except (OSError, msgspec.DecodeError) as error:
            _log.info("the index of %s is not kept: %s", segment, error)
        if self._memory_bytes + len(content) > MEMORY_BYTES:
            _log.info(
                "the index of %s is not kept: others take %d bytes of memory",
                segment,
                self._memory_bytes,
            )
            return None
        self._memory_bytes += len(content)
        return index

    def _make_room(self, new_bytes: int) -> None:
        """Delete the entries that were used longest ago, where the folder would exceed its
        limit.
        """
        if self._used_bytes is not None and self._used_bytes + new_bytes <= self._limit_bytes:
            self._used_bytes += new_bytes
            return
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime, about.st_size, entry.path))
        used = sum(size for _, size, _ in found) + new_bytes
        if used > self._limit_bytes:
            for _, size, path in sorted(found):
                Path(path).unlink(missing_ok=True)
                used -= size
                if used <= self._limit_bytes * 3 // 4:
                    break
        self._used_bytes = used


# One metrics segment as a reader knows it.


class Segment:
    """A segment: known by its index, or read record by record up to ``offset``. Its records are not
    kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.index: SegmentIndex | None = None
        self.summary = _SegmentSummary()
        self.name = ""
        """Its fingerprint before it was read; empty if it has none."""
        self.complete = False
        """Whether it was read to its end, or has an index."""

    @property
    def content(self) -> SegmentIndex | _SegmentSummary:
        return self.index or self.summary

    @property
    def attempt(self) -> int:
        return self.content.attempt

    @property
    def step_is_newer(self) -> bool:
        return self.content.step_is_newer

    def take(self, index: SegmentIndex | None) -> bool:
        """Use an index from now on, if there is one. Return whether there is."""
        if index is None:
            return False
        self.index, self.summary, self.complete = index, _SegmentSummary(), True
        return True

    def forget(self) -> None:
        """Begin again, without an index."""
        self.index, self.summary, self.offset, self.complete = None, _SegmentSummary(), 0, False

    def remember_state(self) -> None:
        """Take note of what the file is before it is read."""
        try:
            self.name = _fingerprint(self.path)
        except OSError:  # gone: its index is not kept
            self.name = ""

    def read_on(self, limit_bytes: int) -> bool:
        """Read about ``limit_bytes`` more of its records. Return whether there were any lines.
        Raises OSError.
        """
        lines, _ = read_lines(self.path, self.offset, limit_bytes)
        for line in lines:
            if (record := decode_metric(line)) is not None:
                self.summary.add(record, self.offset)
            self.offset += len(line) + 1
        return bool(lines)

    def records(self, positions: Columns, start: int, stop: int) -> Iterator[StepRecord]:
        """Yield the step records of the blocks ``[start, stop)``, as the summary has them. Raises
        OSError.
        """
        if start >= stop:
            return
        offsets = positions["offset"]
        end = self.offset if self.index is None else self.index.segment_bytes
        before = positions["first"][start] - 1
        for line in read_span(
            self.path, int(offsets[start]), int(offsets[stop]) if stop < len(offsets) else end
        ):
            record = decode_metric(line)
            if isinstance(record, StepRecord) and record.step > before:
                before = record.step
                yield record
