"""Host memory: how much there really is for a run, and what to know about the figure."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec

from so_tui.machine import cgroup
from so_tui.machine.tree import Tree, meminfo
from so_tui.machine.types import NumaNode

GIB = 1 << 30
_DIFFERENCE = 0.05


class SharedMemory(NamedTuple):
    total_bytes: int | None
    free_bytes: int | None


class HostMemory(NamedTuple):
    nodes: tuple[NumaNode, ...]
    total_bytes: int
    """Sum over the CPU nodes."""
    limit_bytes: int | None
    notes: tuple[str, ...]


def shared_memory(tree: Tree) -> SharedMemory:
    """/dev/shm of this machine."""
    if not tree.live:
        return SharedMemory(None, None)
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return SharedMemory(None, None)
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def page_size_bytes(tree: Tree) -> int | None:
    return os.sysconf("SC_PAGE_SIZE") if tree.live else None


def host_memory(tree: Tree, nodes: tuple[NumaNode, ...]) -> HostMemory:
    """Memory of the CPU nodes, corrected where the kernel's node accounting lags behind memory that is still being added."""
    whole = meminfo(tree.text("/proc/meminfo"))
    nodes = _caught_up_nodes(nodes, whole)
    total = sum(node.memory_total_bytes for node in nodes if node.kind == "cpu")
    limit = cgroup.memory_limit_bytes(tree) if tree.live else None
    notes = [*_gpu_memory_note(nodes, whole.get("MemTotal"), total)]
    if tree.live and _grows(tree):
        notes.append(f"Memory of this virtual machine may start small and grow on demand; {total / GIB:.1f} GiB is what it has now.")
    if limit is not None and limit < total:
        notes.append(f"The cgroup allows {limit / GIB:.1f} GiB of the host's {total / GIB:.1f} GiB.")
    return HostMemory(nodes, total, limit if limit is not None and limit < total else None, tuple(notes))


def available_bytes(tree: Tree) -> int | None:
    """What processes of this control group can still allocate without swapping or being killed; None where nothing tells."""
    sizes = (meminfo(tree.text("/proc/meminfo")).get("MemAvailable"), cgroup.memory_left_bytes(tree))
    return min((size for size in sizes if size is not None), default=None)


def sole_memory_node(nodes: tuple[NumaNode, ...]) -> int | None:
    """The CPU node that has all of the host's memory, so that /proc/meminfo is about it too; None where memory is on several nodes."""
    with_memory = [node for node in nodes if node.memory_total_bytes > 0]
    return with_memory[0].id if len(with_memory) == 1 and with_memory[0].kind == "cpu" else None


def caught_up(sizes: dict[str, int], whole: dict[str, int]) -> dict[str, int]:
    """The meminfo sizes of the only node with memory, total and free by /proc/meminfo where that is newer: it knows of more."""
    if whole.get("MemTotal", 0) <= sizes.get("MemTotal", 0):
        return sizes
    return sizes | {name: whole[name] for name in ("MemTotal", "MemFree") if name in whole}


def _caught_up_nodes(nodes: tuple[NumaNode, ...], whole: dict[str, int]) -> tuple[NumaNode, ...]:
    sole = sole_memory_node(nodes)
    return tuple(_caught_up_node(node, whole) if node.id == sole else node for node in nodes)


def _caught_up_node(node: NumaNode, whole: dict[str, int]) -> NumaNode:
    sizes = caught_up({"MemTotal": node.memory_total_bytes}, whole)
    return msgspec.structs.replace(
        node, memory_total_bytes=sizes["MemTotal"], memory_free_bytes=sizes.get("MemFree", node.memory_free_bytes)
    )


def _gpu_memory_note(nodes: tuple[NumaNode, ...], whole_bytes: int | None, host_bytes: int) -> list[str]:
    if whole_bytes is None or whole_bytes <= host_bytes * (1 + _DIFFERENCE):
        return []
    reason = ", which includes GPU memory" if any(node.kind == "gpu-memory" for node in nodes) else ""
    return [
        f"MemTotal is {whole_bytes / GIB:.1f} GiB{reason}; the CPU nodes have {host_bytes / GIB:.1f} GiB, and that is what counts here."
    ]


def _grows(tree: Tree) -> bool:
    """A virtual machine whose host can add or return memory: a memory or balloon device is bound, or DMI names Firecracker."""
    devices = [name for driver in ("virtio_mem", "virtio_balloon") for name in tree.names(f"/sys/bus/virtio/drivers/{driver}")]
    firecracker = (
        "firecracker" in " ".join(tree.text(f"/sys/class/dmi/id/{field}") or "" for field in ("sys_vendor", "product_name")).lower()
    )
    return firecracker or any(name.startswith("virtio") and name[6:].isdigit() for name in devices)
