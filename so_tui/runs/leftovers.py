"""Shared memory that ended processes of a run left in /dev/shm.

torch names it by the pid of the process that made it. A pid alone proves nothing, because pids are reused and other users and programs use
the same folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from so_tui.runs.liveness import identify
from so_tui.runs.records import Process

SHARED_MEMORY = Path("/dev/shm")

_File = tuple[int, int]
"""Device and inode. The inode alone would not do, because every file system counts its own."""

_NAMED_BY_PID = re.compile(r"(?:torch|so_tui|so-tui)_(\d+)_")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CLOCK_SLACK_S = 2.0
"""Between the clocks of processes and of files, which both are coarse."""


def remove_leftovers(
    processes: Iterable[Process], folder: Path = SHARED_MEMORY
) -> tuple[Path, ...]:
    """Remove what these processes left behind, and return it.

    Raises:
        OSError: A file cannot be removed.
    """
    found = leftovers(processes, folder)
    for path in found:
        path.unlink(missing_ok=True)
    return found


def leftovers(processes: Iterable[Process], folder: Path = SHARED_MEMORY) -> tuple[Path, ...]:
    """Return the shared memory that ended processes have left behind.

    It is a regular file of this user, named by the pid of one of these processes, made since that process started, and no process that this
    user can see has that pid or has the file open.

    Args:
        processes: Processes of a run on this host, by pid and start time.
        folder: Where shared memory is.
    """
    ended = {process.pid: process for process in processes if identify(process.pid) is None}
    candidates = {}
    for path in _entries(folder):
        named = _NAMED_BY_PID.match(path.name)
        process = ended.get(int(named[1])) if named else None
        if process is not None and (file := _own_file(path, since=_started(process))) is not None:
            candidates[file] = path
    if not candidates:
        return ()
    used = _files_in_use()
    return tuple(sorted(path for file, path in candidates.items() if file not in used))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _own_file(path: Path, *, since: float) -> _File | None:
    """Identify a regular file of this user that changed since a time; None for anything else."""
    try:
        found = path.lstat()
    except OSError:
        return None
    own = (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_ctime >= since - _CLOCK_SLACK_S
    )
    return (found.st_dev, found.st_ino) if own else None


def _started(process: Process) -> float:
    """Return when a process started, in seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.start_time / _TICKS_PER_S


def _files_in_use() -> set[_File]:
    """Identify the files that processes of this user have mapped or open. Of other users' processes the kernel tells nothing."""
    used: set[_File] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in (folder / "maps").read_bytes().splitlines():
                fields = line.split(None, 5)
                if len(fields) == 6 and fields[4] != b"0":
                    major, minor = (int(number, 16) for number in fields[3].split(b":"))
                    used.add((os.makedev(major, minor), int(fields[4])))
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found = descriptor.stat()
                    used.add((found.st_dev, found.st_ino))
    return used
