"""Machines by name, as published: to plan for one that is not at hand. None of them was measured.

Problem code:
    unknown-machine: There is neither a file nor a machine of this name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.machine.inspect import load_machine
from so_tui.machine.types import Gpu, Machine, Mpam, Network, NumaNode, Software
from so_tui.spec.check import path_fault
from so_tui.spec.errors import nearest, reject, shown

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
_GRACE = "Neoverse-V2"


class Description(Struct, frozen=True, kw_only=True):
    """One kind of host. Its CPU nodes are alike, and so are its GPUs."""

    title: str
    source: str
    """Where the figures are published."""
    cpu: str = _GRACE
    nodes: int
    cores: int = 72
    """Of each CPU node."""
    threads: int = 1
    """Of each core."""
    node_mib: int
    gpu: str
    gpus_per_node: int = 1
    gpu_mib: int
    gpu_nodes: tuple[int, ...] = ()
    """NUMA nodes of the GPUs' own memory; none where the GPU is on PCIe."""
    one_memory: bool = False
    """Whether the memory of a node is that of its CPU and of its GPU (an APU)."""
    network: Network | None = None


MACHINES = msgspec.toml.decode(
    Path(__file__).with_name("known.toml").read_bytes(), type=dict[str, Description]
)
"""Machines by the name that ``--machine`` takes."""


def machine_of(given: str) -> Machine:
    """Return the machine of a name in ``MACHINES``, or else of a file.

    Raises:
        InputError: There is neither, or it cannot be a file (``invalid-path``); otherwise as for
            ``load_machine``.
    """
    if fault := path_fault(given):
        raise reject("invalid-path", "--machine", shown(given), fault, "Give another name.")
    path = Path(given).expanduser()
    if given in MACHINES or not (path.suffix or "/" in given or path.exists()):
        return named_machine(given)
    _LOG.info("machine file %s", path)
    return load_machine(path)


def named_machine(name: str) -> Machine:
    """Return a machine by its name in ``MACHINES``. Raises InputError (``unknown-machine``)."""
    if name in MACHINES:
        _LOG.info("machine %s as published: %s", name, MACHINES[name].source)
        return _machine(name, MACHINES[name])
    raise reject(
        "unknown-machine",
        "--machine",
        shown(name),
        "is no machine that is known by name, and no file",
        f"{nearest(name, tuple(MACHINES))}Names: {', '.join(MACHINES)}. Or give a file that "
        "`so-tui inspect --json > FILE` wrote there.",
    )


def _machine(name: str, of: Description) -> Machine:
    # Second threads of the cores follow those of all nodes, as Linux numbers them.
    cores = of.nodes * of.cores
    cpus = tuple(range(of.threads * cores))
    nodes = tuple(
        NumaNode(
            id=node,
            kind="cpu",
            cpus=tuple(cpu for cpu in cpus if cpu % cores // of.cores == node),
            memory_total_bytes=of.node_mib * _MIB,
        )
        for node in range(of.nodes)
    )
    on_gpus = tuple(
        NumaNode(id=node, kind="gpu-memory", cpus=(), memory_total_bytes=of.gpu_mib * _MIB)
        for node in of.gpu_nodes
    )
    siblings = tuple(cpus[core::cores] for core in range(cores))
    host_bytes = of.nodes * of.node_mib * _MIB
    on_grace = of.cpu == _GRACE
    return Machine(
        hostname=name,
        cpu_name=of.cpu,
        architecture="aarch64" if on_grace else "x86_64",
        page_size_bytes=65_536 if on_grace else 4096,
        online_cpus=cpus,
        allowed_cpus=cpus,
        host_memory_bytes=host_bytes,
        shm_total_bytes=host_bytes // 2,
        mpam=Mpam(state="unknown", evidence="a published description"),
        software=Software(),
        numa_nodes=(*nodes, *on_gpus),
        gpus=tuple(_gpus(of, nodes)),
        network=of.network,
        smt_siblings=siblings if of.threads > 1 else (),
        live=False,
        notes=(f"{name} is described from publications ({of.source}), not measured",),
    )


def _gpus(of: Description, nodes: tuple[NumaNode, ...]) -> Iterator[Gpu]:
    for index in range(of.nodes * of.gpus_per_node):
        node = nodes[index // of.gpus_per_node]
        yield Gpu(
            index=index,
            name=of.gpu,
            pci_bus_id=f"{index:04x}:01:00.0",
            numa_node=node.id,
            memory_node=node.id if of.one_memory else of.gpu_nodes[index] if of.gpu_nodes else None,
            cpus=node.cpus,
            memory_total_bytes=of.gpu_mib * _MIB,
            c2c=bool(of.gpu_nodes),
            vendor="amd" if of.gpu.startswith("AMD") else "nvidia",
        )
