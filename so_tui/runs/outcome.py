"""Why runs end, as codes that do not depend on the wording beside them.

The supervisor writes one into ``state.json``. A failure that the trainer reported keeps the trainer's code, which may also be that of a
problem with the input (``Problem.code``) or one of a newer version.
"""

from __future__ import annotations

from enum import StrEnum


class OutcomeCode(StrEnum):
    """How a run ended, and why."""

    FINISHED = "finished"
    STOPPED = "stopped"
    OUT_OF_GPU_MEMORY = "gpu-out-of-memory"
    OUT_OF_HOST_MEMORY = "host-out-of-memory"
    """An allocation failed."""
    KILLED_FOR_MEMORY = "killed-for-memory"
    """The kernel's out-of-memory killer ended a process."""
    DISK_FULL = "disk-full"
    NON_FINITE = "not-finite"
    """A loss or a gradient was not finite."""
    ADAM_WORKER_LOST = "adam-worker-lost"
    ADAM_TIMEOUT = "adam-timeout"
    """The Adam worker made no progress for too long."""
    RANK_LOST = "rank-lost"
    """A signal ended a rank."""
    LAUNCHER_LOST = "launcher-lost"
    RUNNER_LOST = "runner-lost"
    """The process that starts DeepSpeed's launcher."""
    UNEXPECTED = "unexpected"
    """A process ended with an error that has no code of its own."""
    ERROR = "error"
    """An error of so-tui or its engine that has no code of its own; its message says what to do."""
    MODULE_MISSING = "module-missing"
    NUMACTL_FAILED = "numactl-failed"
    PORT_IN_USE = "port-in-use"
    GPU_IN_USE = "gpu-in-use"
    HOST_DIFFERS = "host-differs"
    """The host is not the one that the launch was planned for."""
    NOT_STARTED = "not-started"
    """The processes could not be started for another reason."""
    STOP_OVERDUE = "stop-overdue"
    """A requested stop took longer than its grace time."""
    UNOBSERVED = "unobserved"
    """Everything was gone when a supervisor looked, without the trainer's end record."""
    OUT_OF_TIME = "out-of-time"
    """The scheduler ended the job at its time limit."""
    PREEMPTED = "preempted"
    """The scheduler ended the job in favour of another."""
    NODE_FAILED = "node-failed"
    NODE_LOST = "node-lost"
    """The supervisor of another node of the run gave no sign of life."""
    SLOW_NETWORK = "slow-network"
    """NCCL fell back to TCP sockets between nodes, where the site has a faster network."""
    JOB_CANCELLED = "job-cancelled"
    """Somebody took the job out of the scheduler's queue, or ended it."""
    JOB_FAILED = "job-failed"
    """The job ended before its supervisor could record why."""
    JOB_FORGOTTEN = "job-forgotten"
    """The scheduler does not know the job any more, and the run directory does not say how it ended."""
