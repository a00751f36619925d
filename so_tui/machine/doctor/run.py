"""Check what a run needs from this machine, and what its settings cost here.

Codes: plan-does-not-fit, memory-in-use, no-room-for-checkpoints, little-room-for-checkpoints,
checkpoints-in-memory, clipping-stops-overlap, no-main-core, gpu-allows-one-process,
expandable-segments, job-too-short, job-ends-soon.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from so_tui.machine.doctor.checks import CheckContext, Finding, Findings
from so_tui.machine.host import available_bytes
from so_tui.spec.check import exists
from so_tui.trust.text import printable_line, so_tui_command
from so_tui.units import disk_size, duration, memory_size

_LITTLE_DISK_BYTES = 10_000_000_000
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are host memory."""
_LARGE_BYTES = 1 << 30
"""A process with less memory is not named."""
_JOB_ENDS_SOON_S = 600


def _check_fits(context: CheckContext) -> Findings:
    if context.plan and not context.plan.fits:
        yield Finding(
            "plan-does-not-fit",
            "blocks",
            "The plan does not fit this machine",
            evidence="; ".join(context.plan.cause_texts),
            cost="`so-tui run` refuses it.",
            remedy="; or ".join(context.plan.remedy_texts)
            or f"`{so_tui_command('plan', context.plan.spec.name)}` shows the arithmetic.",
        )


def _check_memory_now(context: CheckContext) -> Findings:
    """Find other processes that hold memory the plan counts on. Memory that grows on demand cannot
    be checked.
    """
    if not context.plan or not context.files or context.machine.memory_grows:
        return
    needed, free = context.host_bytes_needed, available_bytes(context.files)
    if context.plan.fits and free is not None and free < needed:
        yield Finding(
            "memory-in-use",
            "warning",
            "Other processes hold memory that this run needs",
            evidence=(
                f"available {memory_size(free)} (/proc/meminfo, cgroup); the run needs "
                f"{memory_size(needed)}{_largest(context)}"
            ),
            cost="When memory runs out, the kernel ends a process, most likely this run.",
            remedy=(
                "End processes that you do not need (`ps aux --sort -rss | head`), or lower "
                "`offload.ratio`."
            ),
        )


def _largest(context: CheckContext) -> str:
    """Return which processes of this host have the most memory, as the end of a sentence."""
    if not context.files or not context.files.live:
        return ""
    import psutil  # only here: it would slow down the start of every command

    sizes = [
        (memory.rss, process.info["name"], process.pid)
        for process in psutil.process_iter(["memory_info", "name"])
        if (memory := process.info["memory_info"]) is not None and memory.rss >= _LARGE_BYTES
    ]
    return "".join(
        f"; {printable_line(str(name))} (process {pid}) {memory_size(size)}"
        for size, name, pid in sorted(sizes, reverse=True)[:3]
    )


def _check_disk(context: CheckContext) -> Findings:
    """Check the free disk space for checkpoints: what the plan needs, or a minimum without a
    plan.
    """
    if context.checkpoints is None:
        return
    folder = _existing_parent(context.checkpoints)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    needed = context.plan.disk_peak_bytes if context.plan else 0
    if needed > free:
        yield Finding(
            "no-room-for-checkpoints",
            "blocks",
            "Not enough disk space for the checkpoints of this run",
            evidence=f"{folder}: {disk_size(free)} free; the run needs {disk_size(needed)}",
            cost="Training would stop at the first checkpoint that does not fit.",
            remedy=(
                "Free some space, set `checkpoint.folder` to another disk, or lower "
                "`checkpoint.keep`."
            ),
        )
    elif context.plan is None and free < _LITTLE_DISK_BYTES:
        yield Finding(
            "little-room-for-checkpoints",
            "warning",
            "Little disk space for checkpoints",
            evidence=f"{folder}: {disk_size(free)} free",
            cost=(
                "A checkpoint takes 12 bytes per parameter (96 GB for 8 B parameters), an export "
                "another 2."
            ),
            remedy="Pass `--runs-dir`, or set `checkpoint.folder` to a larger disk.",
        )


def _check_checkpoints_in_memory(context: CheckContext) -> Findings:
    """Find a folder for checkpoints whose files take host memory and are lost when the host
    restarts.
    """
    if context.checkpoints is None:
        return
    import psutil

    folder = _existing_parent(context.checkpoints).resolve()
    mounts = {
        Path(partition.mountpoint): partition.fstype
        for partition in psutil.disk_partitions(all=True)
    }  # the last one covers
    mount = next((path for path in (folder, *folder.parents) if path in mounts), None)
    if mount is not None and mounts[mount] in _IN_MEMORY:
        yield Finding(
            "checkpoints-in-memory",
            "warning",
            "Checkpoints would be kept in host memory",
            evidence=f"{folder} is in {mount}, a {mounts[mount]}",
            cost=(
                "They take memory that the run needs, and are lost when the host restarts or, in "
                "many jobs, when the job ends."
            ),
            remedy="Pass `--runs-dir`, or set `checkpoint.folder` to a folder on a disk.",
        )


