"""Find GPUs through NVML, or the PCI devices and AMD's topology in sysfs, with the CPU node of each and the NUMA node of its memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from so_tui.machine.amd_smi import names_by_amd_smi
from so_tui.machine.cpulist import cpus_or_empty
from so_tui.machine.kfd import KfdGpu, kfd_gpus
from so_tui.machine.numa import distance
from so_tui.machine.nvml import NvmlAnswer, NvmlGpu
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Gpu, NumaNode

_PCI = "/sys/bus/pci/devices"
_NVIDIA, _AMD = 0x10DE, 0x1002
_DISPLAY_CLASSES = {0x0300, 0x0302}
_AMD_COMPUTE_CLASSES = {0x0302, 0x0380, 0x1200}
_NAMES = {
    # Product names by PCI device id (pci.ids), if neither NVML nor the driver's /proc has them.
    0x20B2: "NVIDIA A100-SXM4-80GB",
    0x2330: "NVIDIA H100 80GB HBM3",
    0x2335: "NVIDIA H200",
    0x2342: "NVIDIA GH200",
    0x2345: "NVIDIA GH200",
    0x2348: "NVIDIA GH200 144G HBM3e",
    0x2901: "NVIDIA B200",
    0x2941: "NVIDIA GB200",
    0x31C2: "NVIDIA GB300",
}
_AMD_NAMES = {
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
}
"""The same of AMD's; its driver has no names."""
_NAMELESS_AMD = "AMD GPU ["
ROCM_VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that hide AMD's GPUs; of NVIDIA's only the last does."""
_PUBLISHED_MIB = {
    # Memory sizes as nvidia-smi or the NUMA map shows them, for system files without either.
    0x20B2: 81920,
    0x2330: 81559,
    0x2335: 143771,
    0x2342: 97280,
    0x2345: 97280,
    0x2348: 146176,
    0x2941: 188416,
    0x31C2: 283136,
}


class PciGpu(NamedTuple):
    """A GPU on the PCI bus, with or without a driver."""

    bus_id: str
    vendor: Literal["nvidia", "amd"]
    name: str
    numa_node: int | None
    cpus: tuple[int, ...]
    published_memory_bytes: int | None = None
    """Memory size of GPUs with this device id."""


class FoundGpus(NamedTuple):
    """The GPUs that a run may use, and what to report about the others."""

    gpus: tuple[Gpu, ...]
    hidden: tuple[int, ...]
    """Indices of GPUs that the environment hides."""
    notes: tuple[str, ...]


def pci_gpus(files: SystemFiles) -> tuple[PciGpu, ...]:
    """Return all GPUs on the PCI bus, in bus order."""
    found = (_pci_gpu(files, bus_id) for bus_id in files.names(_PCI))
    return tuple(gpu for gpu in found if gpu is not None)


def read_gpus(
    files: SystemFiles, nodes: tuple[NumaNode, ...], nvml: NvmlAnswer, *, coherent: bool
) -> FoundGpus:
    """Return the GPUs of a machine with their NUMA nodes.

    Args:
        files: System files of the machine.
        nodes: NUMA nodes of the machine.
        nvml: Answer of NVML; its list is used if NVML started.
        coherent: Whether GPU memory can be a NUMA node here (Grace), so that nodes without CPUs may be GPU memory.
    """
    on_bus = pci_gpus(files)
    notes = list(nvml.errors)
    hidden: tuple[Gpu, ...] = ()
    if nvml.answered:
        gpus = tuple(_from_nvml(gpu, on_bus) for gpu in nvml.gpus)
    else:
        usable = tuple(gpu for gpu in on_bus if not files.live or _driver_loaded(files, gpu.vendor))
        if len(usable) < len(on_bus):
            notes.append(
                f"{len(on_bus) - len(usable)} GPU(s) on the PCI bus have no driver and are left out."
            )
        gpus = _from_pci(usable)
    if any(gpu.vendor == "amd" for gpu in gpus) and (amd := kfd_gpus(files, nodes)) is not None:
        gpus = _with_kfd(gpus, {gpu.bus_id: gpu for gpu in amd})
    if files.live and any(gpu.name.startswith(_NAMELESS_AMD) for gpu in gpus):
        names = names_by_amd_smi()
        gpus = tuple(
            msgspec.structs.replace(gpu, name=names.get(gpu.pci_bus_id, gpu.name)) for gpu in gpus
        )
    gpus = _with_nodes(gpus, nodes, coherent=coherent)
    if not nvml.answered:
        gpus, assumed = _with_published_memory(gpus, on_bus, nodes)
        if assumed:
            listed = ", ".join(str(gpu.index) for gpu in assumed)
            notes.append(
                f"The memory size of GPU {listed} is unknown here; the published size of {assumed[0].name} is assumed."
            )
    if files.live and (variable := hiding_variable(gpus, os.environ)):
        gpus, hidden = visible_gpus(gpus, os.environ[variable])
        if hidden:
            notes.append(f"{variable} hides GPU {', '.join(str(gpu.index) for gpu in hidden)}.")
    return FoundGpus(gpus, tuple(gpu.index for gpu in hidden), tuple(notes))


def normal_bus_id(bus_id: str) -> str:
    """Return a bus id of NVML as sysfs writes it: ``00000009:01:00.0`` is ``0009:01:00.0``."""
    domain, rest = bus_id.split(":", 1)
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _pci_gpu(files: SystemFiles, bus_id: str) -> PciGpu | None:
    folder = f"{_PCI}/{bus_id}"
    vendor, device_class = (
        files.integer(f"{folder}/vendor"),
        (files.integer(f"{folder}/class") or 0) >> 8,
    )
    if device_class not in {_NVIDIA: _DISPLAY_CLASSES, _AMD: _AMD_COMPUTE_CLASSES}.get(
        vendor or 0, ()
    ):
        return None
    node = files.integer(f"{folder}/numa_node")
    device = files.integer(f"{folder}/device") or 0
    name = (
        _driver_name(files, bus_id) or _NAMES.get(device)
        if vendor == _NVIDIA
        else _AMD_NAMES.get(device)
    )
    return PciGpu(
        bus_id=bus_id.lower(),
        vendor="nvidia" if vendor == _NVIDIA else "amd",
        name=name or f"{'NVIDIA GPU [' if vendor == _NVIDIA else _NAMELESS_AMD}{device:04x}]",
        numa_node=node if node is not None and node >= 0 else None,
        cpus=cpus_or_empty(files.text(f"{folder}/local_cpulist")),
        published_memory_bytes=_PUBLISHED_MIB[device] * 2**20
        if vendor == _NVIDIA and device in _PUBLISHED_MIB
        else None,
    )


def _driver_name(files: SystemFiles, bus_id: str) -> str | None:
    for line in (files.text(f"/proc/driver/nvidia/gpus/{bus_id}/information") or "").splitlines():
        if line.startswith("Model:"):
            return line.partition(":")[2].strip()
    return None


def _driver_loaded(files: SystemFiles, vendor: str) -> bool:
    return files.exists("/proc/driver/nvidia/version" if vendor == "nvidia" else "/dev/kfd")


def _from_pci(found: Iterable[PciGpu]) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=index,
            name=gpu.name,
            pci_bus_id=gpu.bus_id,
            numa_node=gpu.numa_node,
            cpus=gpu.cpus,
            vendor=gpu.vendor,
        )
        for index, gpu in enumerate(found)
    )


def _with_kfd(gpus: tuple[Gpu, ...], amd: dict[str, KfdGpu]) -> tuple[Gpu, ...]:
    """Return the GPUs with what AMD's driver says of them, and without those that it withholds. AMD's are numbered as ROCm does."""
    order = list(amd)
    kept = [gpu for gpu in gpus if gpu.vendor != "amd" or gpu.pci_bus_id in amd]
    kept.sort(key=lambda gpu: order.index(gpu.pci_bus_id) if gpu.pci_bus_id in amd else -1)
    return tuple(
        msgspec.structs.replace(gpu, index=index)
        if (of := amd.get(gpu.pci_bus_id)) is None
        else msgspec.structs.replace(
            gpu,
            index=index,
            uuid=of.uuid,
            numa_node=of.numa_node if of.numa_node is not None else gpu.numa_node,
            memory_node=of.memory_node,
            memory_total_bytes=of.memory_bytes,
            mig=of.partitions > 1,
        )
        for index, gpu in enumerate(kept)
    )


def _from_nvml(gpu: NvmlGpu, on_bus: tuple[PciGpu, ...]) -> Gpu:
    bus_id = normal_bus_id(gpu.bus_id)
    device = next((other for other in on_bus if other.bus_id == bus_id), None)
    return Gpu(
        index=gpu.index,
        name=gpu.name if gpu.name.startswith("NVIDIA") else f"NVIDIA {gpu.name}",
        pci_bus_id=bus_id,
        numa_node=device.numa_node if device else None,
        memory_node=gpu.memory_node,
        cpus=device.cpus if device else (),
        memory_total_bytes=gpu.memory_total_bytes,
        memory_used_bytes=gpu.memory_used_bytes,
        compute_mode=gpu.compute_mode,
        uuid=gpu.uuid,
        c2c=gpu.c2c,
        mig=gpu.mig,
    )


def _with_nodes(
    gpus: tuple[Gpu, ...], nodes: tuple[NumaNode, ...], *, coherent: bool
) -> tuple[Gpu, ...]:
    """Fill in what the bus does not report: the CPU node (if there is only one), its CPUs, the GPU's memory node and size."""
    cpu_nodes = {node.id: node for node in nodes if node.kind == "cpu"}
    only_node = next(iter(cpu_nodes)) if len(cpu_nodes) == 1 else None
    attached = tuple(
        msgspec.structs.replace(
            gpu, numa_node=home, cpus=gpu.cpus or (cpu_nodes[home].cpus if home is not None else ())
        )
        for gpu in gpus
        for home in [gpu.numa_node if gpu.numa_node in cpu_nodes else only_node]
    )
    owned = _memory_nodes(attached, nodes) if coherent else {}
    sizes = {node.id: node.memory_total_bytes for node in nodes if node.kind == "gpu-memory"}
    known = {node.id for node in nodes}
    return tuple(
        msgspec.structs.replace(
            gpu,
            memory_node=own,
            memory_total_bytes=gpu.memory_total_bytes
            or (sizes.get(own) if own is not None else None),
        )
        for gpu in attached
        # A container may hide the nodes that the driver names.
        for own in [gpu.memory_node if gpu.memory_node in known else owned.get(gpu.pci_bus_id)]
    )


