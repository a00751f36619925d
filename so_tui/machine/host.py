"""Read a host from its system files: its processor, memory and NUMA nodes, and what of them this
process may use. GPUs and software are read elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TypeVar

from msgspec.structs import replace

from so_tui.machine.resctrl import read_mpam
from so_tui.machine.system_files import SystemFiles, meminfo, read_network
from so_tui.machine.types import (
    MOST_BYTES,
    UNKNOWN,
    Cores,
    Cpus,
    Machine,
    NodeKind,
    Nodes,
    NumaNode,
    Software,
)
from so_tui.spec.errors import reject
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
    # Within a run, each number exceeds its position in the list by as much.
    runs = groupby(enumerate(sorted(set(cpus))), key=lambda found: found[1] - found[0])
    return tuple(tuple(cpu for _, cpu in run) for _, run in runs)


def cpus_or_empty(text: str) -> Cpus:
    """Parse the text of a cpulist file; empty if it is no list."""
    try:
        return parse_cpus(text)
    except ValueError:
        return ()


# Limits of this process's control group on CPUs, CPU time and memory, in both cgroup versions.
# None means no limit.


_Number = TypeVar("_Number", int, float)
_ROOT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60
"""Larger values mean no limit: cgroup v1 writes a number just below 2^63."""


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
            stat = files.text(f"{folder}/memory.stat")
            cache = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
            return max(0, limit - usage + sum(map(int, cache)))
    return None


def _quota(files: SystemFiles, folder: str) -> float | None:
    if text := files.text(f"{folder}/cpu.max"):
        quota, _, period = text.partition(" ")
        return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
    quota_us = files.integer(f"{folder}/cpu.cfs_quota_us")
    period_us = files.integer(f"{folder}/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _folders(files: SystemFiles, controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and its ancestors, nearest first. Folders that a
    container hides do not exist.
    """
    for line in files.text("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = f"{_ROOT}/{controllers}".rstrip("/")
        if not files.exists(mount):
            mount = f"{_ROOT}/{controller}" if controllers else _ROOT
        path = PurePosixPath(group)
        for folder in (path, *path.parents):
            yield f"{mount}{folder}".rstrip("/")


# The host as a whole.


_NEOVERSE_V2 = (0x41, 0xD4F)
"""Implementer and part."""
_DIFFERENCE = 0.05
"""Share by which MemTotal may exceed the CPU nodes without a note."""


def read_host(files: SystemFiles, hostname: str | None) -> Machine:
    """Return a host as its system files describe it, without GPUs and software.

    Args:
        files: The host's own system files, or a copy.
        hostname: Name of the copied host, if the copy has none or another.

    Raises:
        InputError: With code ``no-cpus`` if there are neither NUMA nodes nor CPUs.
    """
    live = files.live
    online = _online_cpus(files)
    nodes = _nodes(files, online)
    cpu_nodes = [node for node in nodes if node.kind == "cpu"]
    if not cpu_nodes:
        raise reject(
            "no-cpus",
            "--sysroot",
            str(files.root),
            "contains no /sys or /proc with CPUs",
            "Give the folder that contains `sys/devices/system/node` of the other machine.",
        )
    online = online or tuple(sorted({cpu for node in nodes for cpu in node.cpus}))
    name, architecture = _processor(files)
    host_bytes = sum(node.memory_total_bytes for node in cpu_nodes)
    limit = _memory_limit_bytes(files) if live else None
    shm_total_bytes, shm_free_bytes = _shared_memory() if live else (None, None)
    allowed_nodes = re.search(
        r"^Mems_allowed_list:\s*(\S+)", files.text("/proc/self/status"), re.MULTILINE
    )
    machine = Machine(
        hostname=os.uname().nodename
        if live
        else hostname or files.text("/proc/sys/kernel/hostname") or UNKNOWN,
        cpu_name=name,
        architecture=architecture,
        page_size_bytes=os.sysconf("SC_PAGE_SIZE") if live else None,
        online_cpus=online,
        # The kernel keeps the affinity within the cpuset of the control group.
        allowed_cpus=tuple(sorted(os.sched_getaffinity(0))) if live else online,
        host_memory_bytes=host_bytes,
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        mpam=read_mpam(files, architecture),
        software=Software(),
        numa_nodes=nodes,
        gpus=(),
        network=read_network(files),
        memory_limit_bytes=limit if limit is not None and limit < host_bytes else None,
        smt_siblings=_smt_siblings(files, online),
        allowed_memory_nodes=cpus_or_empty(allowed_nodes[1]) if live and allowed_nodes else None,
        live=live,
        memory_grows=live and _grows(files),
    )
    return replace(machine, notes=tuple(_notes(files, machine)))


def _online_cpus(files: SystemFiles) -> Cpus:
    """Return all CPUs of the host that are online."""
    if online := cpus_or_empty(files.text("/sys/devices/system/cpu/online")):
        return online
    listed = re.findall(
        r"^processor[^:\n]*:[ \t]*(\d+)[ \t]*$", files.text("/proc/cpuinfo"), re.MULTILINE
    )
    return tuple(map(int, listed)) or (tuple(range(os.cpu_count() or 1)) if files.live else ())


def _smt_siblings(files: SystemFiles, online: Cpus) -> Cores:
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


def _shared_memory() -> tuple[int | None, int | None]:
    """Return the size of /dev/shm, and what of it is free."""
    try:
        found = shutil.disk_usage("/dev/shm")
    except OSError:
        return None, None
    # Without a limit, some file systems report sizes that no host has.
    return min(found.total, MOST_BYTES), min(found.free, MOST_BYTES)


def _processor(files: SystemFiles) -> tuple[str, str]:
    """Return name and architecture from /proc/cpuinfo or the identification register in sysfs; the
    name from py-cpuinfo (slow) as a last resort.
    """
    first, _, _ = files.text("/proc/cpuinfo").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    arm = _arm_core(fields, files)
    architecture = "x86_64" if "vendor_id" in fields else "aarch64" if arm else "unknown"
    if files.live:
        architecture = os.uname().machine
    name = "NVIDIA Grace (Neoverse V2)" if arm == _NEOVERSE_V2 else fields.get("model name")
    if not name and files.live:
        import cpuinfo

        name = str(cpuinfo.get_cpu_info().get("brand_raw") or "")
    if not name:
        name = f"Arm implementer {arm[0]:#x} part {arm[1]:#x}" if arm else "unknown"
    return name, architecture


def _arm_core(fields: dict[str, str], files: SystemFiles) -> tuple[int, int] | None:
    """Return the Arm implementer and part number, which replace the model name in /proc/cpuinfo;
    None if not an Arm CPU.
    """
    try:
        return int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
    except (KeyError, ValueError):
        midr = files.integer("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1")
        return None if midr is None else (midr >> 24 & 0xFF, midr >> 4 & 0xFFF)


def _notes(files: SystemFiles, machine: Machine) -> Iterator[str]:
    """Yield why this process may use only a part of the host, and what the figures count."""
    if machine.live:
        yield from _allowance_notes(files, machine)
    total, seen = machine.host_memory_bytes, meminfo(files.text("/proc/meminfo")).get("MemTotal", 0)
    if seen > total * (1 + _DIFFERENCE):
        of_gpus = any(node.kind == "gpu-memory" for node in machine.numa_nodes)
        yield (
            f"MemTotal is {memory_size(seen)}{', which includes GPU memory' if of_gpus else ''}; "
            f"plans count the {memory_size(total)} of the CPU nodes."
        )
    if machine.memory_grows:
        yield f"Memory of this virtual machine may grow on demand; it has {memory_size(total)} now."
    if (limit := machine.memory_limit_bytes) is not None:
        yield f"The control group allows {memory_size(limit)} of the host's {memory_size(total)}."


def _allowance_notes(files: SystemFiles, machine: Machine) -> Iterator[str]:
    online, allowed = machine.online_cpus, machine.allowed_cpus
    if set(allowed) < set(online):
        yield f"This process may use {len(allowed)} of {len(online)} CPUs ({cpu_ranges(allowed)})."
    quota = cpu_quota(files)
    if quota is not None and quota < len(allowed):
        yield (
            f"The control group limits CPU time to {quota:g} of {len(allowed)} allowed CPUs: bound "
            "threads will be throttled."
        )
    if job := os.environ.get("SLURM_JOB_ID"):
        names = ("SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND_LIST", "SLURM_JOB_GPUS")
        given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
        yield " ".join([f"Inside Slurm job {job}.", *given])
    with_memory = {node.id for node in machine.cpu_nodes if node.memory_total_bytes > 0}
    reachable = machine.allowed_memory_nodes
    if reachable is not None and not with_memory <= set(reachable):
        mine = cpu_ranges(with_memory & set(reachable)) or "none"
        yield (
            f"This process may allocate on CPU nodes {mine} of {cpu_ranges(with_memory)} "
            "(Mems_allowed): plans count only these."
        )


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
    if unknown. File cache of the group counts as free.
    """
    left = (_memory_left(files, folder) for folder in _folders(files, "memory"))
    return _least((meminfo(files.text("/proc/meminfo")).get("MemAvailable"), *left))


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
    firecracker = any("firecracker" in text.lower() for text in dmi)
    return firecracker or any(name.startswith("virtio") and name[6:].isdigit() for name in devices)


_NODES = "/sys/devices/system/node"


def _nodes(files: SystemFiles, online: Cpus) -> Nodes:
    """Return all online NUMA nodes in ascending order, corrected if the kernel's figures of a node
    lag behind memory that is being added. A single node 0 has every CPU if the kernel has no NUMA
    support.
    """
    whole = meminfo(files.text("/proc/meminfo"))
    ids = sorted(
        int(name[4:]) for name in files.names(_NODES) if re.fullmatch(r"node[0-9]{1,5}", name)
    )
    if not ids:
        return (_node(0, online, whole, (10,)),)
    read = []
    for node in ids:
        folder = f"{_NODES}/node{node}"
        known = tuple(map(int, re.findall(r"\b[0-9]{1,5}\b", files.text(f"{folder}/distance"))))
        cpus = cpus_or_empty(files.text(f"{folder}/cpulist"))
        read.append((node, cpus, meminfo(files.text(f"{folder}/meminfo")), known))
    sole = sole_memory_node(tuple(_node(*parts) for parts in read))
    return tuple(
        _node(node, cpus, caught_up(memory, whole) if node == sole else memory, known)
        for node, cpus, memory, known in read
    )


def _node(node: int, cpus: Cpus, memory: dict[str, int], distances: tuple[int, ...]) -> NumaNode:
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
