"""The peak host memory of a run, from the kernel's high-water mark of each process, which catches peaks of any length.

``VmHWM`` is a process's largest resident size, private and shared memory together. A plain sum would count shared memory twice: the
optimizer states that a rank and its Adam worker both map, and the libraries that all processes map. Therefore the private part of each
process is summed, shared memory counts once for each rank (the largest mapping of one of its processes), and files count once for all.
A plain sum would also add peaks of different times, such as weights that pass through a rank before its states exist. Therefore a mark
counts only if it has risen since the last sample; otherwise the current size counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from so_tui.runs.records import Process

_FIELDS = {b"VmHWM", b"VmRSS", b"RssFile", b"RssShmem"}


class Mark(NamedTuple):
    """Bytes of one process: the largest resident size so far, the current one, and its parts that are file pages and shared memory."""

    highest: int
    resident: int
    files: int
    shared: int


class HighWater:
    """Tracks the processes of one run. Not thread-safe."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], Mark] = {}
        self._highest: int | None = None

    def read(self, processes: Iterable[Process], root: Path = Path("/")) -> int | None:
        """Return the peak so far in bytes. None until the kernel has reported the memory of a process."""
        marks: dict[tuple[int, int], Mark] = {}
        since: list[tuple[Process, Mark]] = []
        for process in processes:
            key = (process.pid, process.start_time)
            if (now := read_mark(root, process.pid)) is not None:
                before = self._marks.get(key)
                marks[key] = (
                    now._replace(highest=max(now.highest, before.highest)) if before else now
                )
                since.append((process, since_last(before, now)))
        self._marks = marks
        if since:
            self._highest = max(self._highest or 0, together(since))
        return self._highest


def since_last(before: Mark | None, now: Mark) -> Mark:
    """Return the largest sizes of a process since the last sample, as far as the kernel reports them."""
    if before is None:
        return now._replace(resident=now.highest)
    if (
        now.highest <= before.highest
    ):  # the kernel's counters are approximate, so a mark may even decrease a little
        return now
    return Mark(
        now.highest, now.highest, max(before.files, now.files), max(before.shared, now.shared)
    )


def together(marks: Iterable[tuple[Process, Mark]]) -> int:
    """Return the bytes that these processes occupy together, with nothing counted twice."""
    private, files = 0, 0
    shared: dict[int | None, int] = {}
    for process, mark in marks:
        private += max(0, mark.resident - mark.files - mark.shared)
        files = max(files, mark.files)
        shared[process.rank] = max(shared.get(process.rank, 0), mark.shared)
    return private + files + sum(shared.values())


def read_mark(root: Path, pid: int) -> Mark | None:
    """Read /proc/PID/status. Return None for a process that has ended, or if the kernel does not report its memory."""
    try:
        lines = (root / f"proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return None
    sizes = {
        name: 1024 * int(value.split()[0])
        for name, _, value in (line.partition(b":") for line in lines)
        if name in _FIELDS
    }
    return (
        Mark(sizes[b"VmHWM"], sizes[b"VmRSS"], sizes[b"RssFile"], sizes[b"RssShmem"])
        if len(sizes) == len(_FIELDS)
        else None
    )
