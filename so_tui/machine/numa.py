"""NUMA nodes as the kernel lists them: which have CPUs, which are a GPU's memory, which are empty."""

from __future__ import annotations

from so_tui.machine.cpulist import cpus_or_empty
from so_tui.machine.tree import Tree, meminfo
from so_tui.machine.types import NodeKind, NumaNode

_NODES = "/sys/devices/system/node"


def read_nodes(tree: Tree, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """All online nodes in ascending order; one node 0 with every CPU where the kernel knows no NUMA."""
    ids = sorted(int(name[4:]) for name in tree.names(_NODES) if name.startswith("node") and name[4:].isdigit())
    if not ids:
        return (_node(0, online, meminfo(tree.text("/proc/meminfo")), (10,)),)
    return tuple(_read_node(tree, node) for node in ids)


def _read_node(tree: Tree, node: int) -> NumaNode:
    folder = f"{_NODES}/node{node}"
    distances = (tree.text(f"{folder}/distance") or "").split()
    return _node(
        node,
        cpus_or_empty(tree.text(f"{folder}/cpulist")),
        meminfo(tree.text(f"{folder}/meminfo")),
        tuple(int(distance) for distance in distances if distance.isdigit()),
    )


def _node(node: int, cpus: tuple[int, ...], memory: dict[str, int], distances: tuple[int, ...]) -> NumaNode:
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
    """The kernel's distance from a node to another one; the list of distances runs over the online nodes in order."""
    position = next((place for place, node in enumerate(nodes) if node.id == to_id), None)
    return from_node.distances[position] if position is not None and position < len(from_node.distances) else None
