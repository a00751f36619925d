"""Check what a run needs from this machine, and what its settings cost here.

Codes: plan-does-not-fit, memory-in-use, no-room-for-checkpoints, little-room-for-checkpoints,
checkpoints-in-memory, clipping-stops-overlap, no-main-core, gpu-allows-one-process,
expandable-segments, job-too-short, job-ends-soon.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from so_tui.doctor.checks import CheckContext, Findings, finding
from so_tui.machine.host import available_bytes
from so_tui.machine.system_files import SystemFiles
from so_tui.spec.check import exists
from so_tui.trust.text import printable_line, so_tui_command
from so_tui.units import disk_size, duration, memory_size

_LITTLE_DISK_BYTES = 10_000_000_000
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are host memory."""
_LARGE_BYTES = 1 << 30
"""A process with less memory is not named."""
_JOB_ENDS_SOON_S = 600


def _check_memory(context: CheckContext) -> Findings:
    """Find a plan that does not fit, or other processes that hold memory it counts on. Memory that
    grows on demand cannot be checked.
    """
    if not context.plan:
        return
    if not context.plan.fits:
        arithmetic = f"`{so_tui_command('plan', context.plan.spec.name)}` shows the arithmetic."
        yield finding(
            "plan-does-not-fit",
            "; ".join(context.plan.cause_texts),
            remedy="; or ".join(context.plan.remedy_texts) or arithmetic,
        )
    elif not context.machine.memory_grows:
        needed, free = context.host_bytes_needed, available_bytes(context.files)
        if free is not None and free < needed:
            yield finding(
                "memory-in-use",
                f"available {memory_size(free)} (/proc/meminfo, cgroup); the run needs "
                f"{memory_size(needed)}{_largest(context.files)}",
            )


def _largest(files: SystemFiles) -> str:
    """Return which processes of this host have the most memory, as the end of a sentence."""
    if not files.live:
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


def _check_checkpoints(context: CheckContext) -> Findings:
    """Check the disk of the checkpoints: for what the plan needs, or a minimum without a plan.
    Files in host memory take it from the run, and are lost when the host restarts.
    """
    if context.checkpoints is None:
        return
    import psutil

    path = context.checkpoints.expanduser().absolute()
    # the nearest one that exists and may be seen
    folder = next((parent for parent in (path, *path.parents) if exists(parent)), Path("/"))
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        needed = context.plan.least_disk_bytes if context.plan else 0
        if needed > free:
            yield finding(
                "no-room-for-checkpoints",
                f"{folder}: {disk_size(free)} free; the run needs {disk_size(needed)}",
            )
        elif context.plan is None and free < _LITTLE_DISK_BYTES:
            yield finding("little-room-for-checkpoints", f"{folder}: {disk_size(free)} free")
    folder = folder.resolve()
    mounts = {
        Path(partition.mountpoint): partition.fstype
        for partition in psutil.disk_partitions(all=True)
    }  # the last one covers
    mount = next((path for path in (folder, *folder.parents) if path in mounts), None)
    if mount is not None and mounts[mount] in _IN_MEMORY:
        yield finding("checkpoints-in-memory", f"{folder} is in {mount}, a {mounts[mount]}")


def _check_deepspeed_engine(context: CheckContext) -> Findings:
    """Find settings that slow down or break DeepSpeed's own SuperOffload, but not so-tui's
    engine.
    """
    if not context.plan or not context.uses_deepspeed_superoffload:
        return
    spec = context.plan.spec
    if (clipping := spec.train.gradient_clipping) > 0:
        yield finding(
            "clipping-stops-overlap",
            f"train.gradient_clipping = {clipping:g}, offload.engine = deepspeed",
        )
    fraction = spec.offload.cpu_adam_cores_fraction
    per_rank = len(context.machine.allowed_cpus) // max(1, spec.ranks_per_host)
    if int((1 - fraction) * per_rank) == 0:
        yield finding(
            "no-main-core",
            f"{per_rank} cores per rank, offload.cpu_adam_cores_fraction = {fraction:g}",
            per_rank=per_rank,
        )
    for gpu in context.exclusive_gpus[:1]:
        yield finding(
            "gpu-allows-one-process", f"GPU {gpu.index}: compute mode {gpu.compute_mode} (NVML)"
        )
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = "".join(context.environment.get(name, "") for name in names)
    if "expandable_segments:True" in settings:
        yield finding("expandable-segments", f"environment: {settings}")


def _check_job_time(context: CheckContext) -> Findings:
    """Check that the Slurm job outlasts the run. Slurm 22.05 and newer set the end time of the
    job.
    """
    end, plan = context.environment.get("SLURM_JOB_END_TIME", ""), context.plan
    if not end.isdigit():
        return
    left_s = max(0.0, int(end) - context.now)
    evidence = f"SLURM_JOB_END_TIME: {duration(left_s)} left"
    if plan and plan.step_s and (run_s := plan.spec.train.steps * plan.step_s) > left_s:
        yield finding(
            "job-too-short" if plan.spec.checkpoint.repeats else "job-too-short-to-save",
            f"{evidence}; {plan.spec.train.steps} steps of {plan.step_s:.2f} s (predicted) take "
            f"{duration(run_s)}",
        )
    elif left_s < _JOB_ENDS_SOON_S:
        yield finding("job-ends-soon", evidence)


CHECKS = (_check_memory, _check_checkpoints, _check_deepspeed_engine, _check_job_time)
