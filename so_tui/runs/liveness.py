"""The truth about a run that recorded itself as alive: processes where they can be seen, the heartbeat where they cannot.

Processes are told apart by (pid, start time), never by a pid alone.
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

STALE_S = 60.0
"""Without a heartbeat for so long, a run on another host counts as lost. The supervisor's beat is one second; a network file system may
hold back another's writes for half a minute."""

EXIT_CODES: dict[str, int] = {"finished": 0, "failed": 1, "stopped": 4, "lost": 1}
"""The contract's exit code of a run that ended so."""

_STATE, _START_TIME = 0, 19  # of the fields behind the command's name in /proc/PID/stat
_END_BYTES = 1 << 16


def identify(
    pid: int, role: Literal["supervisor", "runner", "launcher", "rank", "adam", "other"] = "other", rank: int | None = None
) -> Process | None:
    """The identity of a living process of this host; None when there is none (a zombie does not live)."""
    fields = _stat(pid)
    return Process(pid=pid, start_time=int(fields[_START_TIME]), role=role, rank=rank) if fields else None


def alive(process: Process) -> bool:
    """Whether this very process still runs on this host."""
    fields = _stat(process.pid)
    return fields is not None and int(fields[_START_TIME]) == process.start_time


def living(processes: Iterable[Process]) -> tuple[Process, ...]:
    return tuple(process for process in processes if alive(process))


def supervised(state: RunState) -> bool:
    """Whether the recorded supervisor lives on this host."""
    return state.host == socket.gethostname() and state.supervisor is not None and alive(state.supervisor)


class HeartbeatWatch:
    """Times the heartbeats of runs with this process's own clock: clocks of hosts differ, file times too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, tuple[int, float]] = {}

    def silent_s(self, run: RunDirectory, state: RunState) -> float:
        """Seconds since this process saw the heartbeat change (0 at first sight)."""
        now = self._clock()
        beat, since = self._seen.get(run.path, (None, now))
        if beat != state.heartbeat:
            self._seen[run.path] = (state.heartbeat, now)
            return 0.0
        return now - since


def state_with_truth(run: RunDirectory, watch: HeartbeatWatch | None = None) -> RunState:
    """The recorded state, corrected: a run whose processes are all gone ended as its trainer's end record says, or is ``lost``.

    On another host than the run's, only a heartbeat that stays away shows that (pass the same ``watch`` each time). Raises InputError
    when there is no readable state.
    """
    state = read_state(run)
    if state.state in FINAL_STATES or not _gone(run, state, watch):
        return state
    state = read_state(run)  # the supervisor writes the end before it goes: look again after it was seen gone
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
        reason=state.reason or f"every process of the run on {state.host} is gone, and the trainer left no word of how it ended",
        suggestion=state.suggestion or "See the end of its log; `so-tui resume` goes on from the last checkpoint.",
        exit_code=EXIT_CODES["lost"],
    )


def end_of_attempt(run: RunDirectory, attempt: int) -> EndRecord | None:
    """The trainer's end record of this attempt; None when it wrote none. Reads the end of the newest segment only."""
    newest = next(reversed(segments(run.metrics_dir).values()), None)
    if newest is None:
        return None
    with newest.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        lines = file.read().split(b"\n")
    records = (decode_metric(line) for line in reversed(lines))
    return next((record for record in records if isinstance(record, EndRecord) and record.attempt == attempt), None)


def _gone(run: RunDirectory, state: RunState, watch: HeartbeatWatch | None) -> bool:
    if not state.host:  # no supervisor has taken it yet
        return False
    if state.host == socket.gethostname():
        return not supervised(state) and not living(state.processes)
    return watch is not None and watch.silent_s(run, state) > STALE_S


def _stat(pid: int) -> list[bytes] | None:
    """The fields behind the command's name; None for no process or a zombie."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content.rpartition(b")")[2].split()  # the name may hold spaces and brackets
    return None if fields[_STATE] in (b"Z", b"X") else fields
