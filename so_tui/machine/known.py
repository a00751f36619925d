"""Machines by name, as published: to plan for one that is not at hand. None of them was measured.

Problem code:
    unknown-machine: There is neither a file nor a machine of this name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from so_tui.machine.inspect import load_machine
from so_tui.machine.types import Gpu, Machine, Mpam, Network, NumaNode, Software
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


MACHINES: dict[str, Description] = {
    "gh200-480": Description(
        title="1 x GH200 480GB",
        source="memory of its NUMA nodes in a patch for the Linux kernel, January 2025",
        nodes=1,
        node_mib=490_037,
        gpu="NVIDIA GH200 480GB",
        gpu_mib=97_280,
        gpu_nodes=(1,),
    ),
    "gh200-120": Description(
        title="1 x GH200 120GB",
        source="TACC Vista's documentation",
        nodes=1,
        node_mib=117_000,
        gpu="NVIDIA GH200 120GB",
        gpu_mib=97_280,
        gpu_nodes=(1,),
        network=Network(gbit_per_s=400, source="one NDR adapter, TACC Vista's documentation"),
    ),
    "gh200-quad-120": Description(
        title="4 x GH200 120GB",
        source="documentation of CSCS Alps, JUPITER and NCSA DeltaAI",
        nodes=4,
        node_mib=117_000,
        gpu="NVIDIA GH200 120GB",
        gpu_mib=97_280,
        gpu_nodes=(4, 12, 20, 28),
        network=Network(
            gbit_per_s=800,
            source="four adapters of 200 Gb/s, documentation of NCSA DeltaAI and JUPITER",
        ),
    ),
    "gh200-2": Description(
        title="GH200 NVL2: 2 x 144 GB of HBM3e",
        source="memory of its NUMA nodes as users have published it",
        nodes=2,
        node_mib=481_158,
        gpu="NVIDIA GH200 144G HBM3e",
        gpu_mib=146_176,
        gpu_nodes=(2, 10),
    ),
    "gb200-4": Description(
        title="GB200 compute tray: 2 Grace, 4 GPUs",
        source="memory of its NUMA nodes in TensorRT-LLM's technical blog",
        nodes=2,
        node_mib=489_795,
        gpu="NVIDIA GB200",
        gpus_per_node=2,
        gpu_mib=188_416,
        gpu_nodes=(2, 10, 18, 26),
    ),
    "h100-8": Description(
        title="DGX H100: 8 x H100, 2 TB",
        source="NVIDIA's DGX H100 user guide",
        cpu="Intel Xeon Platinum 8480C",
        nodes=2,
        cores=56,
        threads=2,
        node_mib=1_031_000,
        gpu="NVIDIA H100 80GB HBM3",
        gpus_per_node=4,
        network=Network(
            gbit_per_s=3200, source="eight adapters of 400 Gb/s, NVIDIA's DGX H100 user guide"
        ),
        gpu_mib=81_559,
    ),
    "h200-8": Description(
        title="DGX H200: 8 x H200, 2 TB",
        source="NVIDIA's DGX H200 user guide",
        cpu="Intel Xeon Platinum 8480C",
        nodes=2,
        cores=56,
        threads=2,
        node_mib=1_031_000,
        gpu="NVIDIA H200",
        gpus_per_node=4,
        network=Network(
            gbit_per_s=3200, source="eight adapters of 400 Gb/s, NVIDIA's DGX H200 user guide"
        ),
        gpu_mib=143_771,
    ),
    "mi300a-4": Description(
        title="4 x MI300A: one memory of 128 GiB for CPU and GPU of each",
        source="AMD's documentation of MI300A partitioning (SPX, NPS1)",
        cpu="AMD Instinct MI300A Accelerator",
        nodes=4,
        cores=24,
        threads=2,
        node_mib=131_072,
        gpu="AMD Instinct MI300A",
        gpu_mib=131_072,
        one_memory=True,
    ),
}
"""Machines by the name that ``--machine`` takes."""


def machine_of(given: str) -> Machine:
    """Return the machine of a name in ``MACHINES``, or else of a file.

    Raises:
        InputError: There is neither; otherwise as for ``load_machine``.
    """
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
    nodes = tuple(_cpu_nodes(of))
    gpus = tuple(_gpus(of, nodes))
    on_gpus = tuple(
        NumaNode(id=node, kind="gpu-memory", cpus=(), memory_total_bytes=of.gpu_mib * _MIB)
        for node in of.gpu_nodes
    )
    cpus = tuple(sorted(cpu for node in nodes for cpu in node.cpus))
    host_bytes = sum(node.memory_total_bytes for node in nodes)
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
        gpus=gpus,
        network=of.network,
        smt_siblings=tuple(_siblings(of)),
        live=False,
        notes=(f"{name} is described from publications ({of.source}), not measured",),
    )


def _cpu_nodes(of: Description) -> Iterator[NumaNode]:
    """Yield the CPU nodes; second threads of the cores follow those of all nodes, as Linux numbers
    them.
    """
    for node in range(of.nodes):
        first = range(node * of.cores, (node + 1) * of.cores)
        cpus = tuple(
            core + thread * of.nodes * of.cores for thread in range(of.threads) for core in first
        )
        yield NumaNode(id=node, kind="cpu", cpus=cpus, memory_total_bytes=of.node_mib * _MIB)


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


def _siblings(of: Description) -> Iterator[tuple[int, ...]]:
    if of.threads > 1:
        total = of.nodes * of.cores
        yield from (
            tuple(core + thread * total for thread in range(of.threads)) for core in range(total)
        )
