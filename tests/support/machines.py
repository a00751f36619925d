"""Machines as the planner sees them, built directly."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from so_tui.machine.types import Gpu, Machine, Mpam, NumaNode, Software

MIB = 2**20


def superchips(
    count: int,
    *,
    node_mib: int = 117_000,
    hbm_mib: int = 97_280,
    name: str = "NVIDIA GH200 120GB",
    cores: int = 72,
) -> Machine:
    """``count`` Grace Hopper superchips, one CPU node and one GPU memory node per chip."""
    nodes: list[NumaNode] = []
    memories: list[NumaNode] = []
    gpus: list[Gpu] = []
    for chip in range(count):
        cpus, own = tuple(range(cores * chip, cores * (chip + 1))), count + 8 * chip
        node = NumaNode(id=chip, kind="cpu", cpus=cpus, memory_total_bytes=node_mib * MIB)
        memory = replace(node, id=own, kind="gpu-memory", cpus=(), memory_total_bytes=hbm_mib * MIB)
        gpu = Gpu(index=chip, name=name, pci_bus_id=f"00{chip}9:01:00.0", c2c=True)
        place = {"numa_node": chip, "memory_node": own, "cpus": cpus}
        nodes.append(node)
        memories.append(memory)
        gpus.append(replace(gpu, memory_total_bytes=hbm_mib * MIB, **place))
    nodes += memories
    return _machine(f"gh200-{count}x", "Neoverse-V2", "aarch64", nodes, gpus)


def x86(
    gpu: str = "",
    *,
    gpu_count: int = 1,
    cores: int = 16,
    memory_mib: int = 128 * 1024,
    gpu_mib: int = 143_771,
) -> Machine:
    node = NumaNode(id=0, kind="cpu", cpus=tuple(range(cores)), memory_total_bytes=memory_mib * MIB)
    one = Gpu(
        index=0,
        name=gpu,
        pci_bus_id="",
        numa_node=0,
        cpus=node.cpus,
        memory_total_bytes=gpu_mib * MIB,
        vendor="amd" if "AMD" in gpu else "nvidia",
    )
    gpus = [
        replace(one, index=index, pci_bus_id=f"0000:{index + 1:02x}:00.0")
        for index in range(gpu_count if gpu else 0)
    ]
    return _machine("box", "Xeon", "x86_64", [node], gpus)


def _machine(
    hostname: str, cpu_name: str, architecture: str, nodes: list[NumaNode], gpus: list[Gpu]
) -> Machine:
    cpus = tuple(cpu for node in nodes for cpu in node.cpus)
    total = sum(node.memory_total_bytes for node in nodes if node.kind == "cpu")
    return Machine(
        hostname=hostname,
        cpu_name=cpu_name,
        architecture=architecture,
        page_size_bytes=4096,
        online_cpus=cpus,
        allowed_cpus=cpus,
        host_memory_bytes=total,
        shm_total_bytes=total // 2,
        mpam=Mpam(state="off", evidence=""),
        software=Software(),
        numa_nodes=tuple(nodes),
        gpus=tuple(gpus),
    )


def machine_json(machine: Machine) -> bytes:
    return msgspec.json.encode(machine)
