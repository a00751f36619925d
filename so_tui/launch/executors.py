"""Where a run's supervisor is started: on this machine, or through a scheduler's queue.

An executor starts the supervisor of an attempt whose files are written. From then on the run
directory says what happens; only what it cannot say, such as why a job still waits, is asked of the
executor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.launch.launch import Executor, JobStatus, SupervisorHandle
from so_tui.launch.supervisor.processes import OwnProcesses, markers
from so_tui.runs.directory import RunDirectory, not_own
from so_tui.runs.liveness import host_of, sees_processes_of, supervised, this_host
from so_tui.runs.records import FINAL_STATES
from so_tui.runs.state import read_state
from so_tui.spec import InputError, Problem, RunSpec
from so_tui.trust.text import quoted

if TYPE_CHECKING:
    from so_tui.plan.plan import Launch


# Supervisors as processes of this machine.


_LOG = logging.getLogger(__name__)


class _LocalExecutor:
    """Starts a supervisor on this host, in a session of its own."""

    here = True

    def start(self, run: RunDirectory, attempt: int) -> SupervisorHandle:
        """Start the supervisor detached from this program; see ``Executor.start``."""
        argv = (
            sys.executable,
            "-P",
            "-m",
            "so_tui",
            "supervise",
            str(run.path),
            "--attempt",
            str(attempt),
        )
        _LOG.info("calling %s", quoted(*argv))
        descriptor = os.open(
            supervisor_log(run, attempt),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )
        with os.fdopen(descriptor, "ab") as output:
            return subprocess.Popen(
                argv,
                env=os.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )

    def unavailable(self, launch: Launch) -> tuple[Problem, ...]:
        return ()

    def preview(self, launch: Launch) -> str:
        return ""

    def status(self, run: RunDirectory, attempt: int) -> JobStatus | None:
        return None

    def cancel(self, run: RunDirectory, attempt: int) -> bool:
        return False


def supervisor_log(run: RunDirectory, attempt: int) -> Path:
    """Return the file that receives the output of an attempt's supervisor on this host."""
    return run.attempt_dir(attempt) / f"supervisor.{socket.gethostname()}.log"


# Make sure that each live run has a supervisor. Whoever looks at runs calls this; nothing that a
# start needs is imported.


def ensure_supervised(run: RunDirectory, own_processes: OwnProcesses | None = None) -> bool:
    """Attach a new supervisor if the run's has died on this host and processes of the run still
    live. Return whether one was started.

    Only for a run of this user: what belongs to another user, or can be changed by one, is only
    read. Nothing of the run is started. Concurrent callers are safe: of several new supervisors,
    the one that gets the lock stays.

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
            _LocalExecutor().start(run, state.attempt)
            return True
    return False


def executor_of(spec: RunSpec) -> Executor:
    """Return the executor of the place that a spec names."""
    if spec.slurm.partition:
        from so_tui.launch.slurm.executor import SlurmExecutor

        return SlurmExecutor()

    return _LocalExecutor()


def executor_of_attempt(run: RunDirectory, attempt: int) -> Executor:
    """Return the executor that an attempt was given to; of a folder that may not be read, this
    machine's, which decides nothing.
    """
    if os.path.lexists(
        run.submission_path(attempt)
    ):  # unlike Path.exists, False where the folder belongs to another user
        from so_tui.launch.slurm.executor import SlurmExecutor

        return SlurmExecutor()

    return _LocalExecutor()
