"""One host as a frozen snapshot, written by ``inspect --json`` and read back by ``--machine FILE``.

Sizes are in bytes, cores are the kernel's logical CPU numbers. ``None`` means unknown, never zero.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Literal

from msgspec import Meta, Struct

from so_tui.trust.decoding import prepare
from so_tui.trust.text import brief_line
from so_tui.units import memory_size, plural

UNKNOWN = "unknown"
"""Hostname of a copied system tree that does not contain it."""

# The bounds are far above any real machine; reading a file beyond them fails.
MOST_BYTES = 1 << 50
Size = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
"""Bytes of memory."""
NodeKind = Literal["cpu", "gpu-memory", "empty"]
Vendor = Literal["nvidia", "amd"]


Cpus = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 16)], ...], Meta(max_length=1 << 16)]
"""The kernel's logical CPU numbers, ascending."""
Cores = tuple[Cpus, ...]
"""CPUs of each of several cores, nodes or ranks."""


class NumaNode(Struct, frozen=True, kw_only=True):
    """One NUMA node: CPUs with their memory, the memory of a GPU, or an empty node reserved for
    one.
    """

    id: int
    kind: NodeKind
    cpus: Cpus
    memory_total_bytes: Size
    memory_free_bytes: Size | None = None
    file_cache_bytes: Size | None = None
    distances: tuple[int, ...] = ()
    """Distance to each online node, in ascending order of nodes."""


Nodes = Annotated[tuple[NumaNode, ...], Meta(max_length=4096)]


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU and its position in the NUMA topology."""

    index: int
    name: str
    pci_bus_id: str
    """Domain:bus:device.function as sysfs writes it, lower case: ``0009:01:00.0``."""
    numa_node: int | None = None
    """CPU node that the GPU is attached to."""
    memory_node: int | None = None
    """NUMA node of the GPU's memory, if the driver exposes one: a node of its own, or on an APU its
    CPU node.
    """
    cpus: Cpus = ()
    memory_total_bytes: Size | None = None
    memory_used_bytes: Size | None = None
    compute_mode: str | None = None
    uuid: str | None = None
    c2c: bool | None = None
    """Whether the GPU is attached by NVLink-C2C; None if the driver does not report it."""
    mig: bool | None = None
    """Whether it is split into several: by MIG, or into AMD's compute partitions."""
    vendor: Vendor = "nvidia"

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is that of its CPU node, as on an APU: what one of them takes, the
        other lacks.
        """
        return self.memory_node is not None and self.memory_node == self.numa_node


class Network(Struct, frozen=True, kw_only=True):
    """What joins a host with others like it."""

    gbit_per_s: Annotated[float, Meta(gt=0, le=1e6)]
    """Each way, of all adapters together: their line rate, or if ``measured`` what collectives
    reach.
    """
    source: str
    """The adapters that were read, where the figure is published, or when and on what it was
    measured; empty where it is assumed.
    """
    measured: bool = False


class Mpam(Struct, frozen=True, kw_only=True):
    """Support for memory bandwidth partitioning (MPAM) on this host, as far as an unprivileged user
    can see.
    """

    state: Literal["off", "kernel", "firmware", "mounted", "unknown"]
    evidence: str


class Software(Struct, frozen=True, kw_only=True):
    """Installed versions, found without importing any package; None if absent."""

    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA version that torch is built for; None for a build for the CPU or for ROCm."""
    torch_rocm: str | None = None
    """ROCm version that torch is built for."""
    deepspeed: str | None = None
    transformers: str | None = None
    datasets: str | None = None
    flash_attn: str | None = None
    """flash-attn 2."""
    flash_attn_3: str | None = None
    flash_attn_4: str | None = None
    numactl: str | None = None
    numactl_works: bool | None = None
    """Whether a trial ``numactl -m NODE -C CPUS true`` succeeded here."""
    mempolicy_works: bool | None = None
    """Whether get_mempolicy(2) succeeds: containers without CAP_SYS_NICE forbid it together with
    set_mempolicy(2).
    """
    nvidia_driver: str | None = None
    amd_driver: str | None = None
    """Version of amdgpu, where it does not come with the kernel."""
    cuda_toolkit: str | None = None
    """Version of nvcc, as torch's extension builder finds it."""
    compiler: str | None = None
    ninja: str | None = None

    @property
    def torch_built_for(self) -> str | None:
        """What torch computes on besides the CPU: ``CUDA 13.0``, ``ROCm 6.4``; None if nothing."""
        return (
            f"CUDA {self.torch_cuda}"
            if self.torch_cuda
            else f"ROCm {self.torch_rocm}"
            if self.torch_rocm
            else None
        )

    @property
    def attention_packages(self) -> frozenset[str]:
        """Installed distributions with attention kernels."""
        versions = {
            "flash-attn": self.flash_attn,
            "flash_attn_3": self.flash_attn_3,
            "flash-attn-4": self.flash_attn_4,
        }
        return frozenset(package for package, version in versions.items() if version)


