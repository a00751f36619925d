"""The processes of a run, found in /proc and identified by pid and start time, so that a reused pid
is never mistaken for one of ours.

Only processes of this user count. A process is found by what it carries and by its parents, never
because a file names its pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from so_tui.launch.command import (
    ALERT_MARKER,
    ATTEMPT_MARKER,
    NODE_MARKER,
    RUN_ID_MARKER,
    RUN_MARKER,
)
from so_tui.runs.directory import RunDirectory, known_id
from so_tui.runs.liveness import Stat, alive, read_stat
from so_tui.runs.records import ForeignProcess, ForeignProcesses, Process, Role

# The entries in the environment of a run's processes by which its supervisor recognises them.


def markers(
    run: RunDirectory, attempt: int | None = None, node: int | None = None
) -> frozenset[str]:
    """Return the entries that a process of the run has, all of them: its path, its id if it has
    one, and the attempt.

    A run at the same path as an earlier one has another id, and a copy of a run has another path.

    Args:
        run: The run.
        attempt: Only processes of this attempt.
        node: Only processes of this node, of a run on several.
    """
    numbers = {ATTEMPT_MARKER: attempt, NODE_MARKER: node}
    values = {RUN_MARKER: str(run.path), RUN_ID_MARKER: known_id(run)}
    values |= {name: str(number) for name, number in numbers.items() if number is not None}
    return frozenset(f"{name}={value}" for name, value in values.items() if value)


# Which processes of this host compute, whoever they belong to.


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LEAST_CORES = 0.1
"""A process that uses less does not compute."""


@dataclass
class ProcessLoads:
    """Reads how much each process computed since the reading before. It costs one small file a
    process. Not thread-safe.
    """

    _before: dict[int, Stat] = field(default_factory=dict)
    _clock: float = 0.0

    def measure(self) -> dict[int, tuple[Stat, float]]:
        """Return every living process with the cores that it kept busy: 0 for those that are new
        since the reading before.
        """
        now = time.monotonic()
        stats = {
            pid: stat
            for pid in psutil.pids()
            if (stat := read_stat(pid)) is not None and stat.alive
        }
        before, interval_s = self._before, max(now - self._clock, 1 / _TICKS_PER_S)
        self._before, self._clock = stats, now
        loads = {}
        for pid, stat in stats.items():
            then = before.get(pid, stat)
            ticks = stat.cpu_ticks - then.cpu_ticks if then.start_time == stat.start_time else 0
            loads[pid] = stat, ticks / _TICKS_PER_S / interval_s
        return loads

    def read(self, *, without: Collection[int] = ()) -> ForeignProcesses:
        """Return the processes that compute, the busiest first; none at the first reading.

        Args:
            without: Pids that are left out.
        """
        computing = [
            (cores, pid, stat)
            for pid, (stat, cores) in self.measure().items()
            if cores >= _LEAST_CORES and pid not in without
        ]
        return tuple(
            ForeignProcess(
                pid=pid, name=stat.name, cores=round(cores, 2), cpu=stat.cpu, own=_is_own(pid)
            )
            for cores, pid, stat in sorted(computing, key=lambda load: -load[0])
        )


def _is_own(pid: int) -> bool:
    """Return whether a process belongs to this user. One that changed its user, as ``sudo`` does,
    belongs to that user.
    """
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116 (as above)
    except OSError:
        return False


_YOUNG_TICKS = 5 * _TICKS_PER_S
"""A younger process may still change its command line (fork, numactl, exec), so its role is
determined again.
"""
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of what SIGTERM ended; a rank obeys it by leaving with the second."""
_LEADING: tuple[Role, ...] = ("runner", "launcher", "rank")
"""What the others follow. Each starts once in an attempt."""
_WORKER_SCRIPT = "/superoffload/worker.py"


def _send(process: Process, signum: signal.Signals) -> None:
    """Send a signal to the process if it is still the recorded one and this user's. Raises
    PermissionError if the kernel refuses.
    """
    if alive(process) and _is_own(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)


