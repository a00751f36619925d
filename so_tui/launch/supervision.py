"""The main function of the supervisor's process: check that it may act for an attempt, take the lock, and supervise."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable

from so_tui.launch import admission
from so_tui.launch.attempt_files import read_launch
from so_tui.launch.nodes import ALONE, Nodes
from so_tui.launch.processes import become_subreaper
from so_tui.launch.supervisor import Supervisor
from so_tui.runs.directory import RunDirectory
from so_tui.runs.ended import ended_state
from so_tui.runs.host import host_of, sees_processes_of, this_host
from so_tui.runs.leftovers import remove_leftovers
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.run_lock import run_lock
from so_tui.runs.state import read_state
from so_tui.trust.sharing import umask_of


def supervise(
    run: RunDirectory,
    attempt: int,
    token: str | None = None,
    nodes: Nodes = ALONE,
    ended: Callable[[], None] = lambda: None,
) -> int:
    """Start an attempt, or attach to one whose supervisor has died, and watch it to its end. Return the run's exit code.

    Return 0 immediately if the run has another supervisor. At the end the run is free to be continued before the user's commands that tell
    of it are waited for.

    Args:
        run: A run of this user.
        attempt: The number of the attempt.
        token: The starter's token. Without one nothing is started: the supervisor only attaches to living processes of the attempt.
        nodes: The nodes of the run, of which this is the first.
        ended: Called once the run is free, before those commands are waited for.

    Raises:
        InputError, Refused: This may not be done here (see ``admission``).
        OSError: The run directory cannot be written.
    """
    admission.refuse_unknown_attempt(run, attempt)
    os.umask(umask_of(run.path))
    assume_dead = token is not None and read_launch(run, attempt, socket.gethostname()).assume_dead
    with contextlib.ExitStack() as last:
        with run_lock(run, assume_dead=assume_dead) as lock:
            if lock is None:
                return 0
            state = read_state(run)
            if state.attempt == attempt and state.state in FINAL_STATES:
                return state.exit_code or 0
            if token is None:
                admission.refuse_attaching(run, attempt, state)
            else:
                admission.refuse_start(run, attempt, state, token)
                state = _concluded(run, state, assume_dead=assume_dead)
            supervisor = Supervisor(run, attempt, state, lock, nodes)
            last.callback(supervisor.finish)  # also where the lock cannot be given back
            become_subreaper()
            code = supervisor.watch()
        ended()
    return code


def _concluded(run: RunDirectory, before: RunState, *, assume_dead: bool) -> RunState:
    """Return the final state of the previous attempt, computed now if it ended without a supervisor. Raises InputError if it still runs."""
    if before.state in FINAL_STATES or not before.host:
        return before
    state = ended_state(run, assume_dead=assume_dead)
    if sees_processes_of(this_host(), host_of(state)):
        try:
            remove_leftovers(state.processes)
        except OSError as error:
            print(f"shared memory of attempt {state.attempt}: {error}", file=sys.stderr, flush=True)
    return state
