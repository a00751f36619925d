"""Which cores and which memory each rank gets, and what DeepSpeed's launcher would do with the core list we hand it.

A rank's cores are those of the CPU node that its GPU hangs off, shared fairly among the ranks of that node. The arithmetic is exact
integers: the launcher, the trainer and the dashboard all take them from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from so_tui.machine.cpulist import contiguous_runs, cpu_ranges
from so_tui.machine.types import Gpu, Machine
from so_tui.plan.deepspeed_numactl import numactl_nodes, numactl_prefix
from so_tui.plan.types import DeepSpeedBinding, MemoryPolicy, RankBinding
from so_tui.spec.errors import InputError, Problem

__all__ = ["bind_ranks", "core_list", "cpu_ranges", "split_cores", "uses_numactl"]

_MAIN_CORES = 3
"""What the training process needs of eight cores or more: its Python thread, autograd's and the copies'."""
_ENOUGH_CORES = 8


class _Place(NamedTuple):
    """CPUs that belong together: one CPU node, or several that list the same CPUs (``numa=fake``)."""

    nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    """Those that may be used."""


def bind_ranks(machine: Machine, gpus: int | tuple[int, ...], *, mode: str, cpu_adam_cores_fraction: float) -> tuple[RankBinding, ...]:
    """One binding per rank.

    ``gpus``: a count (the first ones) or host indices; ranks follow ascending indices, because DeepSpeed sorts its ``--include`` list.
    On a machine without GPUs it is the number of ranks, spread over the CPU nodes.
    ``mode``: only ``superoffload`` parts a rank's cores between the training process and its Adam worker.

    Raises InputError when a GPU is asked for that the machine does not have, or none of its CPUs may be used.
    """
    wanted = _wanted(machine, gpus)
    places = _places(machine)
    homes = _homes(places, wanted)
    cores = _shared_out(machine, homes)
    policies = tuple(_memory_policy(machine, home) for home in homes)
    theirs = _deepspeed(machine, cores, policies)
    bindings = []
    for rank, (gpu, home, cpus) in enumerate(zip(wanted, homes, cores, strict=True)):
        main, adam = split_cores(_by_core(machine, cpus), cpu_adam_cores_fraction) if mode == "superoffload" else (cpus, ())
        bindings.append(
            RankBinding(
                rank=rank,
                gpu=gpu.index if gpu else None,
                numa_node=gpu.numa_node if gpu and gpu.numa_node in home.nodes else home.nodes[0],
                cpus=cpus,
                main_cpus=main,
                adam_cpus=adam,
                memory_policy=policies[rank],
                deepspeed=theirs[rank],
            )
        )
    return tuple(bindings)


def core_list(bindings: Sequence[RankBinding]) -> str:
    """All ranks' cores for DeepSpeed's ``--bind_core_list``, ascending as it demands."""
    return cpu_ranges({cpu for binding in bindings for cpu in binding.cpus})


def uses_numactl(bindings: Sequence[RankBinding]) -> bool:
    """Whether the launcher is to be given ``--bind_cores_to_rank --bind_core_list``."""
    return any(binding.deepspeed.numactl for binding in bindings)


def split_cores(cpus: Sequence[int], cpu_adam_cores_fraction: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(training process's, Adam worker's) cores: the worker gets the fraction, rounded down, from the end of ``cpus``.

    The training process keeps at least 3 of 8 or more cores, else at least 1; of a single core both have it.
    """
    count = len(cpus)
    if count == 1:
        return tuple(cpus), tuple(cpus)
    kept = min(_MAIN_CORES, count - 1) if count >= _ENOUGH_CORES else 1
    # The small term mends products such as 0.7 * 10 = 6.999...
    adam = max(1, min(int(count * cpu_adam_cores_fraction + 1e-9), count - kept))
    return tuple(sorted(cpus[: count - adam])), tuple(sorted(cpus[count - adam :]))


def _wanted(machine: Machine, gpus: int | tuple[int, ...]) -> tuple[Gpu | None, ...]:
    """The GPU of each rank; None for each on a machine without GPUs."""
    if not machine.gpus:
        return (None,) * (gpus if isinstance(gpus, int) else len(gpus))
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    available = sorted(by_index)
    indices = available[:gpus] if isinstance(gpus, int) else sorted(gpus)
    short = isinstance(gpus, int) and gpus > len(available)
    if short or not set(indices) <= set(available) or len(set(indices)) < len(indices):
        message = (
            "the same GPU is named twice" if len(set(indices)) < len(indices) else f"{machine.hostname} has GPU {cpu_ranges(available)}"
        )
        remedy = f"Ask for at most {len(available)}, each once."
        raise InputError(
            [Problem(field="gpus", value=str(gpus) if isinstance(gpus, int) else str(list(gpus)), message=message, remedy=remedy)]
        )
    return tuple(by_index[index] for index in indices)


def _places(machine: Machine) -> tuple[_Place, ...]:
    allowed = set(machine.allowed_cpus)
    nodes: dict[tuple[int, ...], list[int]] = {}
    for node in machine.cpu_nodes:
        nodes.setdefault(node.cpus, []).append(node.id)
    places = [_Place(tuple(ids), tuple(cpu for cpu in cpus if cpu in allowed)) for cpus, ids in nodes.items()]
    usable = tuple(place for place in places if place.cpus)
    if not usable:
        remedy = "Start so-tui where it may use CPUs of this machine."
        message = "none of the CPUs that may be used belongs to a NUMA node"
        raise InputError([Problem(field="allowed_cpus", value=cpu_ranges(allowed), message=message, remedy=remedy)])
    return usable