def own_environs() -> tuple[frozenset[str], ...]:
    """Return what each living process of this user carries in its environment."""
    own = (pid for pid in psutil.pids() if _is_own(pid))
    return tuple(
        _environ(pid) for pid in own if (stat := read_stat(pid)) is not None and stat.alive
    )


class Loss(NamedTuple):
    """A runner, launcher or rank that ended."""

    process: Process
    exit_code: int | None = None
    """Below 0 for a signal; None if it could not be observed."""
    unprompted: bool = False
    """It ended before the supervisor or the launcher had ended anything."""


@dataclass
class _Living:
    """A process of a run, as it was read last."""

    process: Process
    stat: Stat
    described: bool
    """Whether its role does not change any more."""


@dataclass
class ProcessTree:
    """The processes of a run: those that live, and the leading ones that have ended.

    A process of this user belongs to the run if its parent does, if its parent is the supervisor (a
    child subreaper, which inherits the run's orphans), or if its environment has the run's markers.
    A scan examines only pids that are new since the last one, so it costs one listing of /proc.
    """

    markers: frozenset[str]
    supervisor_pid: int
    gone: dict[Process, int | None] = field(default_factory=dict)
    """The runner, launcher and ranks that have ended, in the order in which that was observed, with
    their exit codes (below 0 for a signal; None if the parent collected it before we could read
    it).
    """
    _living: dict[int, _Living] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _counted_ticks: dict[int, int] = field(default_factory=dict)

    @property
    def alive(self) -> tuple[Process, ...]:
        """The processes that were alive at the last scan, oldest first."""
        processes = (entry.process for entry in self._living.values())
        return tuple(sorted(processes, key=lambda process: (process.start_time, process.pid)))

    def scan(self, *, thorough: bool = False) -> list[Process]:
        """Find new and ended processes. ``thorough`` examines every process of the host again.

        Return the runner, launcher and ranks that have ended since the last scan, the cause first.
        """
        present = set(psutil.pids())
        ended = self._refresh()
        for pid in _parents_first(present) if thorough else sorted(present - self._seen):
            self._examine(pid)
        self._seen = present
        left = {process.role for process in self.alive} - {"rank"}
        return sorted(
            (process for process in ended if process.role not in left),
            key=lambda process: _order_of_loss(process, ended[process]),
        )

    def wait_for_loss(self, timeout_s: float) -> None:
        """Return when a runner, launcher or rank ends, or after the timeout, to see which died
        first before the others follow.
        """
        poll = select.poll()
        with contextlib.ExitStack() as descriptors:
            for process in self.alive:
                if process.role in _LEADING:
                    try:
                        descriptor = os.pidfd_open(process.pid)
                    except ProcessLookupError:
                        return
                    except OSError:
                        # not permitted here (a container's system call filter): the next scan sees
                        # what ended
                        continue
                    descriptors.callback(os.close, descriptor)
                    poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1000)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the run's processes used between the last two calls (as of
        the last scan).
        """
        ticks = {pid: entry.stat.cpu_ticks for pid, entry in self._living.items()}
        spent = sum(
            max(0, count - self._counted_ticks.get(pid, count)) for pid, count in ticks.items()
        )
        self._counted_ticks = ticks
        return spent / _TICKS_PER_S

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to every living process of the run.

        Raises:
            PermissionError: The kernel refused it for one of them, after the others got it.
        """
        refused: PermissionError | None = None
        for process in self.alive:
            try:
                _send(process, signum)
            except PermissionError as error:
                refused = error
        if refused is not None:
            raise refused

    def _refresh(self) -> dict[Process, int | None]:
        """Read the known processes again, and forget those that have ended. Return the runner,
        launcher and ranks among them, which ``gone`` keeps.
        """
        ended = {}
        for pid, entry in list(self._living.items()):
            stat, process = read_stat(pid), entry.process
            if stat is not None and stat.start_time == process.start_time and stat.alive:
                entry.stat = stat
                if not entry.described:
                    self._describe(pid, stat)
                continue
            if process.role in _LEADING:
                ended[process] = _exit_code(process, stat)
            del self._living[pid]
            self._seen.discard(pid)  # another process may have it by now
        self.gone |= ended
        return ended

    def _examine(self, pid: int) -> None:
        stat = read_stat(pid)
        known = {self.supervisor_pid, *self._living}
        if (
            stat is not None
            and stat.alive
            and pid not in known
            and _is_own(pid)
            and (stat.parent in known or self.markers <= _environ(pid))
        ):
            self._describe(pid, stat)

    def _describe(self, pid: int, stat: Stat) -> None:
        """Record the role, which another program changes that a process begins. Repeated once after
        the process is no longer young, which a busy host may notice many seconds later.

        A process without a command line is loading its program. The alert command is none of ours
        as soon as it shows.
        """
        environ = _environ(pid)
        # A program that is being loaded has no environment, and a scan may come just then.
        if any(entry.startswith(f"{ALERT_MARKER}=") for entry in environ):
            self._living.pop(pid, None)
            return
        command, parent = _entries(pid, "cmdline"), self._living.get(stat.parent)
        role = _role_of(command, parent.process.role if parent else None)
        age_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S - stat.start_time
        self._living[pid] = _Living(
            Process(pid=pid, start_time=stat.start_time, role=role, rank=_rank(environ)),
            stat,
            described=any(command) and age_ticks >= _YOUNG_TICKS,
        )


