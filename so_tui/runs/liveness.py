"""Determine whether a run is alive: by its processes on this host, by its heartbeat on other hosts.

A process is identified by pid and start time, because pids are reused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from so_tui.runs.directory import RunDirectory
from so_tui.runs.metrics import records_at_end
from so_tui.runs.records import (
    FINAL_STATES,
    CheckpointRecord,
    EndRecord,
    OutcomeCode,
    Process,
    Role,
    RunState,
)
from so_tui.runs.state import read_state
from so_tui.spec.errors import reject
from so_tui.trust.files import distrust_of_folder

# Which host this is, exactly enough to know whether its processes can be seen from here.


class HostIdentity(Struct, frozen=True):
    """A host as a process sees it."""

    name: str
    boot_id: str = ""
    """Changes with each start of the kernel; empty if unknown."""
    pid_namespace: int = 0
    """Containers have one of their own, in which pids mean other processes; 0 if unknown."""


@cache
def this_host() -> HostIdentity:
    """Return the identity of the host that this process runs on."""
    boot_id, namespace = "", 0
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        # A link that only the kernel can follow.
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    return HostIdentity(socket.gethostname(), boot_id, namespace)


def host_of(state: RunState) -> HostIdentity:
    """Return the host that a state was written on. States of older versions have only its name."""
    return HostIdentity(state.host, state.boot_id, state.pid_namespace)


def _same_boot(host: HostIdentity) -> bool:
    """Return whether this is that host, and has not restarted since. What is unknown counts as
    equal.
    """
    here = this_host()
    return here.name == host.name and (
        not here.boot_id or not host.boot_id or here.boot_id == host.boot_id
    )


def sees_processes_of(host: HostIdentity) -> bool:
    """Return whether pids on a host mean the same processes here."""
    namespaces = {this_host().pid_namespace, host.pid_namespace}
    return _same_boot(host) and (0 in namespaces or len(namespaces) == 1)


# What the kernel says about a process of this host, from /proc/PID/stat.


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that are used here; see proc_pid_stat(5)."""

    name: str
    """Chosen by its owner, at most 15 bytes."""
    state: str
    parent: int
    cpu_ticks: int
    start_time: int
    """Clock ticks after the host started. With the pid it identifies a process, because pids are
    reused.
    """
    cpu: int | None
    """The CPU that it ran on last."""
    wait_status: int
    """Of a zombie, as wait(2) encodes it; 0 if the kernel does not show it to us."""

    @property
    def alive(self) -> bool:
        """Whether it still runs. A zombie does not."""
        return self.state not in "ZX"


