"""What a run needs on a host, what the host has, and what to say about it. Pure functions; the words for people are made here."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from so_tui.machine.numa import distance
from so_tui.machine.types import Gpu, Machine, NumaNode
from so_tui.plan.types import MemoryTerm, Shortage, Verdict

GPU_MARGIN = 0.08
"""Share of a GPU's memory that stays free in a plan that ``fits``."""
HOST_MARGIN = 0.06
"""The same for host memory, beyond what the operating system keeps."""
TIGHT_MARGIN = 0.015
"""Share that must stay free for a plan to be worth trying: below this the estimates cannot be trusted to hold."""

EACH_GPU = "each GPU"
"""What a shortage of GPU memory says of its place."""
WITHIN_LIMIT = "the host, within its memory limit,"
"""The same where a cgroup limits what all ranks may take."""
DEV_SHM = "/dev/shm"

_RESERVE_SHARE = 0.03
_RESERVE_BYTES = 1_000_000_000


class Supply(Struct, frozen=True):
    """Memory a run may use: bytes per GPU (None: no GPU, or unknown), per CPU node that it may have memory of, in /dev/shm, and in all
    where a cgroup limits it."""

    gpu_bytes: int | None
    node_bytes: dict[int, int]
    shm_bytes: int | None
    limit_bytes: int | None


class Demand(Struct, frozen=True):
    """Peak bytes: on the fullest GPU, per CPU node, in /dev/shm."""

    gpu_bytes: int
    node_bytes: dict[int, int]
    shm_bytes: int


def in_words(short: Shortage) -> str:
    """For people."""
    if short.fatal:
        return f"{short.place} needs {gib(short.needs)}, has {gib(short.has)}"
    return f"{short.place} needs {gib(short.needs)} of {gib(short.has)}: little is left for what is not predicted exactly"


def supply_of(machine: Machine, gpus: Sequence[Gpu]) -> Supply:
    """What the chosen GPUs and the CPU nodes offer, less what the operating system keeps. Totals, not what is free now."""
    sizes = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes is not None]
    return Supply(
        gpu_bytes=min(sizes, default=None),
        node_bytes={node.id: usable(node.memory_total_bytes) for node in memory_nodes(machine)},
        shm_bytes=machine.shm_total_bytes,
        limit_bytes=machine.memory_limit_bytes,
    )


def memory_nodes(machine: Machine) -> tuple[NumaNode, ...]:
    """The CPU nodes that a run may have memory of: a cpuset, as jobs on a part of a node get one, may leave some out."""
    allowed = machine.allowed_memory_nodes
    mine = tuple(node for node in machine.cpu_nodes if allowed is None or node.id in allowed)
    return mine or machine.cpu_nodes


def memory_node(machine: Machine, node_id: int) -> int:
    """Where the kernel takes memory for a rank on the cores of this node: there, else on the nearest node that it may have memory of."""
    nodes = memory_nodes(machine)
    if not nodes or any(node.id == node_id for node in nodes):
        return node_id
    home = machine.node(node_id)
    far = max(home.distances, default=0) + 1
    return min(nodes, key=lambda node: (distance(machine.numa_nodes, home, node.id) or far, node.id)).id


def demand_of(terms: Sequence[MemoryTerm], rank_nodes: Sequence[int]) -> Demand:
    """Adds the terms up; ``rank_nodes`` says which CPU node each rank of this host has its memory from."""
    on_nodes = [term for term in terms if term.place == "node"]
    common = sum(term.bytes for term in on_nodes if term.rank is None)
    node_bytes: dict[int, int] = {}
    for rank, node in enumerate(rank_nodes):
        own = sum(term.bytes for term in on_nodes if term.rank == rank)
        node_bytes[node] = node_bytes.get(node, 0) + common + own
    return Demand(
        gpu_bytes=sum(term.bytes for term in terms if term.place == "gpu"),
        node_bytes=node_bytes,
        shm_bytes=sum(term.bytes for term in terms if term.place == "shm"),
    )


def judge(demand: Demand, supply: Supply) -> tuple[Verdict, tuple[Shortage, ...]]:
    """Whether it fits, and where not: worst first."""
    # Names are looked for where there is something to say.
    any_short = any(needs > (1 - HOST_MARGIN) * supply.node_bytes.get(node, 0) for node, needs in demand.node_bytes.items())
    found = [
        _short(EACH_GPU, demand.gpu_bytes, supply.gpu_bytes, GPU_MARGIN),
        *(_short(nodes, needs, has, HOST_MARGIN) for nodes, needs, has in (alike(demand, supply) if any_short else ())),
        _short(WITHIN_LIMIT, sum(demand.node_bytes.values()), supply.limit_bytes, HOST_MARGIN),
        _short(DEV_SHM, demand.shm_bytes, supply.shm_bytes, TIGHT_MARGIN),
    ]
    shortages = sorted((short for short in found if short), key=lambda short: short.needs / max(1, short.has), reverse=True)
    if any(short.fatal for short in shortages):
        return "does not fit", tuple(short for short in shortages if short.fatal)
    return ("tight" if shortages else "fits"), tuple(shortages)


def alike(demand: Demand, supply: Supply) -> tuple[tuple[str, int, int], ...]:
    """(name, needs, has) of the CPU nodes, those that read the same under one name: ``host node 0``, ``each of host nodes 1, 2, 3``; the
    fullest of them gives the figures.
    """
    groups: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for node, needs in sorted(demand.node_bytes.items()):
        has = supply.node_bytes.get(node, 0)
        groups.setdefault((gib(needs), gib(has)), []).append((node, needs, has))
    return tuple((_names([node for node, _, _ in group]), *_fullest(group)) for group in groups.values())


def _fullest(group: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    _, needs, has = max(group, key=lambda found: found[1] / max(1, found[2]))
    return needs, has


def _names(nodes: Sequence[int]) -> str:
    return f"host node {nodes[0]}" if len(nodes) == 1 else f"each of host nodes {', '.join(map(str, nodes))}"


def _short(place: str, needs: int, has: int | None, margin: float) -> Shortage | None:
    if has is None or needs <= (1 - margin) * has:
        return None
    return Shortage(place, needs, has, needs > (1 - TIGHT_MARGIN) * has)


def usable(total: int) -> int:
    """What of a node's memory a run may use: the operating system and its page tables keep the rest."""
    return max(0, total - max(_RESERVE_BYTES, int(_RESERVE_SHARE * total)))


def gib(size: int) -> str:
    """Bytes for people: 226 GiB, 3.2 GiB, 12 MiB."""
    if size >= 99.5 * 2**30:
        return f"{size / 2**30:.0f} GiB"
    return f"{size / 2**30:.1f} GiB" if size >= 0.95 * 2**30 else f"{size / 2**20:.0f} MiB"