def _order_of_loss(process: Process, exit_code: int | None) -> tuple[int, bool, bool]:
    """Sort what one scan found gone, the cause before its consequences.

    The launcher's death ends its ranks (parent-death signal) faster than we scan. A rank that was
    killed ends the ranks that waited for it, which leave by themselves. Once any rank has failed,
    the launcher terminates the others, which a busy host shows at the same time.
    """
    return (
        ("launcher", "runner", "rank").index(process.role),
        exit_code in _TERMINATED,
        exit_code is None or exit_code >= 0,
    )


def become_subreaper() -> None:
    """Inherit the run's orphans instead of init (prctl(2), PR_SET_CHILD_SUBREAPER), so that none is
    lost.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(36, 1, 0, 0, 0) != 0:
        print(f"not a subreaper: {os.strerror(ctypes.get_errno())}", file=sys.stderr)


def _role_of(command: tuple[str, ...], parent: Role | None) -> Role:
    """Return the role of a process by its command line and its parent's role (None if the parent is
    not part of the run).

    Between fork and exec a child has its parent's command line, so a child of the launcher is never
    the launcher.
    """
    if "deepspeed.launcher.runner" in command and parent is None:
        return "runner"
    if "deepspeed.launcher.launch" in command and parent in (None, "runner"):
        return "launcher"
    if parent in (None, "launcher") and any(
        argument.startswith("--local_rank") for argument in command
    ):
        return "rank"
    # Our engine's worker is a script; DeepSpeed's is a spawned Python process.
    if parent == "rank" and any(
        argument == "--multiprocessing-fork" or argument.endswith(_WORKER_SCRIPT)
        for argument in command
    ):
        return "adam"
    return "other"


def _parents_first(present: set[int]) -> list[int]:
    """Return pids by the start of their processes, because the role of a process follows from its
    parent's.
    """
    stats = ((pid, read_stat(pid)) for pid in present)
    return [
        pid for _, pid in sorted((stat.start_time, pid) for pid, stat in stats if stat is not None)
    ]


def _entries(pid: int, name: str) -> tuple[str, ...]:
    """Return the command line or the environment of a process; empty for another user's, and for
    one that has just ended.
    """
    try:
        content = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(content).split("\0"))


def _environ(pid: int) -> frozenset[str]:
    return frozenset(_entries(pid, "environ"))


def _exit_code(process: Process, stat: Stat | None) -> int | None:
    """Return the exit code of an ended process, by what the kernel says of its pid; None if that
    says nothing of it.
    """
    if stat is None or stat.start_time != process.start_time or not stat.wait_status:
        return None
    return os.waitstatus_to_exitcode(stat.wait_status)


def _rank(environ: frozenset[str]) -> int | None:
    values = (entry.removeprefix("RANK=") for entry in environ if entry.startswith("RANK="))
    return next((int(value) for value in values if value.isdecimal()), None)
