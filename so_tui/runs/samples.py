"""Samples of a host in ``samples.<host>/``, at several resolutions and of bounded size.

``raw-*`` contains the samples of the last hours; ``10s-*``, ``60s-*`` and ``600s-*`` contain
roll-ups, the means of several. Each resolution drops its oldest segment when it exceeds its limit.
The limits add up to 99 MB; with 288 cores, 8 nodes and 4 GPUs (2.2 to 3.9 kB per sample or roll-up)
they cover at least 2 hours, 15 hours, 3 days and 5 weeks.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from so_tui.runs.directory import RunDirectory, write_run_json
from so_tui.runs.records import (
    ForeignProcess,
    ForeignProcesses,
    GpuSample,
    NodeSample,
    Rollup,
    Sample,
    decode_rollup,
    decode_sample,
    encode_line,
)
from so_tui.runs.segments import (
    MEBIBYTE,
    SegmentWriter,
    read_lines,
    read_span,
    segments,
)
from so_tui.trust.decoding import prepare, readable_json

# How fast the ranks of several nodes exchanged weights and gradients before they trained:
# ``network.json``, which rank 0 writes.


class NetworkRate(Struct, frozen=True, kw_only=True):
    """Content of ``network.json``."""

    v: int = 1
    nodes: int
    bytes_per_s: Annotated[float, Meta(gt=0, le=1e15)]
    """What entered each node, and left it, during all-gathers and reduce-scatters of all ranks."""
    measured: float
    """In seconds since the epoch."""


prepare(NetworkRate)


def write_network_rate(run: RunDirectory, attempt: int, nodes: int, bytes_per_s: float) -> None:
    """Record a measured rate. Raises OSError."""
    rate = NetworkRate(nodes=nodes, bytes_per_s=bytes_per_s, measured=time.time())
    write_run_json(run, run.network_path(attempt), rate)


def read_network_rate(run: RunDirectory, attempt: int) -> NetworkRate | None:
    """Return what an attempt measured; None if it measured nothing, or the file is damaged or not
    this user's own.
    """
    return readable_json(run.network_path(attempt), NetworkRate, own=True)


# Combine samples into their mean. Pure functions.


Weighted = Sequence[tuple[Any, int]]
"""Values with their numbers of samples."""

_GPU_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(GpuSample)
    if field.name not in ("index", "throttling")
)
_SUMS = ("interval_s", "run_cpu_s", "supervisor_cpu_s")
MOST_FOREIGN = 3
"""Foreign processes of a sample."""


def roll_up(parts: Sequence[Rollup]) -> Rollup:
    """Combine consecutive roll-ups (at least one) into one, with the nodes and GPUs of the newest.

    The mean is weighted by samples; its ``interval_s`` and CPU seconds are sums over the interval.
    It names every reason for throttling, and the busiest foreign processes.
    """
    samples = [part.mean for part in parts]
    nodes: defaultdict[int, list[tuple[NodeSample, int]]] = defaultdict(list)
    gpus: defaultdict[int, list[tuple[GpuSample, int]]] = defaultdict(list)
    for part in parts:
        for node in part.mean.nodes:
            nodes[node.id].append((node, part.samples))
        for gpu in part.mean.gpus:
            gpus[gpu.index].append((gpu, part.samples))
    newest = samples[-1]
    mean = replace(
        newest,
        nodes=tuple(_node(nodes[node.id]) for node in newest.nodes),
        gpus=tuple(_gpu(gpus[gpu.index]) for gpu in newest.gpus),
        **{name: sum(getattr(sample, name) for sample in samples) for name in _SUMS},
        foreign=_busiest(process for sample in samples for process in sample.foreign),
        placement=(),  # it has no mean, and is of interest where it is now
    )
    return Rollup(samples=sum(part.samples for part in parts), mean=mean)


def _node(nodes: list[tuple[NodeSample, int]]) -> NodeSample:
    weights = [weight for _, weight in nodes]
    cores = zip(*(node.cores for node, _ in nodes), strict=False)
    return replace(
        nodes[-1][0],
        cores=tuple(_mean(list(zip(core, weights, strict=True))) for core in cores),
        **_means(nodes, ("memory_used_bytes", "file_cache_bytes")),
    )


def _gpu(gpus: list[tuple[GpuSample, int]]) -> GpuSample:
    reasons = tuple(sorted({reason for gpu, _ in gpus for reason in gpu.throttling}))
    return replace(gpus[-1][0], throttling=reasons, **_means(gpus, _GPU_FIELDS))


def _means(parts: Weighted, names: Iterable[str]) -> dict[str, Any]:
    return {
        name: _mean([(getattr(part, name), weight) for part, weight in parts]) for name in names
    }


def _busiest(processes: Iterable[ForeignProcess]) -> ForeignProcesses:
    """Return each process once, when it was busiest."""
    ascending = sorted(processes, key=lambda process: process.cores)
    return tuple(
        sorted(
            {process.pid: process for process in ascending}.values(),
            key=lambda process: -process.cores,
        )[:MOST_FOREIGN]
    )


def _mean(values: Weighted) -> Any:
    """Return the weighted mean of the measured values, as an integer if they are; None if nothing
    was measured.
    """
    known = [(value, weight) for value, weight in values if value is not None]
    if not known:
        return None
    mean = sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
    return round(mean) if isinstance(known[0][0], int) else mean


_FIRST_LINE_BYTES = 1 << 13


class _Resolution(Struct, frozen=True):
    """A file family of samples or roll-ups."""

    stem: str
    interval_s: float
    """Length of a roll-up; 0 for single samples."""
    cap_bytes: int
    segment_bytes: int = MEBIBYTE


RESOLUTIONS = (
    _Resolution("raw-", 0, 28 * MEBIBYTE),
    _Resolution("10s-", 10, 22 * MEBIBYTE),
    _Resolution("60s-", 60, 22 * MEBIBYTE),
    _Resolution("600s-", 600, 22 * MEBIBYTE),
)


class SampleWriter:
    """Appends the samples of one host in one attempt. Only the supervisor has one. A crash loses
    unfinished roll-ups, but no sample.
    """

    def __init__(self, run: RunDirectory, host: str) -> None:
        """Create the folder. Raises OSError."""
        folder = run.samples_dir(host)
        self._raw, *self._rollups = (_pruned(folder, resolution) for resolution in RESOLUTIONS)
        self._open: list[list[Rollup]] = [[] for _ in self._rollups]

    def append(self, sample: Sample) -> None:
        """Write one sample and the roll-ups that it completes. Raises OSError (disk full)."""
        self._raw.append(encode_line(sample))
        self._fold(Rollup(samples=1, mean=sample), 0)

    def close(self) -> None:
        """Write the unfinished roll-ups and close the files. Raises OSError."""
        for level, writer in enumerate(self._rollups):
            if self._open[level]:
                self._complete(level)
            writer.close()
        self._raw.close()

    def _fold(self, part: Rollup, level: int) -> None:
        """Add a part to the unfinished roll-up of a resolution; a completed one becomes a part of
        the next resolution.
        """
        if level == len(self._rollups):
            return
        parts, interval_s = [*self._open[level][:1], part], RESOLUTIONS[level + 1].interval_s
        if len({each.mean.time // interval_s for each in parts}) > 1:
            self._complete(level)
        self._open[level].append(part)

    def _complete(self, level: int) -> None:
        whole = roll_up(self._open[level])
        self._open[level] = []
        self._rollups[level].append(encode_line(whole))
        self._fold(whole, level + 1)


def _pruned(folder: Path, resolution: _Resolution) -> SegmentWriter:
    """Return a writer of the segments of one resolution that drops the oldest above its limit."""

    def prune() -> None:
        paths = list(segments(folder, resolution.stem).values())
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            # Leaves room for the next segment.
            if total <= resolution.cap_bytes - resolution.segment_bytes:
                return
            total -= path.stat().st_size
            path.unlink()

    writer = SegmentWriter(
        folder, resolution.stem, limit_bytes=resolution.segment_bytes, on_closed=prune
    )
    prune()
    return writer


class SampleReader:
    """Follows the samples of one host. For one thread."""

    def __init__(self, run: RunDirectory, host: str) -> None:
        self._folder = run.samples_dir(host)
        self._starts: dict[Path, float] = {}
        self._known: dict[Path, tuple[array[int], array[float]]] = {}
        """By segment, where its known lines end, after 0, and of which times they are."""
        self._number = 0
        self._offset = 0

    def poll(self) -> tuple[Sample, ...]:
        """Return the samples since the last poll; at first those of the newest segment. Older ones
        come from ``history``.
        """
        found: list[Sample] = []
        paths = segments(self._folder, RESOLUTIONS[0].stem)
        if not self._number or self._number not in paths:
            self._number, self._offset = max(paths, default=0), 0
        for number, path in paths.items():
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._offset = number, 0
            lines, self._offset = read_lines(path, self._offset, MEBIBYTE)
            found += [sample for line in lines if (sample := decode_sample(line)) is not None]
            if sum(map(len, lines)) >= MEBIBYTE // 2:
                break
        return tuple(found)

    def history(self, first: float, last: float, rows: int) -> Iterator[Rollup]:
        """Yield roll-ups between two times, oldest first. They are read on the way: thousands would
        take a lot of memory.

        They come from the coarsest resolution with enough rows. Times that it does not cover come
        from coarser resolutions (too old) or finer ones (too new). A single sample becomes a
        roll-up of one.

        Args:
            first: Begin of the range in Unix seconds, inclusive.
            last: End of the range in Unix seconds, inclusive.
            rows: Approximate number of roll-ups wanted.
        """
        wanted_s = (last - first) / max(1, rows)
        level = max(0, bisect_right(RESOLUTIONS, wanted_s, key=attrgetter("interval_s")) - 1)
        parts: list[tuple[_Resolution, float]] = []
        until = last
        for resolution in RESOLUTIONS[level:]:
            parts.insert(0, (resolution, until))
            oldest = next(self._rows(resolution, first, until), None)
            until = until if oldest is None else oldest.mean.time - oldest.mean.interval_s
        parts += [(resolution, last) for resolution in reversed(RESOLUTIONS[:level])]
        since = first
        for resolution, until in parts:
            for row in self._rows(resolution, since, until):
                yield row
                since = math.nextafter(row.mean.time, math.inf)

    def _rows(self, resolution: _Resolution, first: float, last: float) -> Iterator[Rollup]:
        paths = list(segments(self._folder, resolution.stem).values())
        starts = [self._start(resolution, path) for path in paths]
        for path, start, next_start in zip(paths, starts, [*starts[1:], math.inf], strict=False):
            set_back = (
                next_start < start
            )  # the clock, so that the next one's begin says nothing about this one's end
            if start <= last and (next_start > first or set_back):
                yield from self._rows_of(resolution, path, first, last)

    def _rows_of(
        self, resolution: _Resolution, path: Path, first: float, last: float
    ) -> Iterator[Rollup]:
        """Yield the rows of a segment between two times: all lines are decoded when it is read
        first, then only from the first to the last of those.
        """
        ends, times = self._known.setdefault(path, (array("q", [0]), array("d")))
        known = ends[-1]
        within = [at for at, time in enumerate(times) if first <= time <= last]
        if within:
            for line in read_span(path, ends[within[0]], ends[within[-1] + 1]):
                row = _as_rollup(resolution, line)
                if row is not None and first <= row.mean.time <= last:
                    yield row
        for line in read_span(path, known, 2 * resolution.segment_bytes):
            row = _as_rollup(resolution, line)
            known += len(line) + 1
            if known > ends[-1]:  # two readers may go through a segment at once
                ends.append(known)
                times.append(math.nan if row is None else row.mean.time)
            if row is not None and first <= row.mean.time <= last:
                yield row

    def _start(self, resolution: _Resolution, path: Path) -> float:
        """Return the time of a segment's first row; infinity if it has none yet. Lines before it
        may be damaged, as by a full disk.
        """
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


def _as_rollup(resolution: _Resolution, line: bytes) -> Rollup | None:
    if resolution.interval_s:
        return decode_rollup(line)
    sample = decode_sample(line)
    return None if sample is None else Rollup(samples=1, mean=sample)
