"""The processes of a run, found in /proc and identified by (pid, start time), so that a reused pid is never mistaken for one of ours."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from so_tui.machine.memory import pss_bytes
from so_tui.runs.records import Process

Role = Literal["supervisor", "runner", "launcher", "rank", "adam", "other"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_YOUNG_TICKS = 5 * _TICKS_PER_S
"""A process younger than this may still change its command line (fork, numactl, exec): its role is looked at again."""


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says."""

    state: str
    parent: int
    cpu_ticks: int
    start_time: int
    wait_status: int
    """Of a zombie, as wait(2) encodes it; 0 where the kernel does not show it to us."""

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
    return Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_time=int(fields[19]),
        wait_status=int(fields[49]),
    )


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
        self._living: dict[int, Process] = {process.pid: process for process in known}
        self._gone: list[Process] = []
        self._exit_codes: dict[int, int] = {}
        self._stats: dict[int, Stat] = {}
        self._seen: set[int] = set()
        self._settled: set[int] = set(self._living)
        self._counted_ticks: dict[int, int] = {}

    @property
    def alive(self) -> tuple[Process, ...]:
        """Those that lived at the last look, oldest first."""
        return tuple(sorted(self._living.values(), key=lambda process: (process.start_time, process.pid)))

    @property
    def gone(self) -> tuple[Process, ...]:
        """Those that have ended, in the order in which that was noticed."""
        return tuple(self._gone)

    def exit_code(self, process: Process) -> int | None:
        """How an ended process ended (below 0: by that signal). None where its parent was faster than we to collect it."""
        return self._exit_codes.get(process.pid)

    def look(self, *, thorough: bool = False) -> None:
        """Find new processes, notice those that ended, reap orphans. ``thorough`` examines every process of the host again."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (names, not paths, once a second)
        self._refresh()
        for pid in sorted(present if thorough else present - self._seen):
            self._examine(pid)
        self._seen = present

    def wait_for_loss(self, timeout_s: float) -> None:
        """Return when a runner, launcher or rank ends, or after the time: who died first is seen before it takes the others along."""
        poll = select.poll()
        with contextlib.ExitStack() as descriptors:
            for process in self._living.values():
                if process.role in ("runner", "launcher", "rank"):
                    try:
                        descriptor = os.pidfd_open(process.pid)
                    except ProcessLookupError:
                        return
                    descriptors.callback(os.close, descriptor)
                    poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1000)

    def cpu_s(self) -> float:
        """CPU seconds that the run's processes have used between the last two calls (as of the last look)."""
        ticks = {pid: stat.cpu_ticks for pid, stat in self._stats.items()}
        spent = sum(max(0, count - self._counted_ticks.get(pid, count)) for pid, count in ticks.items())
        self._counted_ticks = ticks
        return spent / _TICKS_PER_S

    def memory_bytes(self) -> int | None:
        """Proportional set size of all living processes: shared memory counted once. None when the kernel does not tell."""
        sizes = [size for pid in self._living if (size := pss_bytes(pid)) is not None]
        return sum(sizes) if sizes else None

    def signal(self, signum: signal.Signals) -> None:
        """Signal every living process of the run."""
        for process in self.alive:
            send(process, signum)

    def _refresh(self) -> None:
        """Read the known processes again; what has ended moves to ``gone``."""
        for pid, process in list(self._living.items()):
            stat = read_stat(pid)
            if stat is not None and stat.start_time == process.start_time and stat.alive:
                self._stats[pid] = stat
                if pid not in self._settled or _age_ticks(stat) < _YOUNG_TICKS:
                    self._describe(pid, stat)
                continue
            if stat is not None and stat.start_time == process.start_time:
                self._note_zombie(process, stat)
            self._gone.append(self._living.pop(pid))
            self._stats.pop(pid, None)
            self._settled.discard(pid)

    def _note_zombie(self, process: Process, stat: Stat) -> None:
        if stat.wait_status:
            self._exit_codes[process.pid] = os.waitstatus_to_exitcode(stat.wait_status)
        if stat.parent == self._supervisor_pid and process.role != "runner":
            # An orphan that came to us as its subreaper. The runner is left to whoever started it and wants its exit code.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)

    def _examine(self, pid: int) -> None:
        stat = read_stat(pid)
        if stat is None or not stat.alive or pid == self._supervisor_pid or pid in self._living:
            return
        if stat.parent == self._supervisor_pid or stat.parent in self._living or self._marker in _environ(pid):
            self._describe(pid, stat)
            self._stats[pid] = stat

    def _describe(self, pid: int, stat: Stat) -> None:
        """Once more after it stopped being young, however long ago the look before was: on a busy host that may be many seconds."""
        if _age_ticks(stat) >= _YOUNG_TICKS:
            self._settled.add(pid)
        parent = self._living.get(stat.parent)
        role = role_of(_command(pid), parent.role if parent else None)
        self._living[pid] = Process(pid=pid, start_time=stat.start_time, role=role, rank=_rank(_environ(pid)))


def role_of(command: tuple[str, ...], parent: Role | None) -> Role:
    """What a process of the run is, by its command line and its parent's role (None where the parent is not of the run).

    Between fork and exec a child has its parent's command line: a child of the launcher is never the launcher.
    """
    if "deepspeed.launcher.runner" in command and parent is None:
        return "runner"
    if "deepspeed.launcher.launch" in command and parent in (None, "runner"):
        return "launcher"
    if parent in (None, "launcher") and any(argument.startswith("--local_rank") for argument in command):
        return "rank"
    # Our engine's worker is a script of its own; DeepSpeed's is a spawned Python.
    if parent == "rank" and any(argument == "--multiprocessing-fork" or argument.endswith("/offload/worker.py") for argument in command):
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


def _age_ticks(stat: Stat) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S - stat.start_time