def _homes(places: tuple[_Place, ...], wanted: tuple[Gpu | None, ...]) -> tuple[_Place, ...]:
    """The place of each rank: its GPU's; ranks without one fill up the places evenly, in ascending order."""
    by_node = {node: place for place in places for node in place.nodes}
    known = [by_node.get(gpu.numa_node) if gpu is not None and gpu.numa_node is not None else None for gpu in wanted]
    taken = {place: known.count(place) for place in places}
    extra: list[_Place] = []
    for _ in range(known.count(None)):
        # The place where one more rank leaves each rank the most cores; the first of equals.
        best = max(places, key=lambda place: len(place.cpus) / (taken[place] + 1))
        taken[best] += 1
        extra.append(best)
    fill = iter(sorted(extra, key=places.index))
    return tuple(place if place is not None else next(fill) for place in known)


def _shared_out(machine: Machine, homes: tuple[_Place, ...]) -> tuple[tuple[int, ...], ...]:
    """Each rank's share of its place, in rank order; with more ranks than cores a core is shared."""
    seats: dict[_Place, int] = {}
    shares = []
    for home in homes:
        seat = seats.get(home, 0)
        seats[home] = seat + 1
        shares.append(_slice(_cores(machine, home.cpus), homes.count(home), seat))
    return tuple(shares)


def _slice(cores: tuple[tuple[int, ...], ...], ranks: int, seat: int) -> tuple[int, ...]:
    """The seat-th of ``ranks`` nearly equal slices; whole physical cores while there are enough of them."""
    if len(cores) < ranks:
        cores = tuple((cpu,) for core in cores for cpu in core)
    first = len(cores) * seat // ranks
    last = max(len(cores) * (seat + 1) // ranks, first + 1)
    return tuple(sorted(cpu for core in cores[first:last] for cpu in core))


def _cores(machine: Machine, cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """CPUs by physical core, as far as their numbers tell.

    A Machine does not list SMT siblings. Linux on x86 numbers the second threads in a range of their own, of the same length as the
    first threads' (0-55,112-167): the n-th CPU of each range is then one core. Arm servers have one thread per core.
    """
    runs = contiguous_runs(cpus)
    if machine.architecture != "aarch64" and len(runs) > 1 and len({len(run) for run in runs}) == 1 and len(runs[0]) > 1:
        return tuple(zip(*runs, strict=True))
    return tuple((cpu,) for cpu in sorted(cpus))


def _by_core(machine: Machine, cpus: Sequence[int]) -> tuple[int, ...]:
    """CPUs in an order that keeps the threads of a core side by side, so that a cut between main and Adam parts at most one core."""
    return tuple(cpu for core in _cores(machine, cpus) for cpu in core)


def _memory_policy(machine: Machine, home: _Place) -> MemoryPolicy:
    """Bound to the rank's own CPU node(s), never to a GPU's memory; nothing to choose where only one node has memory."""
    with_memory = [node for node in machine.numa_nodes if node.memory_total_bytes > 0]
    own = tuple(node.id for node in with_memory if node.id in home.nodes)
    if len(with_memory) <= 1 or not own:
        return MemoryPolicy(mode="default")
    return MemoryPolicy(mode="bind", nodes=own)


def _deepspeed(machine: Machine, cores: tuple[tuple[int, ...], ...], policies: tuple[MemoryPolicy, ...]) -> tuple[DeepSpeedBinding, ...]:
    """What the launcher does for each rank: its own cut of the core list, or nothing where it is started without numactl."""
    prefixes = _prefixes(machine, cores)
    if prefixes is None:
        allowed = machine.allowed_cpus
        return tuple(
            DeepSpeedBinding(cpus=allowed, numactl=(), omp_num_threads=len(allowed), matches=allowed == cpus and policy.mode == "default")
            for cpus, policy in zip(cores, policies, strict=True)
        )
    return tuple(
        DeepSpeedBinding(
            cpus=theirs, numactl=numactl, omp_num_threads=len(theirs), matches=theirs == cpus and _same_memory(numactl, policy)
        )
        for (theirs, numactl), cpus, policy in zip(prefixes, cores, policies, strict=True)
    )


def _prefixes(machine: Machine, cores: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], tuple[str, ...]]] | None:
    """Each rank's (cores, numactl prefix); None where that would end the launcher.

    It would where numactl does not work (a snapshot, where it was not tried, counts as working), with fewer cores than ranks, and when
    numactl is told to bind to a node without memory.
    """
    listed = sorted({cpu for cpus in cores for cpu in cpus})
    if machine.software.numactl_works is False or len(listed) < len(cores):
        return None
    nodes = numactl_nodes(machine.numa_nodes)
    prefixes = [numactl_prefix(nodes, listed, len(cores), rank) for rank in range(len(cores))]
    memoryless = {str(node.id) for node in machine.numa_nodes if node.memory_total_bytes == 0}
    bound = {node for _, prefix in prefixes if "-m" in prefix for node in _bound_nodes(prefix)}
    return None if bound & memoryless else prefixes


def _same_memory(numactl: tuple[str, ...], policy: MemoryPolicy) -> bool:
    """Whether the prefix places memory as the policy does. With one memory node, ``-m`` of it changes nothing."""
    if "-p" in numactl:
        return False
    if policy.mode == "default":
        return True
    return "-m" in numactl and _bound_nodes(numactl) == [str(node) for node in policy.nodes]


def _bound_nodes(numactl: tuple[str, ...]) -> list[str]:
    return numactl[numactl.index("-m") + 1].split(",")
