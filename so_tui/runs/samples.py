"""Samples of a host in ``samples.<host>/``, at several resolutions and of bounded size.

``raw-*`` contains the samples of the last hours; ``10s-*``, ``60s-*`` and ``600s-*`` contain roll-ups (mean and peak). Each resolution
drops its oldest segment when it exceeds its limit. The limits add up to 99 MB; with 288 cores, 8 nodes and 4 GPUs (2.2 to 3.9 kB per
sample, twice that per roll-up) they cover at least 2 hours, 9 hours, 2 days and 3 weeks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from so_tui.runs.codec import decode_rollup, decode_sample, encode_line
from so_tui.runs.directory import RunDirectory
from so_tui.runs.rollup import roll_up, single
from so_tui.runs.sample import Rollup, Sample
from so_tui.runs.segments import (
    MEBIBYTE,
    PolledSegments,
    SegmentWriter,
    read_lines,
    read_span,
    segments,
)

_FIRST_LINE_BYTES = 1 << 13


class Resolution(msgspec.Struct, frozen=True):
    """A file family of samples or roll-ups."""

    stem: str
    interval_s: float
    """Length of a roll-up; 0 for single samples."""
    cap_bytes: int
    segment_bytes: int = MEBIBYTE


RESOLUTIONS = (
    Resolution("raw-", 0, 28 * MEBIBYTE),
    Resolution("10s-", 10, 22 * MEBIBYTE),
    Resolution("60s-", 60, 22 * MEBIBYTE),
    Resolution("600s-", 600, 22 * MEBIBYTE),
)


class SampleWriter:
    """Appends the samples of one host. Only the supervisor has one. A crash loses unfinished roll-ups, but no sample."""

    def __init__(
        self, run: RunDirectory, host: str, *, resolutions: Sequence[Resolution] = RESOLUTIONS
    ) -> None:
        """Create the folder. Raises OSError."""
        folder = run.samples_dir(host)
        self._raw = _ResolutionWriter(folder, resolutions[0])
        self._rollups = [_ResolutionWriter(folder, resolution) for resolution in resolutions[1:]]
        self._open: list[list[Rollup]] = [[] for _ in self._rollups]

    def append(self, sample: Sample) -> None:
        """Write one sample and the roll-ups that it completes. Raises OSError (disk full)."""
        self._raw.append(encode_line(sample))
        self._fold(single(sample), 0)

    def close(self) -> None:
        """Write the unfinished roll-ups and close the files. Raises OSError."""
        for level, writer in enumerate(self._rollups):
            if self._open[level]:
                self._complete(level)
            writer.close()
        self._raw.close()

    def _fold(self, part: Rollup, level: int) -> None:
        """Add a part to the unfinished roll-up of a resolution; a completed one becomes a part of the next resolution."""
        if level == len(self._rollups):
            return
        parts, resolution = self._open[level], self._rollups[level].resolution
        if parts and (
            _bucket(parts[0], resolution) != _bucket(part, resolution)
            or parts[0].mean.attempt != part.mean.attempt
        ):
            self._complete(level)
        self._open[level].append(part)

    def _complete(self, level: int) -> None:
        whole = roll_up(self._open[level])
        self._open[level] = []
        self._rollups[level].append(encode_line(whole))
        self._fold(whole, level + 1)


class _ResolutionWriter:
    """Writes the segments of one resolution, and drops the oldest above its limit."""

    def __init__(self, folder: Path, resolution: Resolution) -> None:
        self.resolution = resolution
        self._folder = folder
        self._segments = SegmentWriter(
            folder,
            resolution.stem,
            limit_bytes=resolution.segment_bytes,
            on_closed=lambda _: self._prune(),
        )
        self._prune()

    def append(self, line: bytes) -> None:
        self._segments.append(line)

    def close(self) -> None:
        self._segments.close()

    def _prune(self) -> None:
        paths = list(segments(self._folder, self.resolution.stem).values())
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if (
                total <= self.resolution.cap_bytes - self.resolution.segment_bytes
            ):  # leaves room for the next segment
                return
            total -= path.stat().st_size
            path.unlink()


class SampleReader:
    """Follows the samples of one host. For one thread."""

    def __init__(
        self, run: RunDirectory, host: str, *, resolutions: Sequence[Resolution] = RESOLUTIONS
    ) -> None:
        self._folder = run.samples_dir(host)
        self._resolutions = resolutions
        self._newest = PolledSegments(self._folder, resolutions[0].stem)
        self._starts: dict[Path, float] = {}
        self._known: dict[Path, _KnownLines] = {}
        self._number = 0
        self._offset = 0

    def poll(self, *, limit_bytes: int = MEBIBYTE) -> tuple[Sample, ...]:
        """Return the samples since the last poll; at first those of the newest segment. Older ones come from ``history``."""
        found: list[Sample] = []
        paths = self._newest.poll()
        if not self._number or self._number not in paths:
            self._number, self._offset = max(paths, default=0), 0
        for number, path in paths.items():
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._offset = number, 0
            lines, self._offset = read_lines(path, self._offset, limit_bytes)
            found += [sample for line in lines if (sample := decode_sample(line)) is not None]
            if sum(map(len, lines)) >= limit_bytes // 2:
                break
        return tuple(found)

    def history(self, first: float, last: float, rows: int) -> Iterator[Rollup]:
        """Yield roll-ups between two times, oldest first. They are read on the way: thousands would take a lot of memory.

        They come from the coarsest resolution with enough rows. Times that it does not cover come from coarser resolutions (too old) or
        finer ones (too new). A single sample becomes a roll-up of one.

        Args:
            first: Begin of the range in Unix seconds, inclusive.
            last: End of the range in Unix seconds, inclusive.
            rows: Approximate number of roll-ups wanted.
        """
        wanted_s = (last - first) / max(1, rows)
        level = max(
            (
                i
                for i, resolution in enumerate(self._resolutions)
                if resolution.interval_s <= wanted_s
            ),
            default=0,
        )
        parts: list[tuple[Resolution, float]] = []
        until = last
        for resolution in self._resolutions[level:]:
            parts.insert(0, (resolution, until))
            oldest = next(self._rows(resolution, first, until), None)
            until = until if oldest is None else oldest.mean.time - oldest.mean.interval_s
        parts += [(resolution, last) for resolution in reversed(self._resolutions[:level])]
        since = first
        for resolution, until in parts:
            for row in self._rows(resolution, since, until):
                yield row
                since = math.nextafter(row.mean.time, math.inf)

    def _rows(self, resolution: Resolution, first: float, last: float) -> Iterator[Rollup]:
        paths = list(segments(self._folder, resolution.stem).values())
        starts = [self._start(resolution, path) for path in paths]
        for path, start, next_start in zip(paths, starts, [*starts[1:], math.inf], strict=False):
            set_back = (
                next_start < start
            )  # the clock, so that the next one's begin says nothing about this one's end
            if start <= last and (next_start > first or set_back):
                yield from self._rows_of(resolution, path, first, last)

    def _rows_of(
        self, resolution: Resolution, path: Path, first: float, last: float
    ) -> Iterator[Rollup]:
        """Yield the rows of a segment between two times: all lines are decoded when it is read first, then only those."""
        known = self._known.setdefault(path, _KnownLines())
        read_to = known.end
        for start, end in known.spans(first, last):
            for line in read_span(path, start, end):
                if (
                    row := _as_rollup(resolution, line)
                ) is not None and first <= row.mean.time <= last:
                    yield row
        for line in read_span(path, read_to, 2 * resolution.segment_bytes):
            row = _as_rollup(resolution, line)
            known.add(read_to, len(line) + 1, math.nan if row is None else row.mean.time)
            read_to += len(line) + 1
            if row is not None and first <= row.mean.time <= last:
                yield row

    def _start(self, resolution: Resolution, path: Path) -> float:
        """Return the time of a segment's first row; infinity if it has none yet. Lines before it may be damaged, as by a full disk."""
        offset, reached = -1, 0
        while path not in self._starts and reached > offset:
            offset = reached
            lines, reached = read_lines(path, offset, _FIRST_LINE_BYTES)
            row = next(
                (row for line in lines if (row := _as_rollup(resolution, line)) is not None), None
            )
            if row is not None:
                self._starts[path] = row.mean.time
        return self._starts.get(path, math.inf)


