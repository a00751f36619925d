"""Samples of a host: one file family per floor in ``samples.<host>/``, bounded however long the run lasts.

``raw-*`` holds the samples of the newest hours; ``10s-*``, ``60s-*`` and ``600s-*`` hold roll-ups (mean and peak). Each floor drops its
oldest segment when it outgrows its share. The shares sum to 96 MB; with 288 cores, 8 nodes and 4 GPUs (1.7 to 2.6 kB a sample, twice
that a roll-up) they hold at least 2.5 hours, 12 hours, 3 days and 4 weeks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from so_tui.runs.codec import decode_rollup, decode_sample, encode_line
from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import Rollup, Sample
from so_tui.runs.rollup import alone, roll_up
from so_tui.runs.segments import MEBIBYTE, SegmentWriter, read_lines, segments

R = TypeVar("R", Rollup, Sample)

_FIRST_LINE_BYTES = 1 << 13


class Floor(msgspec.Struct, frozen=True):
    stem: str
    interval_s: float
    """0: as sampled."""
    cap_bytes: int
    segment_bytes: int = MEBIBYTE


FLOORS = (
    Floor("raw-", 0, 24 * MEBIBYTE),
    Floor("10s-", 10, 22 * MEBIBYTE),
    Floor("60s-", 60, 22 * MEBIBYTE),
    Floor("600s-", 600, 24 * MEBIBYTE),
)


class SampleWriter:
    """Appends the samples of one host; the supervisor alone holds it. A crash loses the roll-ups in progress, never a sample."""

    def __init__(self, run: RunDirectory, host: str, *, floors: Sequence[Floor] = FLOORS) -> None:
        """Makes the folder. Raises OSError."""
        folder = run.samples_dir(host)
        self._raw = _FloorWriter(folder, floors[0])
        self._rollups = [_FloorWriter(folder, floor) for floor in floors[1:]]
        self._open: list[list[Rollup]] = [[] for _ in self._rollups]

    def append(self, sample: Sample) -> None:
        """Writes one sample, and the roll-ups that it completes. Raises OSError (disk full)."""
        self._raw.append(encode_line(sample))
        self._fold(alone(sample), 0)

    def close(self) -> None:
        """Closes the files; the roll-ups in progress are written short. Raises OSError."""
        for level, writer in enumerate(self._rollups):
            if self._open[level]:
                self._complete(level)
            writer.close()
        self._raw.close()

    def _fold(self, part: Rollup, level: int) -> None:
        """Adds the part to a floor's roll-up in progress; when it is full, that goes on to the next floor."""
        if level == len(self._rollups):
            return
        parts, floor = self._open[level], self._rollups[level].floor
        if parts and (_bucket(parts[0], floor) != _bucket(part, floor) or parts[0].mean.attempt != part.mean.attempt):
            self._complete(level)
        self._open[level].append(part)

    def _complete(self, level: int) -> None:
        whole = roll_up(self._open[level])
        self._open[level] = []
        self._rollups[level].append(encode_line(whole))
        self._fold(whole, level + 1)


class _FloorWriter:
    """The segments of one floor, the oldest dropped when they outgrow its share."""

    def __init__(self, folder: Path, floor: Floor) -> None:
        self.floor = floor
        self._folder = folder
        self._segments = SegmentWriter(folder, floor.stem, limit_bytes=floor.segment_bytes, on_closed=lambda _: self._prune())
        self._prune()

    def append(self, line: bytes) -> None:
        self._segments.append(line)

    def close(self) -> None:
        self._segments.close()

    def _prune(self) -> None:
        paths = list(segments(self._folder, self.floor.stem).values())
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if total <= self.floor.cap_bytes - self.floor.segment_bytes:  # room for the next one
                return
            total -= path.stat().st_size
            path.unlink()


class SampleReader:
    """Follows the samples of one host. For one thread."""

    def __init__(self, run: RunDirectory, host: str, *, floors: Sequence[Floor] = FLOORS) -> None:
        self._folder = run.samples_dir(host)
        self._floors = floors
        self._starts: dict[Path, float] = {}
        self._number = 0
        self._offset = 0

    def poll(self, *, limit_bytes: int = MEBIBYTE) -> tuple[Sample, ...]:
        """The samples since the last poll; at first those of the newest segment (some minutes). What lies before is in ``history``."""
        found: list[Sample] = []
        paths = segments(self._folder, self._floors[0].stem)
        if not self._number or self._number not in paths:
            self._number, self._offset = max(paths, default=0), 0
        for number, path in paths.items():
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._offset = number, 0
            lines, self._offset = read_lines(path, self._offset, limit_bytes)
            found += _decoded(lines, decode_sample)
            if sum(map(len, lines)) >= limit_bytes // 2:
                break
        return tuple(found)

    def history(self, first: float, last: float, rows: int) -> tuple[Rollup, ...]:
        """What is known between two times (Unix seconds, both included), oldest first, in about ``rows`` rows.

        Comes from the coarsest floor that still gives so many rows; what is too old for that floor from coarser ones, what is too new
        from finer ones. A raw sample stands as a roll-up of one.
        """
        wanted_s = (last - first) / max(1, rows)
        level = max((i for i, floor in enumerate(self._floors) if floor.interval_s <= wanted_s), default=0)
        found = self._rows(self._floors[level], first, last)
        for floor in self._floors[level + 1 :]:
            until = found[0].mean.time - found[0].mean.interval_s if found else last
            found = self._rows(floor, first, until) + found
        for floor in reversed(self._floors[:level]):
            since = math.nextafter(found[-1].mean.time, math.inf) if found else first
            found += self._rows(floor, since, last)
        return tuple(found)

    def _rows(self, floor: Floor, first: float, last: float) -> list[Rollup]:
        paths = list(segments(self._folder, floor.stem).values())
        starts = [self._start(floor, path) for path in paths]
        found: list[Rollup] = []
        for path, start, next_start in zip(paths, starts, [*starts[1:], math.inf], strict=False):
            if start <= last and next_start > first:
                lines, _ = read_lines(path, 0, 2 * floor.segment_bytes)
                found += _as_rollups(floor, lines)
        return [row for row in found if first <= row.mean.time <= last]

    def _start(self, floor: Floor, path: Path) -> float:
        """Time of a segment's first row; infinity while it has none."""
        if path not in self._starts:
            lines, _ = read_lines(path, 0, _FIRST_LINE_BYTES)
            rows = _as_rollups(floor, lines[:1])
            if not rows:
                return math.inf
            self._starts[path] = rows[0].mean.time
        return self._starts[path]


def _bucket(part: Rollup, floor: Floor) -> int:
    return int(part.mean.time // floor.interval_s)


def _as_rollups(floor: Floor, lines: Iterable[bytes]) -> list[Rollup]:
    return _decoded(lines, decode_rollup) if floor.interval_s else [alone(sample) for sample in _decoded(lines, decode_sample)]


def _decoded(lines: Iterable[bytes], decode: Callable[[bytes], R | None]) -> list[R]:
    return [row for line in lines if (row := decode(line)) is not None]
