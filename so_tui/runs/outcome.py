"""Why runs end, as codes that the trainer, the supervisor and readers share. The words beside a code are made where it is reported."""

from __future__ import annotations

from enum import StrEnum


class OutcomeCode(StrEnum):
    """How a run ended, and why."""

    FINISHED = "finished"
    STOPPED = "stopped"
    OUT_OF_GPU_MEMORY = "out-of-gpu-memory"
    OUT_OF_HOST_MEMORY = "out-of-host-memory"
    """An allocation failed."""
    KILLED_FOR_MEMORY = "killed-for-memory"
    """The kernel's out-of-memory killer ended a process."""
    DISK_FULL = "disk-full"
    NON_FINITE = "non-finite"
    """A loss or a gradient was not finite."""
    BAD_INPUT = "bad-input"
    """The data, the model or a setting, found wrong after the start."""
    ADAM_WORKER_LOST = "adam-worker-lost"
    ADAM_TIMEOUT = "adam-timeout"
    """The Adam worker made no progress for too long."""
    RANK_LOST = "rank-lost"
    """A signal ended a rank."""
    LAUNCHER_LOST = "launcher-lost"
    RUNNER_LOST = "runner-lost"
    """The process that starts DeepSpeed's launcher."""
    FAILED = "failed"
    """A process ended with an error that has no code of its own."""
    MODULE_MISSING = "module-missing"
    NUMACTL_FAILED = "numactl-failed"
    PORT_IN_USE = "port-in-use"
    GPU_IN_USE = "gpu-in-use"
    NODE_DIFFERS = "node-differs"
    """The node is not the one that the launch was planned for."""
    NOT_STARTED = "not-started"
    """The processes could not be started for another reason."""
    STOP_OVERDUE = "stop-overdue"
    """A requested stop took longer than its grace time."""
    UNOBSERVED = "unobserved"
    """Everything was gone when a supervisor looked, without the trainer's end record."""


def outcome_code(text: str, default: OutcomeCode = OutcomeCode.FAILED) -> OutcomeCode:
    """Return the code that a record holds, or ``default`` for an empty one or one of a newer version."""
    try:
        return OutcomeCode(text)
    except ValueError:
        return default
