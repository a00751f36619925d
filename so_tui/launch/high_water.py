"""The most host memory that a run has had, with the kernel's own high-water mark of each process, so that no peak is too short to be seen.

``VmHWM`` is the most that was resident at once, private and shared alike. Added up, it would count twice what processes share: the
optimizer states that a rank and its Adam worker both map, and the libraries that all of them map. So a process counts with its mark less
what it shares; shared memory counts once for each rank, as the most that one of its processes maps, and files once for all. It would also
add up what was never there at once: the weights that pass through a rank before its states exist. So a mark counts only when it has risen
since the last look; else a process counts with what it has now.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from so_tui.runs.records import Process

_FIELDS = {b"VmHWM", b"VmRSS", b"RssFile", b"RssShmem"}


class Mark(NamedTuple):
    """Bytes of one process: the most that was ever resident; resident now, of that pages of files, of that shared memory."""

    highest: int
    resident: int
    files: int
    shared: int


class HighWater:
    """Follows the processes of one run; for one thread."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], Mark] = {}
        self._highest: int | None = None

    def read(self, processes: Iterable[Process], root: Path = Path("/")) -> int | None:
        """The most so far, bytes. None as long as the kernel has told nothing of any process."""
        marks: dict[tuple[int, int], Mark] = {}
        since: list[tuple[Process, Mark]] = []
        for process in processes:
            key = (process.pid, process.start_time)
            if (now := read_mark(root, process.pid)) is not None:
                before = self._marks.get(key)
                marks[key] = now._replace(highest=max(now.highest, before.highest)) if before else now
                since.append((process, since_last(before, now)))
        self._marks = marks
        if since:
            self._highest = max(self._highest or 0, together(since))
        return self._highest


def since_last(before: Mark | None, now: Mark) -> Mark:
    """The most that a process had since the last look, as far as the kernel tells."""
    if before is None:
        return now._replace(resident=now.highest)
    if now.highest <= before.highest:  # the kernel's counters are not exact: a mark may even fall a little
        return now
    return Mark(now.highest, now.highest, max(before.files, now.files), max(before.shared, now.shared))


def together(marks: Iterable[tuple[Process, Mark]]) -> int:
    """What these processes need at most, with nothing counted twice."""
    private, files = 0, 0
    shared: dict[int | None, int] = {}
    for process, mark in marks:
        private += max(0, mark.resident - mark.files - mark.shared)
        files = max(files, mark.files)
        shared[process.rank] = max(shared.get(process.rank, 0), mark.shared)
    return private + files + sum(shared.values())


def read_mark(root: Path, pid: int) -> Mark | None:
    """From /proc/PID/status; None for a process that has ended, and where the kernel does not tell."""
    try:
        lines = (root / f"proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return None
    sizes = {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(b":") for line in lines) if name in _FIELDS}
    return Mark(sizes[b"VmHWM"], sizes[b"VmRSS"], sizes[b"RssFile"], sizes[b"RssShmem"]) if len(sizes) == len(_FIELDS) else None
