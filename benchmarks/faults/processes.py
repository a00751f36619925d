"""The processes of one fault, found by a mark in their environment, and what they leave on the
host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from so_tui.launch.supervisor.processes import ProcessTree
from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import Process
from so_tui.spec import InputError

MARK = "SO_TUI_FAULT"
"""In the environment of every process that a fault starts, the supervisor and the screen too."""
_SHARED_MEMORY = Path("/dev/shm")


def marked(mark: str) -> dict[int, str]:
    """Return the living processes with the mark, or one that begins with it, as their command lines
    by pid.
    """
    entry = f"{MARK}={mark}".encode()
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (names, not paths, many times a second)
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            folder = Path("/proc", name)
            if not any(
                variable.startswith(entry)
                for variable in (folder / "environ").read_bytes().split(b"\0")
            ):
                continue
            if (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                continue
            found[int(name)] = (
                (folder / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
    return found


class Roles:
    """The processes of a run by role: ``supervisor``, ``runner``, ``launcher``, ``rank0``,
    ``adam1`` ...
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._tree = ProcessTree(frozenset({f"SO_TUI_RUN={run.path}"}), supervisor_pid=-1)
        self.pids: set[int] = set()
        """All that were ever seen."""

    def scan(self) -> dict[str, Process]:
        """Return the living processes by role."""
        self._tree.scan(thorough=True)
        found = dict(self._named(self._tree.alive))
        self.pids |= {process.pid for process in self._tree.alive}
        with contextlib.suppress(InputError, OSError):
            supervisor = supervisor_of(self._run)
            if supervisor is not None:
                found["supervisor"] = supervisor
                self.pids.add(supervisor.pid)
        return found

    @staticmethod
    def _named(processes: tuple[Process, ...]) -> Iterator[tuple[str, Process]]:
        for process in processes:
            numbered = process.role in ("rank", "adam") and process.rank is not None
            yield (f"{process.role}{process.rank}" if numbered else process.role), process


def supervisor_of(run: RunDirectory) -> Process | None:
    """Return the recorded supervisor, if it lives."""
    from so_tui.runs import alive, read_state

    recorded = read_state(run).supervisor
    return recorded if recorded is not None and alive(recorded) else None


def wait_for_end_of(mark: str, limit_s: float) -> dict[int, str]:
    """Wait until no process has the mark, and return those that are left."""
    deadline = time.monotonic() + limit_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end(mark: str) -> None:
    """Kill every process with the mark."""
    deadline = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def shared_memory_of(pids: set[int]) -> tuple[str, ...]:
    """Return what processes with these pids have left in /dev/shm, and remove it."""
    left = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(_SHARED_MEMORY.iterdir()):
            if (
                pids & {int(number) for number in re.findall(r"\d+", path.name)}
                and path.stat().st_uid == os.geteuid()
            ):
                left.append(path.name)
                path.unlink(missing_ok=True)
    return tuple(left)


def held_locks(folder: Path) -> tuple[str, ...]:
    """Return the names of the files below a folder that are locked."""
    held = []
    for path in sorted(folder.rglob("*.lock")):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path.name)
    return tuple(held)
