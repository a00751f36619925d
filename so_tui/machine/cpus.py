"""What the processor is called, and which CPUs this process may use."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from so_tui.machine import cgroup
from so_tui.machine.cpulist import cpu_ranges, cpus_or_empty
from so_tui.machine.tree import Tree
from so_tui.machine.types import NumaNode

_ARM_IMPLEMENTER = 0x41
_NEOVERSE_V2_PART = 0xD4F
GRACE = "NVIDIA Grace (Neoverse V2)"


class Processor(NamedTuple):
    name: str
    architecture: str


def online_cpus(tree: Tree) -> tuple[int, ...]:
    return (
        cpus_or_empty(tree.text("/sys/devices/system/cpu/online"))
        or _cpuinfo_processors(tree)
        or (tuple(range(os.cpu_count() or 1)) if tree.live else ())
    )


def allowed_cpus(tree: Tree, online: tuple[int, ...]) -> tuple[int, ...]:
    """CPUs this process may run on: its affinity within its cgroup's cpuset. All online ones for another machine's tree."""
    if not tree.live:
        return online
    allowed = set(os.sched_getaffinity(0))
    return tuple(sorted(allowed & (cgroup.cpuset(tree) or allowed)))


def smt_siblings(tree: Tree, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each physical core that has several threads; empty where none has, or where the tree does not say."""
    cores = set()
    for cpu in online:
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        cores.add(cpus_or_empty(tree.text(f"{folder}/core_cpus_list") or tree.text(f"{folder}/thread_siblings_list")))
    return tuple(sorted(core for core in cores if len(core) > 1))


def allowed_memory_nodes(tree: Tree) -> tuple[int, ...] | None:
    """Nodes that this process may allocate on; None where the kernel does not say, and for another machine's tree."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", tree.text("/proc/self/status") or "", re.MULTILINE)
    return cpus_or_empty(found.group(1)) if tree.live and found else None


def memory_allowance_notes(nodes: tuple[NumaNode, ...], allowed: tuple[int, ...] | None) -> tuple[str, ...]:
    """Which CPU nodes' memory is out of reach, where a cpuset leaves some out."""
    with_memory = [node.id for node in nodes if node.kind == "cpu" and node.memory_total_bytes > 0]
    if allowed is None or set(with_memory) <= set(allowed):
        return ()
    mine = cpu_ranges(set(with_memory) & set(allowed)) or "none"
    return (f"This process may have memory of CPU nodes {mine} of {cpu_ranges(with_memory)} only (Mems_allowed): plans count on no more.",)


def allowance_notes(tree: Tree, online: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[str, ...]:
    """Why fewer CPUs than there are may be used, as far as it can be told."""
    if not tree.live:
        return ()
    notes = []
    if set(allowed) < set(online):
        notes.append(f"This process may use {len(allowed)} of {len(online)} CPUs ({cpu_ranges(allowed)}).")
    quota = cgroup.cpu_quota(tree)
    if quota is not None and quota < len(allowed):
        notes.append(
            f"The cgroup grants the time of {quota:g} CPUs to the {len(allowed)} that may be used: bound threads will be throttled."
        )
    if job := os.environ.get("SLURM_JOB_ID"):
        given = [
            f"{name}={os.environ[name]}" for name in ("SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND_LIST", "SLURM_JOB_GPUS") if name in os.environ
        ]
        notes.append(" ".join([f"Inside Slurm job {job}.", *given]))
    return tuple(notes)


def processor(tree: Tree) -> Processor:
    """Name and architecture from /proc/cpuinfo, or from the identification register in sysfs; py-cpuinfo (slow) as the last resort."""
    text = tree.text("/proc/cpuinfo") or ""
    fields = _cpuinfo_fields(text)
    arm = _arm_core(fields, tree)
    architecture = os.uname().machine if tree.live else "aarch64" if arm else "x86_64" if "vendor_id" in fields else "unknown"
    return Processor(
        name=_grace(arm) or fields.get("model name") or _slow_name(tree) or _arm_name(arm) or "unknown",
        architecture=architecture,
    )


def _cpuinfo_fields(text: str) -> dict[str, str]:
    """The fields of the first processor."""
    pairs = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpuinfo_processors(tree: Tree) -> tuple[int, ...]:
    lines = (tree.text("/proc/cpuinfo") or "").splitlines()
    return tuple(int(line.partition(":")[2]) for line in lines if line.startswith("processor") and line.partition(":")[2].strip().isdigit())


def _arm_core(fields: dict[str, str], tree: Tree) -> tuple[int, int] | None:
    """(implementer, part): Arm kernels write no model name, but these numbers, in /proc/cpuinfo and in the identification register."""
    try:
        return int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
    except (KeyError, ValueError):
        midr = tree.integer("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1")
        return None if midr is None else (midr >> 24 & 0xFF, midr >> 4 & 0xFFF)


def _grace(arm: tuple[int, int] | None) -> str | None:
    return GRACE if arm == (_ARM_IMPLEMENTER, _NEOVERSE_V2_PART) else None


def _arm_name(arm: tuple[int, int] | None) -> str | None:
    return f"Arm implementer {arm[0]:#x} part {arm[1]:#x}" if arm else None


def _slow_name(tree: Tree) -> str | None:
    if not tree.live:
        return None
    import cpuinfo

    name = cpuinfo.get_cpu_info().get("brand_raw")
    return str(name) if name else None
