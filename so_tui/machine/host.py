"""Name of the processor, and the CPUs that this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from so_tui.machine.system_files import SystemFiles, meminfo
from so_tui.machine.types import Cores, Cpus, NodeKind, Nodes, NumaNode
from so_tui.units import KIB, memory_size

# Parse and format lists of CPU numbers as the kernel, numactl and DeepSpeed write them.


_LAST = (1 << 16) - 1
"""Number far above any CPU: a list in files of others must not take all memory."""


def parse_cpus(text: str) -> Cpus:
    """Parse the kernel's list format (``0-3,8``) to ascending numbers. Raises ValueError for any
    other text.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            if int(last or first) > _LAST:
                raise ValueError(f"{part} is beyond any CPU")
            cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def cpu_ranges(cpus: Iterable[int]) -> str:
    """Format numbers in the kernel's list format: ``(0, 1, 2, 8)`` is ``0-2,8``."""
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in contiguous_runs(cpus)
    )


def contiguous_runs(cpus: Iterable[int]) -> Cores:
    """Return the maximal runs of consecutive numbers, ascending."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return tuple(tuple(run) for run in runs)


def cpus_or_empty(text: str | None) -> Cpus:
    """Parse the text of a cpulist file; empty if the file is absent, empty or not a list."""
    try:
        return parse_cpus(text or "")
    except ValueError:
        return ()


# Limits of this process's control group on CPUs, CPU time and memory, in both cgroup versions.
# None means no limit.


_Number = TypeVar("_Number", int, float)
_ROOT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60
"""Larger values mean no limit: cgroup v1 writes a number just below 2^63."""


def _cpuset(files: SystemFiles) -> set[int] | None:
    """Return the CPUs of the nearest group that has a cpuset."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    for folder in _folders(files, "cpuset"):
        for name in names:
            if cpus := cpus_or_empty(files.text(f"{folder}/{name}")):
                return set(cpus)
    return None


def cpu_quota(files: SystemFiles) -> float | None:
    """Return the smallest limit on CPU time of the group and its ancestors, in CPUs."""
    return _least(_quota(files, folder) for folder in _folders(files, "cpu"))


