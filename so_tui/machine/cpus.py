"""Name of the processor, and the CPUs that this process may use."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from so_tui.machine import cgroup
from so_tui.machine.cpulist import cpu_ranges, cpus_or_empty
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import NumaNode

_ARM_IMPLEMENTER = 0x41
_NEOVERSE_V2_PART = 0xD4F
GRACE = "NVIDIA Grace (Neoverse V2)"


class Processor(NamedTuple):
    name: str
    architecture: str


def online_cpus(files: SystemFiles) -> tuple[int, ...]:
    """Return all CPUs of the machine that are online."""
    return (
        cpus_or_empty(files.text("/sys/devices/system/cpu/online"))
        or _cpuinfo_processors(files)
        or (tuple(range(os.cpu_count() or 1)) if files.live else ())
    )


def allowed_cpus(files: SystemFiles, online: tuple[int, ...]) -> tuple[int, ...]:
    """Return the CPUs this process may run on: its affinity within its cpuset. For copied system files, all online CPUs."""
    if not files.live:
        return online
    allowed = set(os.sched_getaffinity(0))
    return tuple(sorted(allowed & (cgroup.cpuset(files) or allowed)))


def smt_siblings(files: SystemFiles, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each physical core with several threads; empty if no core has, or if it is not reported."""
    cores = set()
    for cpu in online:
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        cores.add(
            cpus_or_empty(
                files.text(f"{folder}/core_cpus_list")
                or files.text(f"{folder}/thread_siblings_list")
            )
        )
    return tuple(sorted(core for core in cores if len(core) > 1))


def allowed_memory_nodes(files: SystemFiles) -> tuple[int, ...] | None:
    """Return the NUMA nodes that this process may allocate on; None if unknown, and for copied system files."""
    found = re.search(
        r"^Mems_allowed_list:\s*(\S+)", files.text("/proc/self/status") or "", re.MULTILINE
    )
    return cpus_or_empty(found.group(1)) if files.live and found else None


def memory_allowance_notes(
    nodes: tuple[NumaNode, ...], allowed: tuple[int, ...] | None
) -> tuple[str, ...]:
    """Return a note if a cpuset excludes the memory of some CPU nodes."""
    with_memory = [node.id for node in nodes if node.kind == "cpu" and node.memory_total_bytes > 0]
    if allowed is None or set(with_memory) <= set(allowed):
        return ()
    mine = cpu_ranges(set(with_memory) & set(allowed)) or "none"
    return (
        f"This process may allocate on CPU nodes {mine} of {cpu_ranges(with_memory)} (Mems_allowed): plans count only these.",
    )


def allowance_notes(
    files: SystemFiles, online: tuple[int, ...], allowed: tuple[int, ...]
) -> tuple[str, ...]:
    """Return notes on why this process may use only some of the CPUs."""
    if not files.live:
        return ()
    notes = []
    if set(allowed) < set(online):
        notes.append(
            f"This process may use {len(allowed)} of {len(online)} CPUs ({cpu_ranges(allowed)})."
        )
    quota = cgroup.cpu_quota(files)
    if quota is not None and quota < len(allowed):
        notes.append(
            f"The control group limits CPU time to {quota:g} of {len(allowed)} allowed CPUs: bound threads will be throttled."
        )
    if job := os.environ.get("SLURM_JOB_ID"):
        given = [
            f"{name}={os.environ[name]}"
            for name in ("SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND_LIST", "SLURM_JOB_GPUS")
            if name in os.environ
        ]
        notes.append(" ".join([f"Inside Slurm job {job}.", *given]))
    return tuple(notes)


def processor(files: SystemFiles) -> Processor:
    """Return name and architecture from /proc/cpuinfo or the identification register in sysfs; from py-cpuinfo (slow) as a last resort."""
    text = files.text("/proc/cpuinfo") or ""
    fields = _cpuinfo_fields(text)
    arm = _arm_core(fields, files)
    architecture = (
        os.uname().machine
        if files.live
        else "aarch64"
        if arm
        else "x86_64"
        if "vendor_id" in fields
        else "unknown"
    )
    return Processor(
        name=_grace(arm)
        or fields.get("model name")
        or _slow_name(files)
        or _arm_name(arm)
        or "unknown",
        architecture=architecture,
    )


def _cpuinfo_fields(text: str) -> dict[str, str]:
    """Return the fields of the first processor."""
    pairs = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpuinfo_processors(files: SystemFiles) -> tuple[int, ...]:
    lines = (files.text("/proc/cpuinfo") or "").splitlines()
    return tuple(
        int(line.partition(":")[2])
        for line in lines
        if line.startswith("processor") and line.partition(":")[2].strip().isdigit()
    )


def _arm_core(fields: dict[str, str], files: SystemFiles) -> tuple[int, int] | None:
    """Return the Arm implementer and part number, which replace the model name in /proc/cpuinfo; None if not an Arm CPU."""
    try:
        return int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
    except (KeyError, ValueError):
        midr = files.integer("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1")
        return None if midr is None else (midr >> 24 & 0xFF, midr >> 4 & 0xFFF)


def _grace(arm: tuple[int, int] | None) -> str | None:
    return GRACE if arm == (_ARM_IMPLEMENTER, _NEOVERSE_V2_PART) else None


def _arm_name(arm: tuple[int, int] | None) -> str | None:
    return f"Arm implementer {arm[0]:#x} part {arm[1]:#x}" if arm else None


def _slow_name(files: SystemFiles) -> str | None:
    if not files.live:
        return None
    import cpuinfo

    name = cpuinfo.get_cpu_info().get("brand_raw")
    return str(name) if name else None
