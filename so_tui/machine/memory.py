"""Host memory: how much a run can use, and notes about the figure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from so_tui.machine import cgroup
from so_tui.machine.system_files import SystemFiles, meminfo
from so_tui.machine.types import NumaNode
from so_tui.units import KIB, memory_size

_DIFFERENCE = 0.05
"""Share by which MemTotal may exceed the CPU nodes without a note."""


class SharedMemory(NamedTuple):
    total_bytes: int | None
    free_bytes: int | None


class HostMemory(NamedTuple):
    nodes: tuple[NumaNode, ...]
    total_bytes: int
    """Sum over the CPU nodes."""
    limit_bytes: int | None
    """Limit of the control group, if it is below the total."""
    grows: bool
    """Whether the memory of this virtual machine can grow on demand."""
    notes: tuple[str, ...]


def shared_memory(files: SystemFiles) -> SharedMemory:
    """Return the size of /dev/shm of this machine."""
    if not files.live:
        return SharedMemory(None, None)
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return SharedMemory(None, None)
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def page_size_bytes(files: SystemFiles) -> int | None:
    return os.sysconf("SC_PAGE_SIZE") if files.live else None


def host_memory(files: SystemFiles, nodes: tuple[NumaNode, ...]) -> HostMemory:
    """Return the memory of the CPU nodes, corrected if the kernel's per-node figures lag behind memory that is being added."""
    whole = meminfo(files.text("/proc/meminfo"))
    nodes = _caught_up_nodes(nodes, whole)
    total = sum(node.memory_total_bytes for node in nodes if node.kind == "cpu")
    limit = cgroup.memory_limit_bytes(files) if files.live else None
    notes = [*_gpu_memory_note(nodes, whole.get("MemTotal"), total)]
    grows = files.live and _grows(files)
    if grows:
        notes.append(
            f"Memory of this virtual machine may grow on demand; it has {memory_size(total)} now."
        )
    if limit is not None and limit < total:
        notes.append(
            f"The control group allows {memory_size(limit)} of the host's {memory_size(total)}."
        )
    return HostMemory(
        nodes, total, limit if limit is not None and limit < total else None, grows, tuple(notes)
    )


def pss_bytes(pid: int) -> int | None:
    """Return the proportional set size (PSS) of a process: pages it shares count in part. None if it has ended or is not readable.

    Reading it walks the page tables of the process, which takes long for hundreds of gigabytes.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(b"Pss:")), None)


def available_bytes(files: SystemFiles) -> int | None:
    """Return the bytes that this control group can allocate without swapping or being killed; None if unknown."""
    sizes = (
        meminfo(files.text("/proc/meminfo")).get("MemAvailable"),
        cgroup.memory_left_bytes(files),
    )
    return min((size for size in sizes if size is not None), default=None)


def sole_memory_node(nodes: tuple[NumaNode, ...]) -> int | None:
    """Return the CPU node with all of the host's memory, which /proc/meminfo then describes; None if several nodes have memory."""
    with_memory = [node for node in nodes if node.memory_total_bytes > 0]
    return with_memory[0].id if len(with_memory) == 1 and with_memory[0].kind == "cpu" else None


def caught_up(sizes: dict[str, int], whole: dict[str, int]) -> dict[str, int]:
    """Return the meminfo sizes of the only node with memory, with total and free of /proc/meminfo if that shows more."""
    if whole.get("MemTotal", 0) <= sizes.get("MemTotal", 0):
        return sizes
    return sizes | {name: whole[name] for name in ("MemTotal", "MemFree") if name in whole}


def _caught_up_nodes(nodes: tuple[NumaNode, ...], whole: dict[str, int]) -> tuple[NumaNode, ...]:
    sole = sole_memory_node(nodes)
    return tuple(_caught_up_node(node, whole) if node.id == sole else node for node in nodes)


def _caught_up_node(node: NumaNode, whole: dict[str, int]) -> NumaNode:
    sizes = caught_up({"MemTotal": node.memory_total_bytes}, whole)
    return msgspec.structs.replace(
        node,
        memory_total_bytes=sizes["MemTotal"],
        memory_free_bytes=sizes.get("MemFree", node.memory_free_bytes),
    )


def _gpu_memory_note(
    nodes: tuple[NumaNode, ...], whole_bytes: int | None, host_bytes: int
) -> list[str]:
    if whole_bytes is None or whole_bytes <= host_bytes * (1 + _DIFFERENCE):
        return []
    reason = (
        ", which includes GPU memory" if any(node.kind == "gpu-memory" for node in nodes) else ""
    )
    return [
        f"MemTotal is {memory_size(whole_bytes)}{reason}; plans count the {memory_size(host_bytes)} of the CPU nodes."
    ]


def _grows(files: SystemFiles) -> bool:
    """Return whether this is a virtual machine with variable memory: a memory or balloon device is bound, or DMI names Firecracker."""
    devices = [
        name
        for driver in ("virtio_mem", "virtio_balloon")
        for name in files.names(f"/sys/bus/virtio/drivers/{driver}")
    ]
    firecracker = (
        "firecracker"
        in " ".join(
            files.text(f"/sys/class/dmi/id/{field}") or ""
            for field in ("sys_vendor", "product_name")
        ).lower()
    )
    return firecracker or any(name.startswith("virtio") and name[6:].isdigit() for name in devices)
