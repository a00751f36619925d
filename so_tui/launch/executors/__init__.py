"""Where a run's supervisor is started: on this machine, or through a scheduler's queue.

An executor starts the supervisor of an attempt whose files are written. From then on the run directory says what happens; only what it
cannot say, such as why a job still waits, is asked of the executor.
"""

from __future__ import annotations

import os

from so_tui.launch.executor_types import Executor
from so_tui.runs.directory import RunDirectory
from so_tui.spec import RunSpec


def executor_of(spec: RunSpec) -> Executor:
    """Return the executor of the place that a spec names."""
    if spec.slurm.partition:
        from so_tui.launch.executors.slurm.executor import SlurmExecutor

        return SlurmExecutor()
    from so_tui.launch.executors.local import LocalExecutor

    return LocalExecutor()


def executor_of_attempt(run: RunDirectory, attempt: int) -> Executor:
    """Return the executor that an attempt was given to; of a folder that may not be read, this machine's, which decides nothing."""
    if os.path.lexists(
        run.submission_path(attempt)
    ):  # unlike Path.exists, False where the folder belongs to another user
        from so_tui.launch.executors.slurm.executor import SlurmExecutor

        return SlurmExecutor()
    from so_tui.launch.executors.local import LocalExecutor

    return LocalExecutor()