def read_stat(pid: int) -> Stat | None:
    """Return the stat of a process; None if there is no such process, or the kernel hides it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return _parse_stat(text)


def _parse_stat(text: bytes) -> Stat:
    """Return what a stat file says. Kernels and sandboxes that imitate one may leave out its last
    fields.
    """
    # The command name is in parentheses and may contain anything, so the numbers begin after the
    # last parenthesis.
    end = text.rindex(b")")
    fields = text[end + 2 :].split()
    return Stat(
        name=text[text.index(b"(") + 1 : end].decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_time=int(fields[19]),
        cpu=int(fields[36]) if len(fields) > 36 else None,
        wait_status=int(fields[49]) if len(fields) > 49 else 0,
    )


# How an attempt ended that nobody supervised at its end, from what its processes left: readers
# compute it, and nothing is started.
#
# Problem codes: unreadable-records: The records, which say how it ended, cannot be read.


EXIT_CODES: dict[str, int] = {"finished": 0, "failed": 1, "stopped": 4, "lost": 1}
"""Exit code for each final state."""

END_CODES: dict[str, OutcomeCode] = {
    "finished": OutcomeCode.FINISHED,
    "stopped": OutcomeCode.STOPPED,
    "failed": OutcomeCode.UNEXPECTED,
}
"""Code for each end that the trainer records without one."""


def concluded(run: RunDirectory, state: RunState) -> RunState:
    """Return the final state of an attempt whose processes are gone: as its end record says,
    without one ``lost``. Raises InputError.
    """
    try:
        found = records_at_end(run)
    except OSError as error:
        raise reject(
            "unreadable-records",
            "run",
            str(run.metrics_dir),
            f"its records cannot be read: {error.strerror or error}",
            "Check the folder's rights, and that it is mounted.",
        ) from error
    records = [record for record in reversed(found) if record.attempt == state.attempt]
    saved = next((record for record in records if isinstance(record, CheckpointRecord)), None)
    if saved is not None:
        state = replace(state, saved_step=saved.step, saved_at=saved.time)
    end = next((record for record in records if isinstance(record, EndRecord)), None)
    if end is not None:
        return replace(
            state,
            state=end.state,
            step=end.step,
            code=end.code or END_CODES[end.state],
            reason=end.reason,
            suggestion=end.suggestion,
            ended=end.time,
            exit_code=EXIT_CODES[end.state],
        )
    times = [record.time for record in records]
    with contextlib.suppress(OSError):
        times.append(run.state_path.stat().st_mtime)
    return replace(
        state,
        state="lost",
        code=OutcomeCode.UNOBSERVED,
        reason=state.reason
        or (
            f"every process of the run on {state.host} has ended, and the trainer recorded no "
            "result"
        ),
        suggestion=state.suggestion
        or "Read the end of its log; `so-tui resume` continues from the last checkpoint.",
        ended=max(times, default=None),
        exit_code=EXIT_CODES["lost"],
    )


STALE_S = 60.0
"""Time without a heartbeat after which a run on another host counts as lost, by the clock of the
process that watches it. The supervisor writes one per second; a network file system may delay
writes of other hosts by half a minute.
"""
FRESH_S = 15.0
"""Age of a heartbeat up to which it is believed before it was seen to move."""
OLD_S = 300.0
"""The same by the age of the file alone: clocks of hosts may differ by minutes."""


def identify(pid: int, role: Role = "other") -> Process | None:
    """Return the identity of a live process of this host; None if it has ended (a zombie has)."""
    stat = read_stat(pid)
    return (
        Process(pid=pid, start_time=stat.start_time, role=role)
        if stat is not None and stat.alive
        else None
    )


def alive(process: Process) -> bool:
    """Return whether this process still runs on this host."""
    found = identify(process.pid)
    return found is not None and found.start_time == process.start_time


def suspended(state: RunState) -> Process | None:
    """Return a process of the run on this host that was stopped, as by SIGSTOP, its supervisor
    first; None if all run.
    """
    if sees_processes_of(host_of(state)):
        for process in filter(None, (state.supervisor, *state.processes)):
            stat = read_stat(process.pid)
            if stat and stat.start_time == process.start_time and stat.state in "Tt":
                return process
    return None


def supervised(state: RunState) -> bool:
    """Return whether the recorded supervisor runs on this host."""
    return (
        sees_processes_of(host_of(state))
        and state.supervisor is not None
        and alive(state.supervisor)
    )


class HeartbeatWatch:
    """Times the heartbeats of runs with the clock of this process, because clocks and file times of
    hosts differ.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, tuple[int, float, bool]] = {}
        """The last heartbeat, when it was first seen, and whether any other was seen before."""

    def unchanged_s(self, run: RunDirectory, state: RunState) -> float:
        """Return the seconds since this process saw the heartbeat change; 0 the first time."""
        now, beat = self._clock(), state.heartbeat
        before, since, moved = self._seen.get(run.path, (beat, now, False))
        if beat != before:
            since, moved = now, True
        self._seen[run.path] = beat, since, moved
        return now - since

    def moved(self, run: RunDirectory) -> bool:
        """Return whether this process ever saw the heartbeat change."""
        *_, moved = self._seen.get(run.path, (0, 0.0, False))
        return moved


