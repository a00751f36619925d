"""Make sure that each live run has a supervisor. Whoever looks at runs calls this; nothing that a start needs is imported."""

from __future__ import annotations

import contextlib

from so_tui.launch.executors.local import LocalExecutor
from so_tui.launch.marker import markers
from so_tui.launch.processes import OwnProcesses
from so_tui.runs.directory import RunDirectory
from so_tui.runs.host import host_of, sees_processes_of, this_host
from so_tui.runs.liveness import supervised
from so_tui.runs.own import not_own
from so_tui.runs.records import FINAL_STATES
from so_tui.runs.state import read_state
from so_tui.spec import InputError


def ensure_supervised(run: RunDirectory, own_processes: OwnProcesses | None = None) -> bool:
    """Attach a new supervisor if the run's has died on this host and processes of the run still live. Return whether one was started.

    Only for a run of this user: what belongs to another user, or can be changed by one, is only read. Nothing of the run is started.
    Concurrent callers are safe: of several new supervisors, the one that gets the lock stays.

    Args:
        run: Any run.
        own_processes: Shared by calls for many runs, so that /proc is read once.
    """
    with contextlib.suppress(InputError):  # no readable state, so there is nothing to attach to
        state = read_state(run)
        if (
            state.state in FINAL_STATES
            or not sees_processes_of(this_host(), host_of(state))
            or supervised(state)
        ):
            return False
        if not_own(run, state.attempt) is not None or not (own_processes or OwnProcesses()).carry(
            markers(run, state.attempt)
        ):
            return False
        with contextlib.suppress(OSError):  # a full disk: the next call tries again
            LocalExecutor().attach(run, state.attempt)
            return True
    return False
