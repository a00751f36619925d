"""The processes of a run, found in /proc and identified by (pid, start time), so that a reused pid is never mistaken for one of ours."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from so_tui.runs.records import Process

Role = Literal["supervisor", "runner", "launcher", "rank", "adam", "other"]

_YOUNG_TICKS = 5 * os.sysconf("SC_CLK_TCK")
"""A process younger than this may still change its command line (fork, numactl, exec): its role is looked at again."""


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says."""

    state: str
    parent: int
    cpu_ticks: int
    start_time: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def read_stat(pid: int) -> Stat | None:
    """The process's stat; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name stands in parentheses and may contain anything; the numbers begin after the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(state=fields[0].decode(), parent=int(fields[1]), cpu_ticks=int(fields[11]) + int(fields[12]), start_time=int(fields[19]))


def this_process(role: Role = "supervisor") -> Process:
    """The calling process as a record."""
    stat = read_stat(os.getpid())
    assert stat is not None
    return Process(pid=os.getpid(), start_time=stat.start_time, role=role)


def send(process: Process, signum: signal.Signals) -> None:
    """Signal the process if it is still the recorded one."""
    stat = read_stat(process.pid)
    if stat is not None and stat.start_time == process.start_time and stat.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)


class ProcessTree:
    """Every process of a run, while it lives and after.

    Ours is a process whose parent is ours, whose parent is the supervisor (a child subreaper: orphans of the run come to it), or whose
    environment carries the run's marker. Only pids that are new since the last look are examined, so a look costs one listing of /proc.
    """

    def __init__(self, marker: str, supervisor_pid: int, known: tuple[Process, ...] = ()) -> None:
        self._marker = marker.encode()
        self._supervisor_pid = supervisor_pid
        self._known: dict[int, Process] = {process.pid: process for process in known}
        self._alive: dict[int, Stat] = {}
        self._seen: set[int] = set()
        self._cpu_ticks: dict[int, int] = {}
        self._spent_ticks = 0

    @property
    def alive(self) -> tuple[Process, ...]:
        """Those that lived at the last look, oldest first."""
        return tuple(sorted((self._known[pid] for pid in self._alive), key=lambda process: (process.start_time, process.pid)))

    @property
    def gone(self) -> tuple[Process, ...]:
        """Those that were ours and have ended."""
        return tuple(process for pid, process in self._known.items() if pid not in self._alive)

    @property
    def ever(self) -> tuple[Process, ...]:
        return tuple(self._known.values())

    def look(self, *, thorough: bool = False) -> None:
        """Find new processes, notice those that ended, reap orphans. ``thorough`` examines every process of the host again."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (names, not paths, once a second)
        for pid in sorted(present if thorough else present - self._seen):
            self._examine(pid)
        self._seen = present
        self._alive = {pid: stat for pid, process in self._known.items() if (stat := self._stat_if_alive(process)) is not None}
        for pid in self._alive:
            self._classify_again(pid)

    def cpu_s(self) -> float:
        """CPU seconds that the run's processes have used since the previous call (from the last look's figures)."""
        spent = 0
        for pid, stat in self._alive.items():
            spent += max(0, stat.cpu_ticks - self._cpu_ticks.get(pid, stat.cpu_ticks))
            self._cpu_ticks[pid] = stat.cpu_ticks
        return spent / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int | None:
        """Proportional set size of all living processes: shared memory counted once. None when the kernel does not tell."""
        sizes = [size for pid in self._alive if (size := _pss_bytes(pid)) is not None]
        return sum(sizes) if sizes else None

    def signal(self, signum: signal.Signals) -> None:
        """Signal every living process of the run."""
        for process in self.alive:
            send(process, signum)

    def _examine(self, pid: int) -> None:
        stat = read_stat(pid)
        if stat is None or pid == self._supervisor_pid or self._is_known(pid, stat):
            return
        if stat.parent == self._supervisor_pid or stat.parent in self._alive or self._marker in _environ(pid):
            self._known[pid] = self._described(pid, stat)
            if stat.alive:
                self._alive[pid] = stat  # so that its children, which have higher pids, are recognised in the same look

    def _is_known(self, pid: int, stat: Stat) -> bool:
        known = self._known.get(pid)
        return known is not None and known.start_time == stat.start_time

    def _described(self, pid: int, stat: Stat) -> Process:
        parent = self._known.get(stat.parent)
        command, environ = _command(pid), _environ(pid)
        return Process(pid=pid, start_time=stat.start_time, role=role_of(command, parent.role if parent else None), rank=_rank(environ))

    def _classify_again(self, pid: int) -> None:
        stat = self._alive[pid]
        if _uptime_ticks() - stat.start_time < _YOUNG_TICKS:
            self._known[pid] = self._described(pid, stat)

    def _stat_if_alive(self, process: Process) -> Stat | None:
        stat = read_stat(process.pid)
        if stat is None or stat.start_time != process.start_time:
            return None
        if stat.alive:
            return stat
        if stat.parent == self._supervisor_pid and process.role != "runner":
            # An orphan that came to us as its subreaper. The runner is left to whoever started it, who wants its exit code.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        return None


def role_of(command: tuple[str, ...], parent: Role | None) -> Role:
    """What a process of the run is, by its command line and its parent's role."""
    if "deepspeed.launcher.runner" in command:
        return "runner"
    if "deepspeed.launcher.launch" in command:
        return "launcher"
    if parent != "rank" and any(argument.startswith("--local_rank") for argument in command):
        return "rank"
    if parent == "rank" and "--multiprocessing-fork" in command:
        return "adam"
    return "other"


def _command(pid: int) -> tuple[str, ...]:
    try:
        return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return ()


def _environ(pid: int) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()  # another user's process, or one that has just ended


def _rank(environ: frozenset[bytes]) -> int | None:
    values = (entry.removeprefix(b"RANK=") for entry in environ if entry.startswith(b"RANK="))
    return next((int(value) for value in values if value.isdigit()), None)


def _uptime_ticks() -> int:
    import time

    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _pss_bytes(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None