class Sighting(Struct, frozen=True, kw_only=True):
    """What can be seen of a run's processes from here."""

    alive: bool | None
    """Whether they still run; None where they cannot be seen from here, and the heartbeat is
    neither fresh nor old enough, or dated in the future.
    """
    by_processes: bool
    """The processes themselves were examined; otherwise only the heartbeat."""
    restarted: bool = False
    """A host of that name has started again since."""
    heartbeat_age_s: float | None = None
    """Seconds since the last sign of life, as far as it was needed; below 0 if the clock that dated
    it is ahead.
    """


def sighting(run: RunDirectory, state: RunState, watch: HeartbeatWatch | None = None) -> Sighting:
    """Return what can be seen of a run that has not ended; arguments as for ``state_with_truth``.

    On the run's own host its processes decide. From another host, another PID namespace, or where
    the kernel hides processes of other users, the heartbeat does; so it does after a restart of the
    host, because two machines may have the same name.
    """
    there = host_of(state)
    if not state.host:  # no supervisor has started yet, or its starter died
        age_s = _age_s(run)
        gone = state.state == "created" and age_s is not None and age_s > OLD_S
        return Sighting(alive=not gone, by_processes=True)
    if sees_processes_of(there):
        living = supervised(state) or any(map(alive, state.processes))
        if living or not _hidden_from_us(run):
            return Sighting(alive=living, by_processes=True)
    restarted = this_host().name == there.name and not _same_boot(there)
    found, age_s = _by_heartbeat(run, state, watch)
    return Sighting(alive=found, by_processes=False, restarted=restarted, heartbeat_age_s=age_s)


def unconfirmed(run: RunDirectory, state: RunState, watch: HeartbeatWatch) -> bool:
    """Return whether nothing but an old heartbeat says that a run is live: ``watch`` will see it
    move, or the run will count as lost.
    """
    if state.state in FINAL_STATES or state.state == "queued" or watch.moved(run):
        return False
    seen = sighting(run, state, watch)
    return not seen.by_processes and (
        seen.heartbeat_age_s is None or abs(seen.heartbeat_age_s) > FRESH_S
    )


def state_with_truth(
    run: RunDirectory, watch: HeartbeatWatch | None = None, recorded: RunState | None = None
) -> RunState:
    """Return the recorded state, corrected if all processes of the run are gone.

    Such a run ended as ``unobserved.concluded`` says.

    Args:
        run: The run.
        watch: Times the heartbeats of runs on other hosts; pass the same object on each call.
        recorded: The recorded state, if it has just been read.

    Raises:
        InputError: If the state cannot be read.
    """
    state = recorded or read_state(run)
    if state.state in FINAL_STATES or sighting(run, state, watch).alive is not False:
        return state
    state = read_state(run)  # the supervisor may have written the final state just before it ended
    if state.state in FINAL_STATES:
        return state
    return concluded(run, state)


def _by_heartbeat(
    run: RunDirectory, state: RunState, watch: HeartbeatWatch | None
) -> tuple[bool | None, float | None]:
    """Return what the heartbeat says of the processes, and the seconds since the last sign of life;
    None for what is unknown.
    """
    if watch is not None:
        unchanged_s = watch.unchanged_s(run, state)
        if unchanged_s > STALE_S:
            return False, unchanged_s
        if watch.moved(run):
            return True, unchanged_s
    age_s = _age_s(run)
    if age_s is None:
        return None, None
    if abs(age_s) <= STALE_S:
        return True, age_s
    # Who watches will see within a minute, so the clocks of two machines need not be compared.
    comparable = watch is None or distrust_of_folder(run.path) is None
    return (False if age_s > OLD_S and comparable else None), age_s


def _age_s(run: RunDirectory) -> float | None:
    """Return the seconds since the state was written; None if its file system is away."""
    try:
        return time.time() - run.state_path.stat().st_mtime
    except OSError:
        return None


def _hidden_from_us(run: RunDirectory) -> bool:
    """Return whether the run's processes may exist although we do not see them: /proc may show only
    those of one's own (hidepid).
    """
    try:
        own = run.state_path.stat().st_uid == os.geteuid()
    except OSError:
        own = False
    return not own and not os.access("/proc/1/stat", os.R_OK)
