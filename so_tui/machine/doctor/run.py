"""Checks that depend on a plan: what this run needs of the machine, and what its settings cost here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from so_tui.machine.doctor.finding import Finding, Look, gib
from so_tui.machine.memory import available_bytes
from so_tui.units import disk_size

_LITTLE_DISK_BYTES = 10_000_000_000


def fits(look: Look) -> Iterator[Finding]:
    if look.plan and not look.plan.fits:
        why = [reason for reason in look.plan.reason_texts if reason not in look.plan.remedy_texts]
        yield Finding(
            severity="blocks",
            title="The plan does not fit this machine",
            evidence="; ".join(why),
            cost="`so-tui run` refuses it.",
            remedy="; or ".join(look.plan.remedy_texts) or f"`so-tui plan {look.plan.spec.name}` shows the arithmetic.",
        )


def memory_now(look: Look) -> Iterator[Finding]:
    """Whether what the plan counts on is free now; a plan goes by what the machine has. Not asked of memory that grows on demand."""
    if not look.plan or not look.tree or any("grow on demand" in note for note in look.machine.notes):
        return
    needed, free = sum(look.plan.host_bytes_per_node.values()), available_bytes(look.tree)
    if look.plan.fits and free is not None and free < needed:
        yield Finding(
            severity="warning",
            title="Other processes hold memory that this run needs",
            evidence=f"available {gib(free)} (/proc/meminfo, cgroup); the run needs {gib(needed)}",
            cost="The kernel ends a process when memory runs out, mostly this run.",
            remedy="End what is not needed (`ps aux --sort -rss | head`), or lower `offload.ratio`.",
        )


def disk(look: Look) -> Iterator[Finding]:
    """Room for checkpoints: what the plan takes at once, or something at all."""
    if look.checkpoints is None:
        return
    folder = _existing(look.checkpoints)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    needed = look.plan.disk_peak_bytes if look.plan else 0
    if needed > free:
        yield Finding(
            severity="blocks",
            title="No room for the checkpoints of this run",
            evidence=f"{folder}: {disk_size(free)} free; the run needs {disk_size(needed)}",
            cost="Training would stop at the first checkpoint that does not fit.",
            remedy="Free space, set `checkpoint.folder` to another disk, or lower `checkpoint.keep`.",
        )
    elif look.plan is None and free < _LITTLE_DISK_BYTES:
        yield Finding(
            severity="warning",
            title="Little room for checkpoints",
            evidence=f"{folder}: {disk_size(free)} free",
            cost="A checkpoint takes 12 bytes a parameter, 96 GB for 8 B parameters; an export 2 more.",
            remedy="Give `--runs-dir`, or set `checkpoint.folder` to a larger disk.",
        )


def deepspeeds_engine(look: Look) -> Iterator[Finding]:
    """Traps of DeepSpeed's own SuperOffload, which ours does not have."""
    if not look.plan or look.plan.mode != "superoffload" or look.plan.spec.offload.engine != "deepspeed":
        return
    remedy = 'Set `offload.engine = "so-tui"`'
    clipping = look.plan.spec.train.gradient_clipping
    if clipping > 0:
        yield Finding(
            severity="warning",
            title="Gradient clipping stops the overlap of DeepSpeed's SuperOffload",
            evidence=f"train.gradient_clipping = {clipping:g}, offload.engine = deepspeed",
            cost="No sub-group is stepped during backward: 4B at ratio 0.9 on one H200 took 6.1 s a step with clipping, 4.7 s without.",
            remedy=f"{remedy}, which clips exactly and overlaps; or `train.gradient_clipping = 0`.",
        )
    per_rank = len(look.machine.allowed_cpus) // max(1, look.plan.spec.ranks)
    if int((1 - look.plan.spec.offload.cpu_adam_cores_fraction) * per_rank) == 0:
        yield Finding(
            severity="warning",
            title="DeepSpeed's SuperOffload leaves the training process no core of its own",
            evidence=f"{per_rank} cores a rank, offload.cpu_adam_cores_fraction = {look.plan.spec.offload.cpu_adam_cores_fraction:g}",
            cost="Its share rounds down to none, and both processes run on all cores.",
            remedy=f"{remedy}, or lower the fraction so that it leaves at least one core of {per_rank}.",
        )
    exclusive = [gpu for gpu in look.nvidia if (gpu.compute_mode or "").startswith("Exclusive")]
    if exclusive:
        yield Finding(
            severity="blocks",
            title="DeepSpeed's Adam worker needs a GPU that takes two processes",
            evidence=f"GPU {exclusive[0].index}: compute mode {exclusive[0].compute_mode} (NVML)",
            cost="The worker cannot open the GPU, and the first step waits for it until the time limit.",
            remedy=f"{remedy}, whose worker never touches the GPU; or as root `nvidia-smi -c DEFAULT`.",
        )
    settings = look.environment.get("PYTORCH_ALLOC_CONF", "") + look.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in settings:
        yield Finding(
            severity="warning",
            title="expandable_segments with DeepSpeed's SuperOffload",
            evidence=f"environment: {settings}",
            cost="GPU memory cannot be handed to another process then; older releases do that.",
            remedy=f"{remedy}, or take the setting out of the environment.",
        )


def job_time(look: Look) -> Iterator[Finding]:
    """Whether a Slurm job lasts as long as the run. Slurm 22.05 and newer say when the job ends."""
    end = look.environment.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        return
    left_s = int(end) - look.now
    evidence = f"SLURM_JOB_END_TIME: {_duration(left_s)} left"
    steps, step_s = (look.plan.spec.train.steps, look.plan.step_s) if look.plan else (0, None)
    saves = bool(look.plan and look.plan.spec.checkpoint.every_steps)
    if steps and step_s and steps * step_s > left_s:
        yield Finding(
            severity="warning",
            title="The job ends before the run does",
            evidence=f"{evidence}; {steps} steps of {step_s:.2f} s (predicted) take {_duration(steps * step_s)}",
            cost="What was not saved when the job ends is lost."
            if not saves
            else "The run ends early, and goes on from its last checkpoint.",
            remedy="Ask for more time (`--time`), or set `checkpoint.every_steps` and go on later with `so-tui resume`.",
        )
    elif left_s < 600:
        yield Finding(
            severity="warning",
            title="This job ends soon",
            evidence=evidence,
            cost="A run that starts now is cut off.",
            remedy="Start it in a new job.",
        )


def _existing(folder: Path) -> Path:
    path = folder.expanduser().absolute()
    return next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))


def _duration(seconds: float) -> str:
    minutes = max(0, int(seconds)) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


CHECKS = (fits, memory_now, disk, deepspeeds_engine, job_time)
