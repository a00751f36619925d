"""Whether a node is the one that a launch was planned for. A plan's binding means nothing on other hardware."""

from __future__ import annotations

from collections.abc import Iterator

from so_tui.launch.preparation import Launch
from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.types import Gpu, Machine
from so_tui.plan.types import RankBinding
from so_tui.spec import Refusal, Refused


class NodeDiffersError(Refused):
    """The node lacks something that the plan's binding uses."""


def refuse_different_node(launch: Launch, node: Machine) -> None:
    """Compare the GPUs, NUMA nodes and cores that the launch uses with those of a node.

    Raises:
        NodeDiffersError: With the codes ``gpu-missing``, ``gpu-differs``, ``numa-node-missing``, ``cores-not-allowed``.
    """
    binding = launch.plan.binding
    differences = (*_gpus(binding, launch.machine, node), *_numa_nodes(binding, node), *_cores(binding, node))
    if differences:
        raise NodeDiffersError(differences)


def _gpus(binding: tuple[RankBinding, ...], planned: Machine, node: Machine) -> Iterator[Refusal]:
    expected = {gpu.index: gpu for gpu in planned.gpus}
    present = {gpu.index: gpu for gpu in node.gpus}
    for index in (rank.gpu for rank in binding if rank.gpu is not None):
        if index not in present:
            yield Refusal("gpu-missing", f"the plan uses GPU {index}, and {node.hostname} has {len(present)} GPUs")
        elif index in expected and _identity(present[index]) != _identity(expected[index]):
            found, wanted = _identity(present[index]), _identity(expected[index])
            yield Refusal("gpu-differs", f"GPU {index} of {node.hostname} is {found}, and the plan was made for {wanted}")


def _identity(gpu: Gpu) -> str:
    return gpu.uuid or gpu.pci_bus_id


def _numa_nodes(binding: tuple[RankBinding, ...], node: Machine) -> Iterator[Refusal]:
    used = {rank.numa_node for rank in binding if rank.numa_node is not None} | {
        memory for rank in binding for memory in rank.memory_policy.nodes
    }
    if missing := used - {numa_node.id for numa_node in node.numa_nodes}:
        yield Refusal("numa-node-missing", f"the plan uses NUMA node {cpu_ranges(missing)}, which {node.hostname} does not have")


def _cores(binding: tuple[RankBinding, ...], node: Machine) -> Iterator[Refusal]:
    if missing := {cpu for rank in binding for cpu in rank.cpus} - set(node.allowed_cpus):
        yield Refusal("cores-not-allowed", f"the plan uses cores {cpu_ranges(missing)}, which may not be used on {node.hostname}")
