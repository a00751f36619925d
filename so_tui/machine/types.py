"""One host as the program sees it: a frozen snapshot, written by ``inspect --json`` and read back by ``--machine FILE``.

Sizes are bytes, cores are logical CPU numbers of the kernel. ``None`` means unknown, never zero.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from so_tui.structs import prepare

SCHEMA = 1
UNKNOWN = "unknown"
"""The hostname of a tree that does not tell it."""

Size = Annotated[int, Meta(ge=0)]
"""Of memory, in bytes: a file that says less than nothing is refused when it is read."""
NodeKind = Literal["cpu", "gpu-memory", "empty"]


class NumaNode(Struct, frozen=True, kw_only=True):
    id: int
    kind: NodeKind
    cpus: tuple[int, ...]
    memory_total_bytes: Size
    memory_free_bytes: Size | None = None
    file_cache_bytes: Size | None = None
    distances: tuple[int, ...] = ()


class Gpu(Struct, frozen=True, kw_only=True):
    index: int
    name: str
    pci_bus_id: str
    """Domain:bus:device.function as sysfs writes it, lower case: ``0009:01:00.0``."""
    numa_node: int | None = None
    """The CPU node this GPU hangs off."""
    memory_node: int | None = None
    """The NUMA node of the GPU's own memory, where the driver exposes one."""
    cpus: tuple[int, ...] = ()
    memory_total_bytes: Size | None = None
    memory_used_bytes: Size | None = None
    compute_mode: str | None = None
    uuid: str | None = None
    c2c: bool | None = None
    """Whether the GPU is attached by NVLink-C2C; None where the driver does not say."""
    mig: bool | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"


class Mpam(Struct, frozen=True, kw_only=True):
    """How far memory bandwidth partitioning (MPAM) gets on this host, by what an unprivileged user can see."""

    state: Literal["off", "kernel", "firmware", "mounted", "unknown"]
    evidence: str


class Software(Struct, frozen=True, kw_only=True):
    """Installed versions, found without importing anything; None where absent."""

    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA version torch was built for; None for a CPU build."""
    deepspeed: str | None = None
    transformers: str | None = None
    datasets: str | None = None
    flash_attn: str | None = None
    numactl: str | None = None
    numactl_works: bool | None = None
    """Whether a trial ``numactl -m NODE -C CPUS true`` succeeded here."""
    mempolicy_works: bool | None = None
    """Whether the kernel answers get_mempolicy(2): containers without CAP_SYS_NICE forbid it together with set_mempolicy(2)."""
    nvidia_driver: str | None = None
    cuda_toolkit: str | None = None
    """Version of nvcc, as torch's extension builder finds it."""
    compiler: str | None = None
    ninja: str | None = None


class Machine(Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    hostname: str
    cpu_name: str
    architecture: str
    page_size_bytes: Size | None
    online_cpus: tuple[int, ...]
    allowed_cpus: tuple[int, ...]
    host_memory_bytes: Size
    """Sum over the cpu nodes (MemTotal would include GPU memory on Grace)."""
    shm_total_bytes: Size | None
    shm_free_bytes: Size | None = None
    mpam: Mpam
    software: Software
    numa_nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    memory_limit_bytes: Size | None = None
    """The cgroup's limit where it is below the host's memory."""
    smt_siblings: tuple[tuple[int, ...], ...] = ()
    """Physical cores of several threads; empty where each has one, or where the kernel does not say."""
    allowed_memory_nodes: tuple[int, ...] | None = None
    """Nodes that this process may have memory of (``Mems_allowed``)."""
    live: bool = True
    """False for a snapshot of another tree (``--sysroot``): nothing live was asked."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures must know (memory that grows, a driver that did not answer)."""

    @property
    def label(self) -> str:
        """What to call it in a sentence."""
        return self.hostname if self.hostname != UNKNOWN else "this machine file"

    @property
    def cpu_nodes(self) -> tuple[NumaNode, ...]:
        return tuple(node for node in self.numa_nodes if node.kind == "cpu")

    def node(self, node_id: int) -> NumaNode:
        """The node with this id. Raises KeyError when there is none."""
        for node in self.numa_nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)


prepare(Machine)
