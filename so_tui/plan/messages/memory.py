"""What memory a plan needs, and where it runs short, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from so_tui.plan.facts.memory import MemoryNeeded, Need, NodeNeed, Shortage
from so_tui.units import memory_size


def need_text(fact: Need) -> str:
    """Return where memory is short, or what a plan that may run needs."""
    return shortage_text(fact) if isinstance(fact, Shortage) else _memory_needed(fact)


def shortage_text(short: Shortage) -> str:
    """Return ``host node 0 needs 226 GiB, has 105 GiB``."""
    if short.fatal:
        return f"{pool_name(short)} needs {memory_size(short.needs)}, has {memory_size(short.has)}"
    return f"{pool_name(short)} needs {memory_size(short.needs)} of {memory_size(short.has)}: little is left for what is not predicted exactly"


def pool_name(short: Shortage) -> str:
    """Return the memory that is short: ``each GPU``, ``host node 0``, ``/dev/shm``."""
    match short.pool:
        case "gpu":
            return "each GPU"
        case "node":
            return _nodes(short.nodes)
        case "limit":
            return "the host, within its memory limit,"
        case "shm":
            return "/dev/shm"
        case "unknown":
            return "the machine"
    assert_never(short.pool)


def _nodes(nodes: Sequence[int]) -> str:
    return (
        f"host node {nodes[0]}"
        if len(nodes) == 1
        else f"each of host nodes {', '.join(map(str, nodes))}"
    )


def _memory_needed(fact: MemoryNeeded) -> str:
    parts = []
    if fact.gpu_bytes:
        of = f" of {memory_size(fact.gpu_capacity_bytes)}" if fact.gpu_capacity_bytes else ""
        parts.append(f"{memory_size(fact.gpu_bytes)}{of} on each GPU")
    # The number of a node comes last: before an amount it would read as a part of it.
    parts += [_host_needed(host) for host in fact.hosts]
    return "needs " + "; ".join(parts)


def _host_needed(host: NodeNeed) -> str:
    return f"{memory_size(host.needs)} of {memory_size(host.has)} on {_nodes(host.nodes)}"