def _with_published_memory(
    gpus: tuple[Gpu, ...], on_bus: tuple[PciGpu, ...], nodes: tuple[NumaNode, ...]
) -> tuple[tuple[Gpu, ...], tuple[Gpu, ...]]:
    """Fill in published memory sizes where nothing else is known.

    With more memory nodes than GPUs, MIG has partitioned some GPUs, and nothing is assumed.

    Returns:
        All GPUs, and those whose size was filled in.
    """
    if sum(node.kind == "gpu-memory" for node in nodes) > len(gpus):
        return gpus, ()
    published = {device.bus_id: device.published_memory_bytes for device in on_bus}
    filled = tuple(
        msgspec.structs.replace(gpu, memory_total_bytes=published.get(gpu.pci_bus_id))
        if gpu.memory_total_bytes is None
        else gpu
        for gpu in gpus
    )
    return filled, tuple(
        after
        for before, after in zip(gpus, filled, strict=True)
        if after is not before and after.memory_total_bytes
    )


def _memory_nodes(gpus: tuple[Gpu, ...], nodes: tuple[NumaNode, ...]) -> dict[str, int]:
    """Return the memory node of each GPU, by bus id.

    The memory nodes nearest to a CPU node belong to the GPUs attached to it, in PCI order. If their numbers differ (memory that is not
    online, for example), they are left out.
    """
    hbm = [node for node in nodes if node.kind == "gpu-memory"]
    in_bus_order = sorted(gpus, key=lambda gpu: gpu.pci_bus_id)
    nearest = {node.id: _nearest_cpu_node(node, nodes) for node in hbm}
    if any(home is None for home in nearest.values()):
        return (
            {gpu.pci_bus_id: node.id for gpu, node in zip(in_bus_order, hbm, strict=True)}
            if len(hbm) == len(gpus)
            else {}
        )
    owned: dict[str, int] = {}
    for home in set(nearest.values()):
        here = [gpu for gpu in in_bus_order if gpu.numa_node == home]
        memories = [node.id for node in hbm if nearest[node.id] == home]
        if len(here) == len(memories):
            owned |= {gpu.pci_bus_id: memory for gpu, memory in zip(here, memories, strict=True)}
    return owned