def _memory_limit_bytes(files: SystemFiles) -> int | None:
    """Return the smallest memory limit of the group and its ancestors."""
    limit = _least(
        files.integer(f"{folder}/{name}")
        for folder in _folders(files, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return limit if limit is not None and limit < _UNLIMITED_BYTES else None


def _memory_left_bytes(files: SystemFiles) -> int | None:
    """Return the smallest distance of the group and its ancestors from their memory limits. File
    cache counts as free.
    """
    return _least(_memory_left(files, folder) for folder in _folders(files, "memory"))


def process_limit(files: SystemFiles) -> int | None:
    """Return the smallest limit on processes and threads of the group and its ancestors."""
    return _least(files.integer(f"{folder}/pids.max") for folder in _folders(files, "pids"))


def _least(limits: Iterable[_Number | None]) -> _Number | None:
    """Return the smallest of the limits that are set."""
    return min((limit for limit in limits if limit is not None), default=None)


def _memory_left(files: SystemFiles, folder: str) -> int | None:
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = files.integer(f"{folder}/{limit_name}")
        usage = files.integer(f"{folder}/{usage_name}")
        if limit is not None and usage is not None and limit < _UNLIMITED_BYTES:
            stat = files.text(f"{folder}/memory.stat") or ""
            cache = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
            return max(0, limit - usage + sum(map(int, cache)))
    return None


def _quota(files: SystemFiles, folder: str) -> float | None:
    text = files.text(f"{folder}/cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    quota_us = files.integer(f"{folder}/cpu.cfs_quota_us")
    period_us = files.integer(f"{folder}/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _folders(files: SystemFiles, controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and its ancestors, nearest first. Folders that a
    container hides do not exist.
    """
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = f"{_ROOT}/{controllers}".rstrip("/")
        if not files.exists(mount):
            mount = f"{_ROOT}/{controller}" if controllers else _ROOT
        path = PurePosixPath(group)
        for folder in (path, *path.parents):
            yield f"{mount}{folder}".rstrip("/")


_NEOVERSE_V2 = (0x41, 0xD4F)
"""Implementer and part."""
GRACE = "NVIDIA Grace (Neoverse V2)"


class _Processor(NamedTuple):
    name: str
    architecture: str


def online_cpus(files: SystemFiles) -> Cpus:
    """Return all CPUs of the machine that are online."""
    return (
        cpus_or_empty(files.text("/sys/devices/system/cpu/online"))
        or _cpuinfo_processors(files)
        or (tuple(range(os.cpu_count() or 1)) if files.live else ())
    )


def allowed_cpus(files: SystemFiles, online: Cpus) -> Cpus:
    """Return the CPUs this process may run on: its affinity within its cpuset. For copied system
    files, all online CPUs.
    """
    if not files.live:
        return online
    allowed = set(os.sched_getaffinity(0))
    return tuple(sorted(allowed & (_cpuset(files) or allowed)))


def smt_siblings(files: SystemFiles, online: Cpus) -> Cores:
    """Return the CPUs of each physical core with several threads; empty if no core has, or if it is
    not reported.
    """
    folders = (f"/sys/devices/system/cpu/cpu{cpu}/topology" for cpu in online)
    cores = {
        cpus_or_empty(
            files.text(f"{folder}/core_cpus_list") or files.text(f"{folder}/thread_siblings_list")
        )
        for folder in folders
    }
    return tuple(sorted(core for core in cores if len(core) > 1))


def allowed_memory_nodes(files: SystemFiles) -> tuple[int, ...] | None:
    """Return the NUMA nodes that this process may allocate on; None if unknown, and for copied
    system files.
    """
    found = re.search(
        r"^Mems_allowed_list:\s*(\S+)", files.text("/proc/self/status") or "", re.MULTILINE
    )
    return cpus_or_empty(found.group(1)) if files.live and found else None


def memory_allowance_notes(nodes: Nodes, allowed: tuple[int, ...] | None) -> list[str]:
    """Return a note if a cpuset excludes the memory of some CPU nodes."""
    with_memory = {node.id for node in nodes if node.kind == "cpu" and node.memory_total_bytes > 0}
    if allowed is None or with_memory <= set(allowed):
        return []
    mine = cpu_ranges(with_memory & set(allowed)) or "none"
    return [
        f"This process may allocate on CPU nodes {mine} of {cpu_ranges(with_memory)} "
        "(Mems_allowed): plans count only these."
    ]


def allowance_notes(files: SystemFiles, online: Cpus, allowed: Cpus) -> list[str]:
    """Return notes on why this process may use only some of the CPUs."""
    notes: list[str] = []
    if not files.live:
        return notes
    if set(allowed) < set(online):
        notes.append(
            f"This process may use {len(allowed)} of {len(online)} CPUs ({cpu_ranges(allowed)})."
        )
    quota = cpu_quota(files)
    if quota is not None and quota < len(allowed):
        notes.append(
            f"The control group limits CPU time to {quota:g} of {len(allowed)} allowed CPUs: bound "
            "threads will be throttled."
        )
    if job := os.environ.get("SLURM_JOB_ID"):
        names = ("SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND_LIST", "SLURM_JOB_GPUS")
        given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
        notes.append(" ".join([f"Inside Slurm job {job}.", *given]))
    return notes


def processor(files: SystemFiles) -> _Processor:
    """Return name and architecture from /proc/cpuinfo or the identification register in sysfs; from
    py-cpuinfo (slow) as a last resort.
    """
    first, _, _ = (files.text("/proc/cpuinfo") or "").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    arm = _arm_core(fields, files)
    architecture = "x86_64" if "vendor_id" in fields else "unknown"
    if files.live:
        architecture = os.uname().machine
    elif arm:
        architecture = "aarch64"
    name = GRACE if arm == _NEOVERSE_V2 else fields.get("model name")
    if not name and files.live:
        import cpuinfo

        name = str(cpuinfo.get_cpu_info().get("brand_raw") or "")
    if not name:
        name = f"Arm implementer {arm[0]:#x} part {arm[1]:#x}" if arm else "unknown"
    return _Processor(name, architecture)


def _cpuinfo_processors(files: SystemFiles) -> Cpus:
    text = files.text("/proc/cpuinfo") or ""
    return tuple(map(int, re.findall(r"^processor[^:\n]*:[ \t]*(\d+)[ \t]*$", text, re.MULTILINE)))


def _arm_core(fields: dict[str, str], files: SystemFiles) -> tuple[int, int] | None:
    """Return the Arm implementer and part number, which replace the model name in /proc/cpuinfo;
    None if not an Arm CPU.
    """
    try:
        return int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
    except (KeyError, ValueError):
        midr = files.integer("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1")
        return None if midr is None else (midr >> 24 & 0xFF, midr >> 4 & 0xFFF)


# Host memory: how much a run can use, and notes about the figure.


_DIFFERENCE = 0.05
"""Share by which MemTotal may exceed the CPU nodes without a note."""


class _HostMemory(NamedTuple):
    nodes: Nodes
    total_bytes: int
    """Sum over the CPU nodes."""
    limit_bytes: int | None
    """Limit of the control group, if it is below the total."""
    grows: bool
    """Whether the memory of this virtual machine can grow on demand."""
    notes: tuple[str, ...]


def shared_memory(files: SystemFiles) -> tuple[int | None, int | None]:
    """Return the size of /dev/shm of this machine, and what of it is free."""
    try:
        stat = os.statvfs("/dev/shm") if files.live else None
    except OSError:
        stat = None
    if stat is None:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def host_memory(files: SystemFiles, nodes: Nodes) -> _HostMemory:
    """Return the memory of the CPU nodes, corrected if the kernel's per-node figures lag behind
    memory that is being added.
    """
    whole, sole = meminfo(files.text("/proc/meminfo")), sole_memory_node(nodes)
    corrected = []
    for node in nodes:
        if node.id == sole:
            sizes = caught_up({"MemTotal": node.memory_total_bytes}, whole)
            free = sizes.get("MemFree", node.memory_free_bytes)
            node = replace(node, memory_total_bytes=sizes["MemTotal"], memory_free_bytes=free)
        corrected.append(node)
    total = sum(node.memory_total_bytes for node in corrected if node.kind == "cpu")
    limit = _memory_limit_bytes(files) if files.live else None
    if limit is not None and limit >= total:
        limit = None
    grows, notes = files.live and _grows(files), []
    if (seen := whole.get("MemTotal", 0)) > total * (1 + _DIFFERENCE):
        of_gpus = any(node.kind == "gpu-memory" for node in nodes)
        notes.append(
            f"MemTotal is {memory_size(seen)}{', which includes GPU memory' if of_gpus else ''}; "
            f"plans count the {memory_size(total)} of the CPU nodes."
        )
    if grows:
        notes.append(
            f"Memory of this virtual machine may grow on demand; it has {memory_size(total)} now."
        )
    if limit is not None:
        notes.append(
            f"The control group allows {memory_size(limit)} of the host's {memory_size(total)}."
        )
    return _HostMemory(tuple(corrected), total, limit, grows, tuple(notes))


def pss_bytes(pid: int) -> int | None:
    """Return the proportional set size (PSS) of a process: pages it shares count in part. None if
    it has ended or is not readable.

    Reading it walks the page tables of the process, which takes long for hundreds of gigabytes.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(b"Pss:")), None)


def available_bytes(files: SystemFiles) -> int | None:
    """Return the bytes that this control group can allocate without swapping or being killed; None
    if unknown.
    """
    return _least(
        (meminfo(files.text("/proc/meminfo")).get("MemAvailable"), _memory_left_bytes(files))
    )


def sole_memory_node(nodes: Nodes) -> int | None:
    """Return the CPU node with all of the host's memory, which /proc/meminfo then describes; None
    if several nodes have memory.
    """
    with_memory = [node for node in nodes if node.memory_total_bytes > 0]
    return with_memory[0].id if len(with_memory) == 1 and with_memory[0].kind == "cpu" else None


def caught_up(sizes: dict[str, int], whole: dict[str, int]) -> dict[str, int]:
    """Return the meminfo sizes of the only node with memory, with total and free of /proc/meminfo
    if that shows more.
    """
    if whole.get("MemTotal", 0) <= sizes.get("MemTotal", 0):
        return sizes
    return sizes | {name: whole[name] for name in ("MemTotal", "MemFree") if name in whole}


def _grows(files: SystemFiles) -> bool:
    """Return whether this is a virtual machine with variable memory: a memory or balloon device is
    bound, or DMI names Firecracker.
    """
    devices = [
        name
        for driver in ("virtio_mem", "virtio_balloon")
        for name in files.names(f"/sys/bus/virtio/drivers/{driver}")
    ]
    dmi = [files.text(f"/sys/class/dmi/id/{field}") for field in ("sys_vendor", "product_name")]
    firecracker = any("firecracker" in (text or "").lower() for text in dmi)
    return firecracker or any(name.startswith("virtio") and name[6:].isdigit() for name in devices)


# Read NUMA nodes: those with CPUs, those with a GPU's memory, and empty ones.


_NODES = "/sys/devices/system/node"


def read_nodes(files: SystemFiles, online: Cpus) -> Nodes:
    """Return all online nodes in ascending order; a single node 0 with every CPU if the kernel has
    no NUMA support.
    """
    ids = sorted(
        int(name[4:])
        for name in files.names(_NODES)
        if name.startswith("node") and name[4:].isdigit()
    )
    if not ids:
        return (_node(0, online, files.text("/proc/meminfo"), (10,)),)
    found = []
    for node in ids:
        folder = f"{_NODES}/node{node}"
        distances = (files.text(f"{folder}/distance") or "").split()
        cpus, memory = cpus_or_empty(files.text(f"{folder}/cpulist")), f"{folder}/meminfo"
        known = tuple(int(distance) for distance in distances if distance.isdigit())
        found.append(_node(node, cpus, files.text(memory), known))
    return tuple(found)


def _node(node: int, cpus: Cpus, sizes: str | None, distances: tuple[int, ...]) -> NumaNode:
    memory = meminfo(sizes)
    total = memory.get("MemTotal", 0)
    kind: NodeKind = "cpu" if cpus else "gpu-memory" if total > 0 else "empty"
    return NumaNode(
        id=node,
        kind=kind,
        cpus=cpus,
        memory_total_bytes=total,
        memory_free_bytes=memory.get("MemFree"),
        file_cache_bytes=memory.get("FilePages", memory.get("Cached")),
        distances=distances,
    )


def distance(nodes: Nodes, from_node: NumaNode, to_id: int) -> int | None:
    """Return the kernel's distance between two nodes; None if unknown. Distances are listed in the
    order of online nodes.
    """
    ids = [node.id for node in nodes]
    return dict(zip(ids, from_node.distances, strict=False)).get(to_id)
