"""Check that a host is the one that a launch was planned for. A plan's binding means nothing on other hardware."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from so_tui.launch.preparation import Launch
from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.types import Gpu, Machine, NumaNode
from so_tui.plan.types import RankBinding
from so_tui.spec import Refusal, Refused
from so_tui.units import memory_size

_LEAST_MEMORY = 0.9
"""Share of a NUMA node's planned memory that must be present. The kernel's own share varies a little from boot to boot."""


class HostDiffersError(Refused):
    """The host lacks something that the plan uses."""


def refuse_different_host(launch: Launch, host: Machine) -> None:
    """Compare the GPUs, NUMA nodes and cores that the launch uses with those of a host.

    Raises:
        HostDiffersError: With the codes ``gpu-missing``, ``gpu-differs``, ``numa-node-missing``, ``numa-node-differs``,
            ``cores-not-allowed``.
    """
    binding = launch.plan.binding
    differences = (
        *_gpus(binding, launch.machine, host),
        *_numa_nodes(binding, launch.machine, host),
        *_cores(binding, host),
    )
    if differences:
        raise HostDiffersError(differences)


def software_differences(planned: Machine, host: Machine) -> tuple[Refusal, ...]:
    """Return in what torch and DeepSpeed differ from those planned for (``software-differs``). They do not prevent the start."""
    pairs = (
        ("torch", planned.software.torch, host.software.torch),
        ("DeepSpeed", planned.software.deepspeed, host.software.deepspeed),
    )
    return tuple(
        Refusal(
            "software-differs",
            f"{name} {found} is installed, and the plan was made for {name} {expected}",
        )
        for name, expected, found in pairs
        if found != expected
    )


def _gpus(binding: tuple[RankBinding, ...], planned: Machine, host: Machine) -> Iterator[Refusal]:
    expected = {gpu.index: gpu for gpu in planned.gpus}
    present = {gpu.index: gpu for gpu in host.gpus}
    for index in (rank.gpu for rank in binding if rank.gpu is not None):
        if index not in present:
            yield Refusal(
                "gpu-missing",
                f"the plan uses GPU {index}, and {host.hostname} has {len(present)} GPUs",
            )
        elif index in expected:
            found, wanted = _identities(present[index], expected[index])
            if found != wanted:
                yield Refusal(
                    "gpu-differs",
                    f"GPU {index} of {host.hostname} is {found}, and the plan was made for {wanted}",
                )


def _identities(one: Gpu, other: Gpu) -> tuple[str, str]:
    """Return the UUIDs of two GPUs, or their bus addresses if one has no UUID because NVML failed."""
    return (one.uuid, other.uuid) if one.uuid and other.uuid else (one.pci_bus_id, other.pci_bus_id)


def _numa_nodes(
    binding: tuple[RankBinding, ...], planned: Machine, host: Machine
) -> Iterator[Refusal]:
    used = {rank.numa_node for rank in binding if rank.numa_node is not None} | {
        node for rank in binding for node in rank.memory_policy.nodes
    }
    expected = {node.id: node for node in planned.numa_nodes}
    present = {node.id: node for node in host.numa_nodes}
    if missing := used - present.keys():
        yield Refusal(
            "numa-node-missing",
            f"the plan uses {_named(missing)}, which {host.hostname} does not have",
        )
    cores = {cpu for rank in binding for cpu in rank.cpus}
    grows = planned.memory_grows or host.memory_grows
    for node in sorted(used & expected.keys() & present.keys()):
        yield from _node(expected[node], present[node], cores, host.hostname, memory_grows=grows)


def _node(
    expected: NumaNode, found: NumaNode, cores: set[int], hostname: str, *, memory_grows: bool
) -> Iterator[Refusal]:
    where = f"NUMA node {found.id} of {hostname}"
    if missing := (cores & set(expected.cpus)) - set(found.cpus):
        yield Refusal(
            "numa-node-differs",
            f"{where} does not contain cores {cpu_ranges(missing)}, which the plan uses",
        )
    wanted, total = expected.memory_total_bytes, found.memory_total_bytes
    if not memory_grows and total < _LEAST_MEMORY * wanted:
        yield Refusal(
            "numa-node-differs",
            f"{where} has {memory_size(total)} of memory, and the plan was made for {memory_size(wanted)}",
        )


def _named(nodes: Iterable[int]) -> str:
    """Return ``NUMA node 2`` or ``NUMA nodes 0, 1 and 3``."""
    *first, last = map(str, sorted(nodes))
    return f"NUMA nodes {', '.join(first)} and {last}" if first else f"NUMA node {last}"


def _cores(binding: tuple[RankBinding, ...], host: Machine) -> Iterator[Refusal]:
    if missing := {cpu for rank in binding for cpu in rank.cpus} - set(host.allowed_cpus):
        yield Refusal(
            "cores-not-allowed",
            f"the plan uses cores {cpu_ranges(missing)}, which may not be used on {host.hostname}",
        )
