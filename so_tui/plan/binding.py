"""Cores and memory of each rank, and what DeepSpeed's launcher would do by itself and with the core
list that so-tui passes to it.

A rank's cores are those of the CPU node that its GPU is attached to, divided evenly among the ranks
of that node. Launcher, trainer and dashboard all use these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from so_tui.machine.host import contiguous_runs, cpu_ranges
from so_tui.machine.types import Cores, Cpus, Gpu, Machine, Nodes
from so_tui.plan.plan import Binding, DeepSpeedBinding, MemoryPolicy, RankBinding
from so_tui.spec.errors import reject

# Emulates what DeepSpeed 0.19.8's launcher decides for ``--bind_cores_to_rank --bind_core_list``,
# as a pure function.
#
# Follows ``deepspeed/utils/numa.py``; a test compares the two. Plans show what it does on machines
# that it was not written for: nodes without CPUs that are a GPU's memory, SMT numbering, cores
# that span nodes.


def _numactl_nodes(nodes: Nodes) -> Cores:
    """Return CPUs per node as DeepSpeed reads them from ``numactl --hardware``: it counts the
    nodes, then looks for ids below that.
    """
    by_id = {node.id: node.cpus for node in nodes}
    return tuple(by_id[number] for number in range(len(nodes)) if number in by_id)


def _numactl_prefix(
    nodes: Cores, core_list: Sequence[int], ranks: int, rank: int
) -> tuple[Cpus, tuple[str, ...]]:
    """Return the cores and the numactl command prefix of a rank. ``OMP_NUM_THREADS`` is the number
    of those cores.

    The ascending core list is cut into equal slices; the remainder is not used. The slice's memory
    is the first node that holds all of it, if there is one: bound to that node; or, where there are
    as many nodes without CPUs as with, taken for a CPU with flat high-bandwidth memory,
    *preferring* the memory of the node without CPUs. There are at least as many cores as ranks.
    """
    share = len(core_list) // ranks
    cores = tuple(core_list[share * rank : share * (rank + 1)])
    return cores, ("numactl", *_memory_option(nodes, set(cores)), "-C", cpu_ranges(cores))


def _memory_option(nodes: Cores, cores: set[int]) -> tuple[str, ...]:
    with_cpus = [number for number, cpus in enumerate(nodes) if cpus]
    without_cpus = [number for number, cpus in enumerate(nodes) if not cpus]
    holding = [number for number, cpus in enumerate(nodes) if cores <= set(cpus)]
    if without_cpus and len(without_cpus) == len(with_cpus):
        flat = dict(zip(with_cpus, without_cpus, strict=True))
        return ("-p", str(flat[holding[0]])) if holding else ()
    if groups := _repeated(nodes):
        together = (group for number in holding for group in groups if number in group)
        return next((("-m", ",".join(map(str, group))) for group in together), ())
    return ("-m", str(holding[0])) if holding else ()


def _repeated(nodes: Cores) -> list[list[int]]:
    """Return groups of neighbouring nodes with the same CPUs (``numa=fake``)."""
    groups = (list(group) for _, group in groupby(range(len(nodes)), key=nodes.__getitem__))
    return [group for group in groups if len(group) > 1 and nodes[group[0]]]


Gpus = int | tuple[int, ...]
"""How many GPUs, or which."""
_MAIN_CORES = 3
"""Cores of the training process where a rank has eight or more: for Python, autograd and copies."""
_ENOUGH_CORES = 8


class _CpuGroup(NamedTuple):
    """CPUs of one CPU node, or of several that list the same CPUs (``numa=fake``)."""

    nodes: tuple[int, ...]
    cpus: Cpus
    """Those that this process may use."""


def bind_ranks(machine: Machine, gpus: Gpus, *, cpu_adam_cores_fraction: float) -> Binding:
    """Return one binding per rank, with cores for an Adam worker.

    Args:
        machine: Its nodes, GPUs and allowed CPUs.
        gpus: A count (the first ones) or host indices; ranks follow ascending indices, because
            DeepSpeed sorts its ``--include`` list. Without whole GPUs it is the number of ranks,
            spread over the CPU nodes.
        cpu_adam_cores_fraction: The Adam worker's share.

    Raises:
        InputError: None of the machine's CPUs may be used (``no-usable-cpu``).
    """
    ranks = gpus if isinstance(gpus, int) else len(gpus)
    wanted = chosen_gpus(machine, gpus) or (None,) * ranks
    homes = _homes(_cpu_groups(machine), wanted)
    # Each rank's share of its CPUs; with more ranks than cores a core is shared.
    cores = tuple(
        _slice(_cores(machine, home.cpus), homes.count(home), homes[:rank].count(home))
        for rank, home in enumerate(homes)
    )
    policies = tuple(_memory_policy(machine, home) for home in homes)
    listed = _deepspeed(machine, cores, policies)
    # Without a list the launcher takes the numbers below the count of physical cores, allowed or
    # not.
    physical = sum(len(_cores(machine, cpus)) for cpus in {node.cpus for node in machine.cpu_nodes})
    unlisted = _launched(machine, list(range(physical)), cores, policies)
    split = [_split_cores(by_core(machine, cpus), cpu_adam_cores_fraction) for cpus in cores]
    return tuple(
        RankBinding(
            rank=rank,
            gpu=gpu.index if gpu else None,
            numa_node=gpu.numa_node if gpu and gpu.numa_node in home.nodes else home.nodes[0],
            cpus=cores[rank],
            main_cpus=split[rank][0],
            adam_cpus=split[rank][1],
            memory_policy=policies[rank],
            deepspeed=listed[rank],
            deepspeed_unlisted=unlisted[rank],
        )
        for rank, (gpu, home) in enumerate(zip(wanted, homes, strict=True))
    )


def core_list(bindings: Sequence[RankBinding]) -> str:
    """Return the cores for DeepSpeed's ``--bind_core_list``, ascending as required: cut into equal
    slices, they are ``deepspeed.cpus``.
    """
    return cpu_ranges({cpu for binding in bindings for cpu in binding.deepspeed.cpus})


def uses_numactl(bindings: Sequence[RankBinding]) -> bool:
    """Return whether the launcher gets ``--bind_cores_to_rank --bind_core_list``."""
    return any(binding.deepspeed.numactl for binding in bindings)


def _split_cores(cpus: Sequence[int], cpu_adam_cores_fraction: float) -> tuple[Cpus, Cpus]:
    """Return the cores of the training process and of its Adam worker, which gets the fraction,
    rounded down, from the end of ``cpus``.

    The training process gets at least 3 of 8 or more cores, else at least 1; a single core is
    shared.
    """
    count = len(cpus)
    if count == 1:
        return tuple(cpus), tuple(cpus)
    main = min(_MAIN_CORES, count - 1) if count >= _ENOUGH_CORES else 1
    # The small term corrects products such as 0.7 * 10 = 6.999...
    adam = max(1, min(int(count * cpu_adam_cores_fraction + 1e-9), count - main))
    return tuple(sorted(cpus[: count - adam])), tuple(sorted(cpus[count - adam :]))


def whole_gpus(machine: Machine) -> tuple[Gpu, ...]:
    """Return the GPUs that a rank can use, in index order: those that are not partitioned, of which
    a rank would see one part.
    """
    return tuple(sorted((gpu for gpu in machine.gpus if not gpu.mig), key=lambda gpu: gpu.index))


def chosen_gpus(machine: Machine, gpus: Gpus) -> tuple[Gpu, ...]:
    """Return the first whole GPUs of a count, or those of these indices, in index order, without
    missing ones.
    """
    whole = whole_gpus(machine)
    if isinstance(gpus, int):
        return whole[:gpus]
    return tuple(gpu for gpu in whole if gpu.index in gpus)


def _cpu_groups(machine: Machine) -> tuple[_CpuGroup, ...]:
    allowed = set(machine.allowed_cpus)
    nodes: dict[Cpus, list[int]] = {}
    for node in machine.cpu_nodes:
        if allowed.intersection(node.cpus):
            nodes.setdefault(node.cpus, []).append(node.id)
    if not nodes:
        raise reject(
            "no-usable-cpu",
            "allowed_cpus",
            cpu_ranges(allowed),
            "none of the CPUs that may be used belongs to a NUMA node",
            "Start so-tui where it may use CPUs of this machine.",
        )
    return tuple(
        _CpuGroup(tuple(ids), tuple(cpu for cpu in cpus if cpu in allowed))
        for cpus, ids in nodes.items()
    )


def _homes(groups: tuple[_CpuGroup, ...], wanted: tuple[Gpu | None, ...]) -> tuple[_CpuGroup, ...]:
    """Return the CPUs of each rank: those its GPU is attached to; ranks without a GPU fill up the
    groups evenly, in ascending order.
    """
    by_node: dict[int | None, _CpuGroup] = {node: group for group in groups for node in group.nodes}
    known = [by_node.get(gpu.numa_node) if gpu else None for gpu in wanted]
    taken = {group: known.count(group) for group in groups}
    extra: list[_CpuGroup] = []
    for _ in range(known.count(None)):
        # The group where one more rank leaves each rank the most cores; the first of equals.
        best = max(groups, key=lambda group: len(group.cpus) / (taken[group] + 1))
        taken[best] += 1
        extra.append(best)
    fill = iter(sorted(extra, key=groups.index))
    return tuple(group if group is not None else next(fill) for group in known)


def _slice(cores: Cores, ranks: int, seat: int) -> Cpus:
    """Return the seat-th of ``ranks`` nearly equal slices, of whole physical cores where there are
    enough.
    """
    if len(cores) < ranks:
        cores = tuple((cpu,) for core in cores for cpu in core)
    first = len(cores) * seat // ranks
    last = max(len(cores) * (seat + 1) // ranks, first + 1)
    return tuple(sorted(cpu for core in cores[first:last] for cpu in core))


def _cores(machine: Machine, cpus: Sequence[int]) -> Cores:
    """Return CPUs by physical core: as the kernel reports them, else as far as their numbers show.

    Linux on x86 mostly numbers the second threads in a range of their own, of the same length as
    the first threads' (0-55,112-167): the n-th CPU of each range is then one core. Arm servers have
    one thread per core.
    """
    if machine.smt_siblings:
        core_of = {cpu: core for core in machine.smt_siblings for cpu in core}
        cores: dict[Cpus, list[int]] = {}
        for cpu in sorted(cpus):
            cores.setdefault(core_of.get(cpu, (cpu,)), []).append(cpu)
        return tuple(tuple(core) for core in cores.values())
    runs = contiguous_runs(cpus)
    if (
        machine.architecture != "aarch64"
        and len(runs) > 1
        and len({len(run) for run in runs}) == 1
        and len(runs[0]) > 1
    ):
        return tuple(zip(*runs, strict=True))
    return tuple((cpu,) for cpu in sorted(cpus))


def physical_cores(machine: Machine) -> int:
    """Return the number of cores on which this process may run ranks: of CPUs, where it is not
    known which of them share one.
    """
    allowed = machine.allowed_cpus
    return len(_cores(machine, allowed) if machine.smt_siblings else allowed)


def by_core(machine: Machine, cpus: Sequence[int]) -> Cpus:
    """Return CPUs with the threads of a core side by side, so that a cut splits at most one
    core.
    """
    return tuple(cpu for core in _cores(machine, cpus) for cpu in core)


def _memory_policy(machine: Machine, home: _CpuGroup) -> MemoryPolicy:
    """Return a policy bound to the rank's own CPU nodes, never to a GPU's memory; the default where
    only one node has memory.
    """
    with_memory = [node.id for node in machine.numa_nodes if node.memory_total_bytes > 0]
    own = tuple(node for node in with_memory if node in home.nodes and _may_use(machine, node))
    if len(with_memory) <= 1 or not own:
        return MemoryPolicy(mode="default")
    return MemoryPolicy(mode="bind", nodes=own)


def _deepspeed(
    machine: Machine, cores: Cores, policies: tuple[MemoryPolicy, ...]
) -> tuple[DeepSpeedBinding, ...]:
    """Return what the launcher does for each rank with our core list. Where it would fail with one,
    it gets none and binds nothing.
    """
    bound = _launched(machine, _listed(machine, cores), cores, policies)
    if not any(binding.error for binding in bound):
        return bound
    allowed = machine.allowed_cpus
    return tuple(
        DeepSpeedBinding(
            cpus=allowed,
            numactl=(),
            omp_num_threads=len(allowed),
            matches=allowed == cpus and policy.mode == "default",
        )
        for cpus, policy in zip(cores, policies, strict=True)
    )


def _listed(machine: Machine, cores: Cores) -> list[int]:
    """Return the list whose equal slices, ascending, lie within each rank's cores, so that
    DeepSpeed binds each rank to its node at least.

    All cores where that works; else as many of each rank's as the smallest share has; else of their
    first threads. Where nothing works (GPUs that are not in node order) all cores, and each rank
    rebinds itself.
    """
    firsts = [sorted(core[0] for core in _cores(machine, cpus)) for cpus in cores]
    # The last two cut every share to the length of the smallest.
    cut = [[share[: min(map(len, shares))] for share in shares] for shares in (cores, firsts)]
    for shares in (cores, *cut):
        listed = sorted({cpu for share in shares for cpu in share})
        size = len(listed) // len(cores)
        if all(
            set(listed[size * rank : size * (rank + 1)]) <= set(cpus)
            for rank, cpus in enumerate(cores)
        ):
            return listed
    return sorted({cpu for cpus in cores for cpu in cpus})


def _launched(
    machine: Machine, listed: list[int], cores: Cores, policies: tuple[MemoryPolicy, ...]
) -> tuple[DeepSpeedBinding, ...]:
    """Return what the launcher does for each rank under a core list. Where numactl was not tried (a
    machine file), it counts as working.
    """
    error = ""
    if machine.software.numactl_works is False:
        error = "numactl does not work here"
    elif len(listed) < len(cores):
        error = "fewer cores than ranks"
    if error:
        failing = DeepSpeedBinding(
            cpus=(), numactl=(), omp_num_threads=0, matches=False, error=error
        )
        return (failing,) * len(cores)
    nodes = _numactl_nodes(machine.numa_nodes)
    started = [_numactl_prefix(nodes, listed, len(cores), rank) for rank in range(len(cores))]
    return tuple(
        DeepSpeedBinding(
            cpus=theirs,
            numactl=numactl,
            omp_num_threads=len(theirs),
            matches=theirs == cpus and _same_memory(numactl, policy),
            error=_numactl_error(machine, theirs, numactl),
        )
        for cpus, policy, (theirs, numactl) in zip(cores, policies, started, strict=True)
    )


def _numactl_error(machine: Machine, cpus: Cpus, numactl: tuple[str, ...]) -> str:
    """Return why numactl would fail to start the rank; empty where it would not."""
    if outside := set(cpus) - set(machine.allowed_cpus):
        return f"cores {cpu_ranges(outside)} may not be used"
    memoryless = {str(node.id) for node in machine.numa_nodes if node.memory_total_bytes == 0}
    forbidden = [
        node
        for node in _bound_nodes(numactl)
        if node in memoryless or not _may_use(machine, int(node))
    ]
    return f"memory of node {forbidden[0]} may not be used" if forbidden else ""


def _same_memory(numactl: tuple[str, ...], policy: MemoryPolicy) -> bool:
    """Return whether the prefix allocates memory as the policy does. With one memory node, ``-m``
    of it changes nothing.
    """
    if "-p" in numactl:
        return False
    if policy.mode == "default":
        return True
    return _bound_nodes(numactl) == [str(node) for node in policy.nodes]


def _bound_nodes(numactl: tuple[str, ...]) -> list[str]:
    return numactl[numactl.index("-m") + 1].split(",") if "-m" in numactl else []


def _may_use(machine: Machine, node: int) -> bool:
    return machine.allowed_memory_nodes is None or node in machine.allowed_memory_nodes


# How ranks are bound, in words.


def deepspeed_text(binding: DeepSpeedBinding) -> str:
    """Return what DeepSpeed's launcher does, for a table: ``the same``, the numactl prefix, or why
    it fails.
    """
    if binding.error:
        return f"fails: {binding.error}"
    if binding.matches:
        return "the same"
    return " ".join(binding.numactl) or f"unbound, cores {cpu_ranges(binding.cpus)}"