def _nearest_cpu_node(node: NumaNode, nodes: tuple[NumaNode, ...]) -> int | None:
    """Return the CPU node at the smallest distance; None if two are equally near or no distance is known."""
    known = [
        (far, other.id)
        for other in nodes
        if other.kind == "cpu" and (far := distance(nodes, node, other.id)) is not None
    ]
    ranked = sorted(known)
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return ranked[0][1]


def hiding_variable(gpus: Iterable[Gpu], environment: Mapping[str, str]) -> str | None:
    """Return the variable that decides which of these GPUs a process sees; None if none is set.

    ROCm has three, and each counts within what the ones before it show. Schedulers set one, or several alike, so the first is taken.
    """
    names = (
        ROCM_VISIBLE_DEVICES
        if any(gpu.vendor == "amd" for gpu in gpus)
        else ROCM_VISIBLE_DEVICES[-1:]
    )
    return next((name for name in names if name in environment), None)


def visible_gpus(
    gpus: tuple[Gpu, ...], shown_devices: str
) -> tuple[tuple[Gpu, ...], tuple[Gpu, ...]]:
    """Return the GPUs that a list such as CUDA_VISIBLE_DEVICES shows, and the others. As in CUDA, it ends at the first unknown entry."""
    shown: set[int] = set()
    for entry in shown_devices.split(","):
        match = next((gpu.index for gpu in gpus if _names(entry.strip(), gpu)), None)
        if match is None:
            break
        shown.add(match)
    return tuple(gpu for gpu in gpus if gpu.index in shown), tuple(
        gpu for gpu in gpus if gpu.index not in shown
    )


def _names(entry: str, gpu: Gpu) -> bool:
    return entry == str(gpu.index) or (
        entry.startswith("GPU-") and gpu.uuid is not None and gpu.uuid.startswith(entry)
    )
