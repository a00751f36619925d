"""Read AMD's GPUs from the topology of the kernel's compute driver (KFD) in sysfs.

Each node of the topology is a processor: the cores of a NUMA node, or a GPU. Its files have a name and a number on each line. Linux writes
them in ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``; ``include/uapi/linux/kfd_sysfs.h`` names the constants.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter

from msgspec import Struct

from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import NumaNode

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_MOST_NODES, _MOST_PARTS = 1024, 64
"""Bounds far above any real machine: of the topology, and of one node's banks or links."""
_MOST_BYTES = 1 << 50
_NODE = re.compile(r"0|[1-9][0-9]{0,4}")
_LINE = re.compile(r"^(\w+) ([0-9]{1,20})$", re.MULTILINE)
_GPU_HEAPS = (1, 2)
"""``HSA_MEM_HEAP_TYPE_FB_PUBLIC`` and ``_PRIVATE``: memory of the GPU that the CPU can address, and that it cannot."""
_SAME_SOCKET = 13
"""Weight of the link between CPU and GPU of one socket (``KFD_CRAT_INTRA_SOCKET_WEIGHT``), by which ROCm too knows an APU."""


class KfdGpu(Struct, frozen=True, kw_only=True):
    """A GPU that this process may use."""

    bus_id: str
    uuid: str | None
    """As ROCm writes it in ROCR_VISIBLE_DEVICES: ``GPU-6cdb410c2f219ac0``."""
    numa_node: int | None
    """CPU node with the shortest link."""
    memory_node: int | None
    """The same where GPU and CPU share a socket, and so its memory: the GPU has none of its own."""
    memory_bytes: int | None
    partitions: int
    """Into how many devices it is split (compute partitions, as CPX has them); 1 if it is whole."""


def kfd_gpus(files: SystemFiles, nodes: tuple[NumaNode, ...]) -> tuple[KfdGpu, ...] | None:
    """Return the GPUs in ROCm's order; None without a topology.

    The kernel lets no process read the properties of a GPU that its control group withholds.
    """
    ids = sorted(int(name) for name in files.names(_NODES) if _NODE.fullmatch(name))[:_MOST_NODES]
    if not ids:
        return None
    found = {node: _numbers(files, f"{_NODES}/{node}/properties") for node in ids}
    # KFD numbers the NUMA nodes that have cores first, in ascending order.
    with_cores = [
        node
        for node, properties in found.items()
        if properties.get("cpu_cores_count") and not properties.get("simd_count")
    ]
    homes = dict(zip(with_cores, (node for node in nodes if node.kind == "cpu"), strict=False))
    gpus = {node: properties for node, properties in found.items() if properties.get("simd_count")}
    parts = Counter(map(_bus_id, gpus.values()))
    firsts = {_bus_id(properties): node for node, properties in reversed(gpus.items())}
    return tuple(
        _gpu(files, node, gpus[node], homes, parts[bus_id])
        for bus_id, node in sorted(firsts.items(), key=itemgetter(1))
    )


def _gpu(
    files: SystemFiles,
    node: int,
    properties: dict[str, int],
    homes: dict[int, NumaNode],
    partitions: int,
) -> KfdGpu:
    links = [link for link in _parts(files, node, "io_links") if link.get("node_to") in homes]
    nearest = min(links, key=lambda link: link.get("weight", 1 << 32), default={})
    home = homes.get(nearest.get("node_to", -1))
    shared = home if nearest.get("weight") == _SAME_SOCKET else None
    banks = [
        bank for bank in _parts(files, node, "mem_banks") if bank.get("heap_type") in _GPU_HEAPS
    ]
    own = partitions * sum(bank.get("size_in_bytes", 0) for bank in banks)
    unique = properties.get("unique_id")
    return KfdGpu(
        bus_id=_bus_id(properties),
        uuid=f"GPU-{unique:016x}" if unique else None,
        numa_node=home.id if home else None,
        memory_node=shared.id if shared else None,
        memory_bytes=shared.memory_total_bytes
        if shared
        else own
        if 0 < own <= _MOST_BYTES
        else None,
        partitions=partitions,
    )


def _bus_id(properties: dict[str, int]) -> str:
    """Return the PCI address as sysfs writes it. The function number counts partitions; the device itself has 0."""
    location = properties.get("location_id", 0)
    return (
        f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"
    )


def _parts(files: SystemFiles, node: int, kind: str) -> Iterator[dict[str, int]]:
    folder = f"{_NODES}/{node}/{kind}"
    for name in files.names(folder)[:_MOST_PARTS]:
        yield _numbers(files, f"{folder}/{name}/properties")


def _numbers(files: SystemFiles, name: str) -> dict[str, int]:
    """Return the lines of a name and a number of at most 64 bits; anything else is left out."""
    numbers = {key: int(digits) for key, digits in _LINE.findall(files.text(name) or "")}
    return {key: number for key, number in numbers.items() if number < 1 << 64}
