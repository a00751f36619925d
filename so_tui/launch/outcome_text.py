"""Outcomes in words: the reason and the suggestion of ``state.json``."""

from __future__ import annotations

import signal
from typing import NamedTuple

from msgspec import Struct

from so_tui.launch.outcome import Outcome
from so_tui.machine.software import INSTALL_TRAINING
from so_tui.runs.outcome import OutcomeCode
from so_tui.trust.printable import so_tui_command
from so_tui.units import thousands

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_WHO_KILLS = "so-tui did not do this. Look for the kernel's out-of-memory killer (`dmesg`), a scheduler or another person"
_OTHER_SETTINGS_HELP: frozenset[str] = frozenset(
    {
        OutcomeCode.OUT_OF_GPU_MEMORY,
        OutcomeCode.OUT_OF_HOST_MEMORY,
        OutcomeCode.KILLED_FOR_MEMORY,
        OutcomeCode.NON_FINITE,
        OutcomeCode.ADAM_TIMEOUT,
        OutcomeCode.ADAM_WORKER_LOST,
        # Codes of the engine.
        "host-memory",
        "host-memory-limit",
        "needs-cuda",
        # Codes of the trainer's problems whose remedy is another value of a key that may change during a run.
        "attention-head-size",
        "attention-needs-gpu",
        "attention-not-deterministic",
        "attention-other-gpu",
        "attention-package-missing",
        "attention-without-sinks",
        "attention-without-softcap",
        "data-columns-mismatch",
        "data-columns-unknown",
        "data-nothing-trained",
        "data-prompts-too-long",
        "data-row-template",
        "data-source-empty",
        "data-source-missing",
        "data-split-empty",
        "data-split-unknown",
        "data-subset-of-file",
        "data-subset-unknown",
        "data-weight-too-large",
        "documents-exceed-positions",
        "held-out-out-of-range",
        "model-without-routers",
        "run-length-missing",
    }
)
"""After these a resume needs changed settings. Any other failure (access to a model, a disk, a package) is fixed outside the settings."""
_ADVICE: dict[str, str] = {
    OutcomeCode.DISK_FULL: "Free space on the disk of the run and its checkpoints, and in /dev/shm (in Docker: --shm-size)",
    OutcomeCode.ADAM_TIMEOUT: "Give CPU Adam more cores (offload.cpu_adam_cores_fraction), and see `so-tui doctor`",
    OutcomeCode.MODULE_MISSING: INSTALL_TRAINING,
    OutcomeCode.NUMACTL_FAILED: "Check with `so-tui doctor` whether numactl works here. Containers may forbid set_mempolicy",
    OutcomeCode.STOP_OVERDUE: "Allow more time with `so-tui stop --grace SECONDS`",
    OutcomeCode.GPU_IN_USE: "Wait for that run, stop it, or choose other GPUs with gpus = [...]",
    OutcomeCode.HOST_DIFFERS: "Start it again here, so that it is planned for this host",
    OutcomeCode.NOT_STARTED: "Fix this, then start the run again",
    OutcomeCode.OUT_OF_TIME: "Ask for more time (slurm.time_limit), or save more often (checkpoint.every_minutes)",
    OutcomeCode.SLOW_NETWORK: "Load the site's plugin for NCCL, with setup or step_options of the site profile; lines with NET in the "
    "log say what NCCL looked for. Without `network` in the profile, sockets are accepted",
    OutcomeCode.JOB_FAILED: "The end of its log in the attempt's folder (slurm.*.log) says why",
}
_REASONS: dict[str, str] = {
    OutcomeCode.OUT_OF_GPU_MEMORY: "out of GPU memory: {detail}",
    OutcomeCode.DISK_FULL: "the disk of the run directory or of /dev/shm is full",
    OutcomeCode.ADAM_TIMEOUT: "CPU Adam did not answer in time",
    OutcomeCode.PORT_IN_USE: "another program took the rendezvous port",
    OutcomeCode.MODULE_MISSING: "the Python module {detail} is not installed",
    OutcomeCode.NUMACTL_FAILED: "numactl failed: {detail}",
    OutcomeCode.KILLED_FOR_MEMORY: "the kernel killed {count} process{es} on this host for lack of memory",
    OutcomeCode.STOP_OVERDUE: "the trainer did not stop within {limit_s:,.0f} s and was killed; "
    "nothing was saved after the last checkpoint",
    OutcomeCode.UNOBSERVED: "its processes ended while no supervisor was running (a reboot?), and the trainer left no end record",
    OutcomeCode.GPU_IN_USE: "could not be started: {detail}",
    OutcomeCode.HOST_DIFFERS: "could not be started: {detail}",
    OutcomeCode.NOT_STARTED: "could not be started: {detail}",
    OutcomeCode.OUT_OF_TIME: "job {job} reached its time limit before a checkpoint was saved",
    OutcomeCode.PREEMPTED: "job {job} was preempted: Slurm gave its node to another job",
    OutcomeCode.NODE_FAILED: "the node of job {job} failed ({node})",
    OutcomeCode.NODE_LOST: "its supervisor gave no sign of life: the node, its network or the shared file system failed",
    OutcomeCode.SLOW_NETWORK: "NCCL uses TCP sockets between the nodes instead of {detail}, which would be many times slower",
    OutcomeCode.JOB_CANCELLED: "job {job} was cancelled",
    OutcomeCode.JOB_FAILED: "job {job} ended before the run started: {detail}",
    OutcomeCode.JOB_FORGOTTEN: "Slurm does not know its job any more, and nothing says how it ended",
}
_LOST = frozenset({OutcomeCode.RANK_LOST, OutcomeCode.LAUNCHER_LOST, OutcomeCode.RUNNER_LOST})


