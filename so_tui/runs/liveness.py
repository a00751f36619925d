"""Determine whether a run is alive: by its processes on this host, by its heartbeat on other hosts.

A process is identified by pid and start time, because pids are reused.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import FINAL_STATES, Process, RunState
from so_tui.runs.state import read_state
from so_tui.runs.unobserved import concluded

STALE_S = 60.0
"""Time without a heartbeat after which a run on another host counts as lost. The supervisor writes one per second; a network file system
may delay writes of other hosts by half a minute."""

_STATE, _START_TIME = 0, 19  # indices of the fields after the command name in /proc/PID/stat


def identify(
    pid: int, role: Literal["supervisor", "runner", "launcher", "rank", "adam", "other"] = "other", rank: int | None = None
) -> Process | None:
    """Return the identity of a live process of this host; None if it has ended (a zombie has)."""
    fields = _stat(pid)
    return Process(pid=pid, start_time=int(fields[_START_TIME]), role=role, rank=rank) if fields else None


def alive(process: Process) -> bool:
    """Return whether this process still runs on this host."""
    fields = _stat(process.pid)
    return fields is not None and int(fields[_START_TIME]) == process.start_time


def living(processes: Iterable[Process]) -> tuple[Process, ...]:
    """Return the processes that still run on this host."""
    return tuple(process for process in processes if alive(process))


def supervised(state: RunState) -> bool:
    """Return whether the recorded supervisor runs on this host."""
    return state.host == socket.gethostname() and state.supervisor is not None and alive(state.supervisor)


class HeartbeatWatch:
    """Times the heartbeats of runs with the clock of this process, because clocks and file times of hosts differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, tuple[int, float]] = {}

    def unchanged_s(self, run: RunDirectory, state: RunState) -> float:
        """Return the seconds since this process saw the heartbeat change; 0 the first time."""
        now = self._clock()
        beat, since = self._seen.get(run.path, (None, now))
        if beat != state.heartbeat:
            self._seen[run.path] = (state.heartbeat, now)
            return 0.0
        return now - since


def state_with_truth(run: RunDirectory, watch: HeartbeatWatch | None = None) -> RunState:
    """Return the recorded state, corrected if all processes of the run are gone.

    Such a run ended as ``unobserved.concluded`` says.

    Args:
        run: The run.
        watch: Times the heartbeats of runs on other hosts; pass the same object on each call.

    Raises:
        InputError: If the state cannot be read.
    """
    state = read_state(run)
    if state.state in FINAL_STATES or not _gone(run, state, watch):
        return state
    state = read_state(run)  # the supervisor may have written the final state just before it ended
    if state.state in FINAL_STATES:
        return state
    return concluded(run, state)


def _gone(run: RunDirectory, state: RunState, watch: HeartbeatWatch | None) -> bool:
    if not state.host:  # no supervisor has started yet
        return False
    if state.host == socket.gethostname():
        return not supervised(state) and not living(state.processes)
    return watch is not None and watch.unchanged_s(run, state) > STALE_S


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields after the command name; None for a zombie or no process."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content.rpartition(b")")[2].split()  # the name may contain spaces and parentheses
    return None if fields[_STATE] in (b"Z", b"X") else fields
