"""Whether memory suffices: what a run needs of each memory pool, what there is, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from so_tui.plan.facts.memory import MemoryPool, NodeNeed, Shortage
from so_tui.plan.resources import Resources, Supply
from so_tui.plan.terms import MemoryTerm
from so_tui.plan.types import GPU_MARGIN, HOST_MARGIN, TIGHT_MARGIN, Verdict
from so_tui.units import memory_size


class Demand(Struct, frozen=True):
    """Peak bytes: on the fullest GPU, per CPU node, in /dev/shm."""

    gpu_bytes: int
    node_bytes: dict[int, int]
    shm_bytes: int


def demand_of(terms: Sequence[MemoryTerm], rank_nodes: Sequence[int]) -> Demand:
    """Add the terms up; ``rank_nodes`` are the CPU nodes on which the ranks of this host allocate."""
    on_nodes = [term for term in terms if term.location == "node"]
    common = sum(term.bytes for term in on_nodes if term.rank is None)
    node_bytes: dict[int, int] = {}
    for rank, node in enumerate(rank_nodes):
        own = sum(term.bytes for term in on_nodes if term.rank == rank)
        node_bytes[node] = node_bytes.get(node, 0) + common + own
    return Demand(
        gpu_bytes=sum(term.bytes for term in terms if term.location == "gpu"),
        node_bytes=node_bytes,
        shm_bytes=sum(term.bytes for term in terms if term.location == "shm"),
    )


def host_room(demand: Demand, resources: Resources) -> int:
    """Return the host memory that each rank may take beyond this demand, with the margin left free."""
    supply = resources.supply
    ranks_on = {node: max(1, resources.nodes.count(node)) for node in demand.node_bytes}
    usable = 1 - node_margin(supply)
    free = [
        (usable * supply.node_bytes.get(node, 0) - needs) / ranks_on[node]
        for node, needs in demand.node_bytes.items()
    ]
    if supply.limit_bytes is not None:
        free.append(
            (usable * supply.limit_bytes - sum(demand.node_bytes.values()))
            / max(1, resources.ranks)
        )
    return int(min(free, default=0.0))


def judge(demand: Demand, supply: Supply) -> tuple[Verdict, tuple[Shortage, ...]]:
    """Return whether it fits, and where it does not, worst first."""
    margin = node_margin(supply)
    # Nodes are grouped only where there is something to say of them.
    any_short = any(
        needs > (1 - margin) * supply.node_bytes.get(node, 0)
        for node, needs in demand.node_bytes.items()
    )
    hosts = node_needs(demand, supply) if any_short else ()
    found = [
        _short("gpu", (), demand.gpu_bytes, supply.gpu_bytes, GPU_MARGIN),
        *(_short("node", host.nodes, host.needs, host.has, margin) for host in hosts),
        _short("limit", (), sum(demand.node_bytes.values()), supply.limit_bytes, margin),
        _short("shm", (), demand.shm_bytes, supply.shm_bytes, TIGHT_MARGIN),
    ]
    shortages = sorted(
        (short for short in found if short),
        key=lambda short: short.needs / max(1, short.has),
        reverse=True,
    )
    if any(short.fatal for short in shortages):
        return "does not fit", tuple(short for short in shortages if short.fatal)
    return ("tight" if shortages else "fits"), tuple(shortages)


def node_margin(supply: Supply) -> float:
    """Return the share of a CPU node that stays free; where it is the GPU's memory too, as much as of a GPU's."""
    return GPU_MARGIN if supply.one_memory else HOST_MARGIN


def node_needs(demand: Demand, supply: Supply) -> tuple[NodeNeed, ...]:
    """Return what CPU nodes need and have; nodes whose figures are written the same share one entry."""
    groups: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for node, needs in sorted(demand.node_bytes.items()):
        has = supply.node_bytes.get(node, 0)
        groups.setdefault((memory_size(needs), memory_size(has)), []).append((node, needs, has))
    return tuple(_node_need(group) for group in groups.values())


def _node_need(group: Sequence[tuple[int, int, int]]) -> NodeNeed:
    _, needs, has = max(group, key=lambda found: found[1] / max(1, found[2]))
    return NodeNeed(tuple(node for node, _, _ in group), needs, has)


def _short(
    pool: MemoryPool, nodes: tuple[int, ...], needs: int, has: int | None, margin: float
) -> Shortage | None:
    if has is None or needs <= (1 - margin) * has:
        return None
    return Shortage(
        pool=pool, nodes=nodes, needs=needs, has=has, fatal=needs > (1 - TIGHT_MARGIN) * has
    )