class RunFacts(Struct, frozen=True, kw_only=True):
    """What the advice refers to."""

    name: str
    saved_step: int | None = None
    """The step of the last checkpoint, or None."""
    less_gpu_memory: str = "Lower train.micro_batch or data.sequence_length, or raise offload.ratio; `so-tui plan` shows what each costs"
    """Which changes would need less GPU memory, by the plan."""
    less_host_memory: str = "Lower offload.ratio, use more GPUs, or free host memory; `so-tui plan` shows what is needed"


class OutcomeText(NamedTuple):
    """The reason of an outcome, and what to do next."""

    reason: str
    suggestion: str


def outcome_text(outcome: Outcome, run: RunFacts) -> OutcomeText:
    """Put an outcome into words. The suggestion for a failure ends with how to resume, and with changed settings where it needs them."""
    if outcome.state in ("finished", "stopped"):
        return OutcomeText(
            outcome.reported or (_reason(outcome) if outcome.job else ""), outcome.advice
        )
    advice = outcome.advice if outcome.reported else _advice(outcome, run)
    again = _resuming(run, " --set KEY=VALUE" if outcome.code in _OTHER_SETTINGS_HELP else "")
    return OutcomeText(_reason(outcome), f"{advice.rstrip('.')}. {again}" if advice else again)


def _reason(outcome: Outcome) -> str:
    reason = _reason_there(outcome)
    return f"on node {outcome.node}: {reason}" if outcome.node and not outcome.job else reason


def _reason_there(outcome: Outcome) -> str:
    """Return the reason as the host says it on which it happened."""
    if outcome.reported:
        return (
            outcome.reported if outcome.rank is None else f"rank {outcome.rank}: {outcome.reported}"
        )
    if outcome.code in _LOST:
        if outcome.signal is None:
            return f"{_who(outcome)} (pid {outcome.pid}) disappeared during training: it was killed"
        return f"{_who(outcome)} was ended by {_signal_name(outcome.signal)}"
    if pattern := _REASONS.get(outcome.code):
        plural = "" if outcome.count == 1 else "es"
        return pattern.format(
            detail=outcome.detail,
            count=outcome.count,
            es=plural,
            limit_s=outcome.limit_s,
            job=outcome.job,
            node=outcome.node,
        )
    ending = (
        f"with exit code {outcome.exit_code}"
        if outcome.exit_code
        else "without the trainer's end record"
    )
    return outcome.detail or f"{_who(outcome)} ended {ending}"


def _advice(outcome: Outcome, run: RunFacts) -> str:
    match outcome.code:
        case OutcomeCode.OUT_OF_GPU_MEMORY:
            return run.less_gpu_memory
        case OutcomeCode.KILLED_FOR_MEMORY | OutcomeCode.OUT_OF_HOST_MEMORY:
            return run.less_host_memory
        case OutcomeCode.RANK_LOST | OutcomeCode.LAUNCHER_LOST | OutcomeCode.RUNNER_LOST:
            return (
                "Native code crashed. See the last lines of the log"
                if outcome.signal in _CRASHES
                else _WHO_KILLS
            )
        case OutcomeCode.UNEXPECTED:
            return f"See the log: `{so_tui_command('logs', run.name)}`"
    return _ADVICE.get(outcome.code, "")


def _who(outcome: Outcome) -> str:
    if outcome.who == "rank":
        return "a rank" if outcome.rank is None else f"rank {outcome.rank}"
    return "DeepSpeed's launcher" if outcome.who == "launcher" else "DeepSpeed's runner"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _resuming(run: RunFacts, settings: str) -> str:
    command = f"`{so_tui_command('resume', run.name)}{settings}`"
    if run.saved_step is None:
        return f"Nothing had been saved: {command} starts from the beginning"
    return f"{command} continues from step {thousands(run.saved_step)}"