class Machine(Struct, frozen=True, kw_only=True):
    """A host: processors, memory, NUMA nodes, GPUs and software."""

    schema: Literal[1] = 1
    hostname: str
    cpu_name: str
    architecture: str
    page_size_bytes: Size | None
    online_cpus: Cpus
    allowed_cpus: Cpus
    host_memory_bytes: Size
    """Memory of the CPU nodes; on Grace, MemTotal would include GPU memory."""
    shm_total_bytes: Size | None
    shm_free_bytes: Size | None = None
    mpam: Mpam
    software: Software
    numa_nodes: Nodes
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=256)]
    network: Network | None = None
    """None if the host has no adapters of a cluster's network, or nothing is published of them."""
    memory_limit_bytes: Size | None = None
    """Memory limit of the control group, if it is below the host's memory."""
    smt_siblings: Cores = ()
    """CPUs of each physical core with several threads; empty if cores have one thread, or if the
    kernel does not report it.
    """
    allowed_memory_nodes: tuple[int, ...] | None = None
    """NUMA nodes that this process may allocate on (``Mems_allowed``)."""
    live: bool = True
    """Whether this was read on the host itself, not from a copy of its system files
    (``--sysroot``).
    """
    notes: tuple[str, ...] = ()
    """Explanations of the figures for people (memory that grows, a driver that did not respond)."""
    hidden_gpus: tuple[int, ...] = ()
    """Indices of GPUs that the environment hides (CUDA_VISIBLE_DEVICES)."""
    nvml_errors: tuple[str, ...] = ()
    """Errors of NVML calls that should have succeeded."""
    memory_grows: bool = False
    """Whether this is a virtual machine whose memory can grow on demand."""

    @property
    def label(self) -> str:
        """Name for messages: one line that is safe to show."""
        return brief_line(self.hostname) if self.hostname != UNKNOWN else "this machine file"

    @property
    def cpu_nodes(self) -> Nodes:
        return tuple(node for node in self.numa_nodes if node.kind == "cpu")

    def node(self, node_id: int) -> NumaNode:
        """Return the node with this id. Raises KeyError if there is none."""
        return {node.id: node for node in self.numa_nodes}[node_id]


prepare(Machine)


def facts_of(machine: Machine) -> list[str]:
    """Return what a line says of a host, most important first: ``4x GH200 95 GiB``, ``4 NUMA nodes
    x 72 cores, 117 GiB each``.
    """
    kinds = Counter(
        (gpu.name.removeprefix("NVIDIA ").removeprefix("AMD "), gpu.memory_total_bytes)
        for gpu in machine.gpus
    )
    gpus = " + ".join(
        f"{number}x {name}" + (f" {memory_size(total, 0)}" if total else "")
        for (name, total), number in kinds.items()
    )
    nodes = machine.cpu_nodes
    cores = [len(node.cpus) for node in nodes]
    sizes = {memory_size(node.memory_total_bytes, 0) for node in nodes}
    each = f" x {cores[0]}" if len(set(cores)) == 1 else f", {sum(cores)}"
    size = memory_size(machine.host_memory_bytes, 0)
    if len(sizes) == 1 < len(nodes):
        size = f"{sizes.pop()} each"
    facts = [gpus or "no GPU", f"{plural(len(nodes), 'NUMA node')}{each} cores, {size}"]
    if len(machine.allowed_cpus) < len(machine.online_cpus):
        facts.append(f"{len(machine.allowed_cpus)} of {len(machine.online_cpus)} cores available")
    return facts


def version_numbers(text: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version for comparison: ``2.13.0+cpu`` gives ``(2, 13, 0)``,
    and None ``()``, below all others.
    """
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()
