"""Determine whether a run is alive: by its processes on this host, by its heartbeat on other hosts.

A process is identified by pid and start time, because pids are reused.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from so_tui.runs.codec import decode_metric
from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import FINAL_STATES, EndRecord, Process, RunState
from so_tui.runs.segments import segments
from so_tui.runs.state import read_state
from so_tui.trust.reading import UnfitFileError, open_regular

STALE_S = 60.0
"""Time without a heartbeat after which a run on another host counts as lost. The supervisor writes one per second; a network file system
may delay writes of other hosts by half a minute."""

EXIT_CODES: dict[str, int] = {"finished": 0, "failed": 1, "stopped": 4, "lost": 1}
"""Exit code for each final state."""

_STATE, _START_TIME = 0, 19  # indices of the fields after the command name in /proc/PID/stat
_END_BYTES = 1 << 16


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

    Such a run ended as the end record of its trainer says; without one it is ``lost``.

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
    end = end_of_attempt(run, state.attempt)
    if end is not None:
        return msgspec.structs.replace(
            state,
            state=end.state,
            step=end.step,
            reason=end.reason,
            suggestion=end.suggestion,
            ended=end.time,
            exit_code=EXIT_CODES[end.state],
        )
    return msgspec.structs.replace(
        state,
        state="lost",
        reason=state.reason or f"every process of the run on {state.host} has ended, and the trainer recorded no result",
        suggestion=state.suggestion or "Read the end of its log; `so-tui resume` continues from the last checkpoint.",
        exit_code=EXIT_CODES["lost"],
    )


def end_of_attempt(run: RunDirectory, attempt: int) -> EndRecord | None:
    """Return the trainer's end record of an attempt; None if there is none. Only the end of the newest segment is read."""
    newest = next(reversed(segments(run.metrics_dir).values()), None)
    if newest is None:
        return None
    try:
        file = open_regular(newest)
    except UnfitFileError:
        return None
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        lines = file.read(_END_BYTES).split(b"\n")
    records = (decode_metric(line) for line in reversed(lines))
    return next((record for record in records if isinstance(record, EndRecord) and record.attempt == attempt), None)


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
