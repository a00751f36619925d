"""Emulates what DeepSpeed 0.19.8's launcher decides for ``--bind_cores_to_rank --bind_core_list``, as a pure function.

Follows ``deepspeed/utils/numa.py``; a test compares the two. Plans show what it does on machines that it was not written for: nodes
without CPUs that are a GPU's memory, SMT numbering, cores that span nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.types import NumaNode

NodeCpus = Sequence[tuple[int, ...]]


def numactl_nodes(nodes: tuple[NumaNode, ...]) -> tuple[tuple[int, ...], ...]:
    """Return CPUs per node as DeepSpeed reads them from ``numactl --hardware``: it counts the nodes, then looks for ids below that."""
    by_id = {node.id: node.cpus for node in nodes}
    return tuple(by_id[number] for number in range(len(nodes)) if number in by_id)


def numactl_prefix(
    nodes: NodeCpus, core_list: Sequence[int], ranks: int, rank: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the cores and the numactl command prefix of a rank. ``OMP_NUM_THREADS`` is the number of those cores.

    The ascending core list is cut into equal slices; the remainder is not used. The slice's memory is the first node that holds
    all of it, if there is one: bound to that node; or, where there are as many nodes without CPUs as with, taken for a CPU with
    flat high-bandwidth memory, *preferring* the memory of the node without CPUs.

    Raises ValueError when there are fewer cores than ranks (DeepSpeed raises AssertionError).
    """
    share = len(core_list) // ranks
    if share < 1:
        raise ValueError(f"{len(core_list)} cores for {ranks} ranks")
    cores = tuple(core_list[share * rank : share * (rank + 1)])
    return cores, ("numactl", *_memory_option(nodes, set(cores)), "-C", cpu_ranges(cores))


def _memory_option(nodes: NodeCpus, cores: set[int]) -> tuple[str, ...]:
    with_cpus = [number for number, cpus in enumerate(nodes) if cpus]
    without_cpus = [number for number, cpus in enumerate(nodes) if not cpus]
    holding = [number for number, cpus in enumerate(nodes) if cores <= set(cpus)]
    if without_cpus and len(without_cpus) == len(with_cpus):
        flat = dict(zip(with_cpus, without_cpus, strict=True))
        return ("-p", str(flat[holding[0]])) if holding else ()
    groups = _repeated(nodes)
    if groups:
        together = (group for number in holding for group in groups if number in group)
        group = next(together, None)
        return ("-m", ",".join(map(str, group))) if group else ()
    return ("-m", str(holding[0])) if holding else ()


def _repeated(nodes: NodeCpus) -> list[list[int]]:
    """Return groups of neighbouring nodes with the same CPUs (``numa=fake``)."""
    groups: list[list[int]] = []
    current: list[int] = []
    for number, cpus in enumerate(nodes):
        if not cpus:
            continue
        if number > 0 and cpus == nodes[number - 1]:
            current = current or [number - 1]
            current.append(number)
        elif current:
            groups.append(current)
            current = []
    return [*groups, current] if current else groups
