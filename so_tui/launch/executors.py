"""Where a run's supervisor is started: on this machine, or through a scheduler's queue.

An executor starts the supervisor of an attempt whose files are written. From then on the run
directory says what happens; only what it cannot say, such as why a job still waits, is asked of the
executor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from so_tui.launch.launch import Executor
from so_tui.launch.supervisor.processes import markers, own_environs
from so_tui.runs.directory import RunDirectory, own_run
from so_tui.runs.liveness import host_of, sees_processes_of, supervised
from so_tui.runs.records import FINAL_STATES
from so_tui.runs.state import read_state
from so_tui.spec import InputError, Refused, RunSpec

Environs = Callable[[], tuple[frozenset[str], ...]]


# Make sure that each live run has a supervisor. Whoever looks at runs calls this; nothing that a
# start needs is imported.


def ensure_supervised(run: RunDirectory, environs: Environs = own_environs) -> bool:
    """Attach a new supervisor if the run's has died on this host and processes of the run still
    live. Return whether one was started.

    Only for a run of this user: what belongs to another user, or can be changed by one, is only
    read. Nothing of the run is started. Concurrent callers are safe: of several new supervisors,
    the one that gets the lock stays.

    Args:
        run: Any run.
        environs: ``own_environs``, cached by a caller that asks for many runs.
    """
    with contextlib.suppress(InputError):  # no readable state, so there is nothing to attach to
        state = read_state(run)
        if (
            state.state in FINAL_STATES
            or not sees_processes_of(host_of(state))
            or supervised(state)
            or not any(markers(run, state.attempt) <= environ for environ in environs())
        ):
            return False
        # An OSError is a full disk: the next call tries again.
        with contextlib.suppress(OSError, Refused), own_run(run) as own:
            Executor().start(own, state.attempt)
            return True
    return False


def executor_of(spec: RunSpec) -> Executor:
    """Return the executor of the place that a spec names."""
    return _executor(bool(spec.slurm.partition))


def executor_of_attempt(run: RunDirectory, attempt: int) -> Executor:
    """Return the executor that an attempt was given to; of a folder that may not be read, this
    machine's, which decides nothing.
    """
    # Unlike Path.exists, False where the folder belongs to another user.
    return _executor(os.path.lexists(run.submission_path(attempt)))


def _executor(in_queue: bool) -> Executor:
    if in_queue:
        from so_tui.launch.slurm.executor import SlurmExecutor

        return SlurmExecutor()
    return Executor()