def _check_deepspeed_engine(context: CheckContext) -> Findings:
    """Find settings that slow down or break DeepSpeed's own SuperOffload, but not so-tui's
    engine.
    """
    if not context.plan or not context.uses_deepspeed_superoffload:
        return
    remedy = 'Set `offload.engine = "so-tui"`'
    clipping = context.plan.spec.train.gradient_clipping
    if clipping > 0:
        yield Finding(
            "clipping-stops-overlap",
            "warning",
            "Gradient clipping stops the overlap of DeepSpeed's SuperOffload",
            evidence=f"train.gradient_clipping = {clipping:g}, offload.engine = deepspeed",
            cost=(
                "No sub-group is stepped during backward: on one H200, 4B at ratio 0.9 took 6.1 s "
                "a step with clipping and 4.7 s without."
            ),
            remedy=f"{remedy}, which clips exactly and overlaps; or `train.gradient_clipping = 0`.",
        )
    fraction = context.plan.spec.offload.cpu_adam_cores_fraction
    per_rank = len(context.machine.allowed_cpus) // max(1, context.plan.spec.ranks_per_host)
    if int((1 - fraction) * per_rank) == 0:
        yield Finding(
            "no-main-core",
            "warning",
            "DeepSpeed's SuperOffload leaves no core to the training process",
            evidence=f"{per_rank} cores per rank, offload.cpu_adam_cores_fraction = {fraction:g}",
            cost=(
                "The training process's share rounds down to zero cores, so both processes run on "
                "all cores."
            ),
            remedy=(
                f"{remedy}, or lower the fraction so that it leaves at least one core of "
                f"{per_rank}."
            ),
        )
    exclusive = [
        gpu for gpu in context.nvidia_gpus if (gpu.compute_mode or "").startswith("Exclusive")
    ]
    if exclusive:
        yield Finding(
            "gpu-allows-one-process",
            "blocks",
            "DeepSpeed's Adam worker needs a GPU that accepts two processes",
            evidence=f"GPU {exclusive[0].index}: compute mode {exclusive[0].compute_mode} (NVML)",
            cost=(
                "The worker cannot open the GPU, and the first step waits for it until the time "
                "limit."
            ),
            remedy=(
                f"{remedy}, whose Adam worker does not use the GPU; or as root: `nvidia-smi -c "
                "DEFAULT`."
            ),
        )
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = "".join(context.environment.get(name, "") for name in names)
    if "expandable_segments:True" in settings:
        yield Finding(
            "expandable-segments",
            "warning",
            "expandable_segments with DeepSpeed's SuperOffload",
            evidence=f"environment: {settings}",
            cost=(
                "GPU memory cannot be shared with another process then, which older releases rely "
                "on."
            ),
            remedy=f"{remedy}, or remove the setting from the environment.",
        )


def _check_job_time(context: CheckContext) -> Findings:
    """Check that the Slurm job outlasts the run. Slurm 22.05 and newer set the end time of the
    job.
    """
    end = context.environment.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        return
    left_s = max(0.0, int(end) - context.now)
    evidence = f"SLURM_JOB_END_TIME: {duration(left_s)} left"
    steps, step_s = (
        (context.plan.spec.train.steps, context.plan.step_s) if context.plan else (0, None)
    )
    saves = bool(context.plan and context.plan.spec.checkpoint.every_steps)
    if steps and step_s and steps * step_s > left_s:
        yield Finding(
            "job-too-short",
            "warning",
            "The job ends before the run does",
            evidence=(
                f"{evidence}; {steps} steps of {step_s:.2f} s (predicted) take "
                f"{duration(steps * step_s)}"
            ),
            cost="The run ends early and can resume from its last checkpoint."
            if saves
            else "Steps since the last checkpoint are lost.",
            remedy=(
                "Request more time (`--time`), or set `checkpoint.every_steps` and continue later "
                "with `so-tui resume`."
            ),
        )
    elif left_s < _JOB_ENDS_SOON_S:
        yield Finding(
            "job-ends-soon",
            "warning",
            "This job ends soon",
            evidence=evidence,
            cost="A run that starts now will be cut off.",
            remedy="Start it in a new job.",
        )


def _existing_parent(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists and may be seen."""
    path = folder.expanduser().absolute()
    return next((parent for parent in (path, *path.parents) if exists(parent)), Path("/"))


CHECKS = (
    _check_fits,
    _check_memory_now,
    _check_disk,
    _check_checkpoints_in_memory,
    _check_deepspeed_engine,
    _check_job_time,
)