class _KnownLines:
    """Where the lines of a segment are, and of which times."""

    def __init__(self) -> None:
        self.end = 0
        """Bytes of the lines that are known."""
        self._offsets: array[int] = array("q")
        self._times = array("d")

    def add(self, offset: int, size_bytes: int, time: float) -> None:
        """Take note of a line, unless it is known: two readers may go through a segment at once."""
        if offset == self.end:
            self._offsets.append(offset)
            self._times.append(time)
            self.end += size_bytes

    def spans(self, first: float, last: float) -> list[tuple[int, int]]:
        """Return where the lines between two times are, as runs of bytes. A clock may have been set back between them."""
        found: list[tuple[int, int]] = []
        for at, line_time in enumerate(self._times):
            if first <= line_time <= last:
                end = self._offsets[at + 1] if at + 1 < len(self._offsets) else self.end
                if found and found[-1][1] == self._offsets[at]:
                    found[-1] = found[-1][0], end
                else:
                    found.append((self._offsets[at], end))
        return found


def _bucket(part: Rollup, resolution: Resolution) -> int:
    return int(part.mean.time // resolution.interval_s)


def _as_rollup(resolution: Resolution, line: bytes) -> Rollup | None:
    if resolution.interval_s:
        return decode_rollup(line)
    sample = decode_sample(line)
    return None if sample is None else single(sample)
