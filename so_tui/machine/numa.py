"""Read NUMA nodes: those with CPUs, those with a GPU's memory, and empty ones."""

from __future__ import annotations

from so_tui.machine.cpulist import cpus_or_empty
from so_tui.machine.system_files import SystemFiles, meminfo
from so_tui.machine.types import NodeKind, NumaNode

_NODES = "/sys/devices/system/node"


def read_nodes(files: SystemFiles, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """Return all online nodes in ascending order; a single node 0 with every CPU if the kernel has no NUMA support."""
    ids = sorted(
        int(name[4:])
        for name in files.names(_NODES)
        if name.startswith("node") and name[4:].isdigit()
    )
    if not ids:
        return (_node(0, online, meminfo(files.text("/proc/meminfo")), (10,)),)
    return tuple(_read_node(files, node) for node in ids)


def _read_node(files: SystemFiles, node: int) -> NumaNode:
    folder = f"{_NODES}/node{node}"
    distances = (files.text(f"{folder}/distance") or "").split()
    return _node(
        node,
        cpus_or_empty(files.text(f"{folder}/cpulist")),
        meminfo(files.text(f"{folder}/meminfo")),
        tuple(int(distance) for distance in distances if distance.isdigit()),
    )


def _node(
    node: int, cpus: tuple[int, ...], memory: dict[str, int], distances: tuple[int, ...]
) -> NumaNode:
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


def distance(nodes: tuple[NumaNode, ...], from_node: NumaNode, to_id: int) -> int | None:
    """Return the kernel's distance between two nodes; None if unknown. Distances are listed in the order of online nodes."""
    position = next((index for index, node in enumerate(nodes) if node.id == to_id), None)
    return (
        from_node.distances[position]
        if position is not None and position < len(from_node.distances)
        else None
    )
