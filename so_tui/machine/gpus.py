"""Find GPUs through NVML, or the PCI devices and AMD's topology in sysfs, with the CPU node of each
and the NUMA node of its memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import Environment
from so_tui.machine.host import cpus_or_empty, distance
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Gpu, Machine, Nodes, NumaNode, Vendor
from so_tui.trust.decoding import Tree

# Read AMD's GPUs from the topology of the kernel's compute driver (KFD) in sysfs.
#
# Each node of the topology is a processor: the cores of a NUMA node, or a GPU. Its files have a
# name and a number on each line. Linux writes them in
# ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``; ``include/uapi/linux/kfd_sysfs.h`` names the
# constants.


_NODES = "/sys/class/kfd/kfd/topology/nodes"
_MOST_NODES, _MOST_LINKS = 1024, 64
"""Bounds far above any real machine: of the topology, and of one node's links."""
_NODE = re.compile(r"0|[1-9][0-9]{0,4}")
_LINE = re.compile(r"^(\w+) ([0-9]{1,20})$", re.MULTILINE)
_SAME_SOCKET = 13
"""Weight of the link between CPU and GPU of one socket (``KFD_CRAT_INTRA_SOCKET_WEIGHT``), by which
ROCm too knows an APU.
"""


def _kfd_gpus(files: SystemFiles, nodes: Nodes) -> dict[str, Tree] | None:
    """Return what AMD's driver says of the GPUs that this process may use: by bus id, in ROCm's
    order, fields of ``Gpu``. None without a topology.

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
    devices: dict[str, list[int]] = {}
    for node, properties in found.items():
        if properties.get("simd_count"):
            # The function number of the PCI address counts partitions; the device itself has 0.
            location = properties.get("location_id", 0)
            bus_id = f"{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"
            devices.setdefault(f"{properties.get('domain', 0):04x}:{bus_id}", []).append(node)
    return {
        bus_id: _kfd_gpu(files, parts[0], found[parts[0]], homes, len(parts))
        for bus_id, parts in sorted(devices.items(), key=itemgetter(1))
    }


def _kfd_gpu(
    files: SystemFiles,
    node: int,
    properties: dict[str, int],
    homes: dict[int, NumaNode],
    partitions: int,
) -> Tree:
    folder = f"{_NODES}/{node}/io_links"
    read = (
        _numbers(files, f"{folder}/{name}/properties") for name in files.names(folder)[:_MOST_LINKS]
    )
    links = [link for link in read if link.get("node_to") in homes]
    nearest = min(links, key=lambda link: link.get("weight", 1 << 32), default={})
    home = homes.get(nearest.get("node_to", -1))
    shared = home if nearest.get("weight") == _SAME_SOCKET else None
    unique = properties.get("unique_id")
    return {
        # As ROCm writes it in ROCR_VISIBLE_DEVICES: ``GPU-6cdb410c2f219ac0``.
        "uuid": f"GPU-{unique:016x}" if unique else None,
        **({"numa_node": home.id} if home else {}),
        # Where GPU and CPU share a socket, the GPU has no memory of its own.
        "memory_node": shared.id if shared else None,
        "memory_total_bytes": shared.memory_total_bytes if shared else None,
        "mig": partitions > 1,
    }


def _numbers(files: SystemFiles, name: str) -> dict[str, int]:
    """Return the lines of a name and a number of at most 64 bits; anything else is left out."""
    numbers = {key: int(digits) for key, digits in _LINE.findall(files.text(name))}
    return {key: number for key, number in numbers.items() if number < 1 << 64}


# Query NVML, where any call may be unsupported: coherent GPUs, MIG, containers and old drivers
# each refuse some.


T = TypeVar("T")

_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}


class GpuHealth(Struct, frozen=True, kw_only=True):
    """State of a GPU that changes over time; None where the driver does not report it."""

    bus_id: str
    pids: tuple[int, ...] = ()
    """Processes that compute on the GPU, as far as they are visible in this container."""
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded."""
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    persistence: bool | None = None
    compute_capability: tuple[int, int] | None = None


class _Asker:
    """Calls NVML functions. An error returns None; an unexpected one is also recorded in
    ``errors``.
    """

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.errors: list[str] = []
        self._expected = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
        }

    def devices(self) -> Iterator[tuple[int, Any, str]]:
        """Yield index, handle and bus id of each GPU that responds."""
        for index in range(self.ask("nvmlDeviceGetCount", read=int) or 0):
            handle: Any = self.ask("nvmlDeviceGetHandleByIndex", index, read=lambda handle: handle)
            bus_id = None
            if handle is not None:
                bus_id = self.ask("nvmlDeviceGetPciInfo", handle, read=attrgetter("busId"))
            if bus_id is None:
                self.errors.append(f"GPU {index} does not respond and is left out.")
            else:
                # sysfs writes 0009:01:00.0 for 00000009:01:00.0, in lower case.
                domain, rest = bus_id.split(":", 1)
                yield index, handle, f"{int(domain, 16):04x}:{rest.lower()}"

    def ask(self, function: str, *arguments: Any, read: Callable[[Any], T]) -> T | None:
        """Call a function and return ``read`` of its result; None if it fails or this nvidia-ml-py
        does not have it.
        """
        call = getattr(self.nvml, function, None)
        if call is None:
            return None
        try:
            return read(call(*arguments))
        except self.nvml.NVMLError as error:
            if error.value not in self._expected:
                self.errors.append(f"NVML {function}: {error}.")
            return None


@contextmanager
def _started() -> Iterator[_Asker]:
    """Start NVML, and stop it at the end. Raises pynvml.NVMLError if it does not start."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield _Asker(pynvml)
    finally:
        with suppress(pynvml.NVMLError):  # what was answered counts
            pynvml.nvmlShutdown()


def _query_nvml() -> tuple[list[Gpu] | None, str | None, tuple[str, ...]]:
    """Return every GPU that the driver shows to this process, none in a job without GPUs; None if
    NVML does not start. Also return the driver's version, and errors of calls that should have
    succeeded, each a sentence: none if there is no driver.
    """
    import pynvml

    try:
        with _started() as asker:
            gpus = [_nvml_gpu(asker, *device) for device in asker.devices()]
            driver = asker.ask("nvmlSystemGetDriverVersion", read=str)
            return gpus, driver, tuple(dict.fromkeys(asker.errors))
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return None, None, () if error.value in absent else (f"NVML does not start: {error}.",)


def query_health() -> tuple[GpuHealth, ...]:
    """Return the state of every GPU that the driver shows; empty if there is no driver."""
    import pynvml

    try:
        with _started() as asker:
            return tuple(_health(asker, *device) for device in asker.devices())
    except pynvml.NVMLError:
        return ()


def _health(asker: _Asker, _index: int, handle: Any, bus_id: str) -> GpuHealth:
    nvml = asker.nvml
    errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    pending, failed = asker.ask(
        "nvmlDeviceGetRemappedRows", handle, read=lambda rows: (bool(rows[2]), bool(rows[3]))
    ) or (None, None)
    return GpuHealth(
        bus_id=bus_id,
        pids=asker.ask(
            "nvmlDeviceGetComputeRunningProcesses",
            handle,
            read=lambda found: tuple(one.pid for one in found),
        )
        or (),
        uncorrected_ecc_errors=asker.ask("nvmlDeviceGetTotalEccErrors", handle, *errors, read=int),
        row_remap_pending=pending,
        row_remap_failed=failed,
        persistence=asker.ask("nvmlDeviceGetPersistenceMode", handle, read=bool),
        compute_capability=asker.ask(
            "nvmlDeviceGetCudaComputeCapability",
            handle,
            read=lambda found: (int(found[0]), int(found[1])),
        ),
    )


def _nvml_gpu(asker: _Asker, index: int, handle: Any, bus_id: str) -> Gpu:
    name = asker.ask("nvmlDeviceGetName", handle, read=str) or "NVIDIA GPU"
    total, used = asker.ask(
        "nvmlDeviceGetMemoryInfo", handle, read=lambda info: (int(info.total), int(info.used))
    ) or (None, None)
    return Gpu(
        index=index,
        name=name if name.startswith("NVIDIA") else f"NVIDIA {name}",
        pci_bus_id=bus_id,
        uuid=asker.ask("nvmlDeviceGetUUID", handle, read=str),
        # Some drivers return -1 instead of "not supported".
        memory_node=asker.ask(
            "nvmlDeviceGetNumaNodeId", handle, read=lambda node: node if node >= 0 else None
        ),
        memory_total_bytes=total,
        memory_used_bytes=used,
        compute_mode=asker.ask("nvmlDeviceGetComputeMode", handle, read=_COMPUTE_MODES.get),
        c2c=asker.ask(
            "nvmlDeviceGetC2cModeInfoV1", handle, read=lambda info: bool(info.isC2cEnabled)
        ),
        mig=asker.ask("nvmlDeviceGetMigMode", handle, read=lambda modes: bool(modes[0])),
    )


_PCI = "/sys/bus/pci/devices"
_VENDORS: dict[int, tuple[Vendor, tuple[int, ...]]] = {
    0x10DE: ("nvidia", (0x0300, 0x0302)),
    0x1002: ("amd", (0x0302, 0x0380, 0x1200)),
}
"""By PCI vendor id: the vendor, and the classes of its devices that compute."""
_PRODUCTS = {
    # By PCI device id (pci.ids): the name, if neither NVML nor the driver's /proc has it, and the
    # MiB of memory as nvidia-smi or the NUMA map shows them, for system files without either.
    0x20B2: ("NVIDIA A100-SXM4-80GB", 81920),
    0x2330: ("NVIDIA H100 80GB HBM3", 81559),
    0x2335: ("NVIDIA H200", 143771),
    0x2342: ("NVIDIA GH200", 97280),
    0x2345: ("NVIDIA GH200", 97280),
    0x2348: ("NVIDIA GH200 144G HBM3e", 146176),
    0x2901: ("NVIDIA B200", 0),
    0x2941: ("NVIDIA GB200", 188416),
    0x31C2: ("NVIDIA GB300", 283136),
    # AMD's driver has no names.
    0x740F: ("AMD Instinct MI210", 0),
    0x74A0: ("AMD Instinct MI300A", 0),
    0x74A1: ("AMD Instinct MI300X", 0),
}
ROCM_VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that hide AMD's GPUs; of NVIDIA's only the last does."""


def pci_gpus(files: SystemFiles) -> list[Gpu]:
    """Return all GPUs on the PCI bus, with or without a driver, in bus order."""
    return _numbered(filter(None, (_pci_gpu(files, bus_id) for bus_id in files.names(_PCI))))


def _numbered(gpus: Iterable[Gpu]) -> list[Gpu]:
    return [replace(gpu, index=index) for index, gpu in enumerate(gpus)]


def read_gpus(files: SystemFiles, host: Machine) -> tuple[Machine, str | None]:
    """Return a host with its GPUs, those that NVML lists if it starts, and with what there is to
    say of the others and of NVML. Also return the driver's version, as NVML names it.
    """
    nodes = host.numa_nodes
    listed, driver, errors = _query_nvml() if files.live else (None, None, ())
    on_bus = pci_gpus(files)
    notes = list(errors)
    if listed is not None:
        at = {gpu.pci_bus_id: gpu for gpu in on_bus}
        places = [at.get(gpu.pci_bus_id, gpu) for gpu in listed]
        gpus = [
            replace(gpu, numa_node=place.numa_node, cpus=place.cpus)
            for gpu, place in zip(listed, places, strict=True)
        ]
    else:
        drivers = {"nvidia": "/proc/driver/nvidia/version", "amd": "/dev/kfd"}
        gpus = _numbered(
            gpu for gpu in on_bus if not files.live or files.exists(drivers[gpu.vendor])
        )
        if left_out := len(on_bus) - len(gpus):
            notes.append(f"{left_out} GPU(s) on the PCI bus have no driver and are left out.")
    if any(gpu.vendor == "amd" for gpu in gpus):
        gpus = _with_amds(gpus, files, nodes)
    # On Grace, GPU memory can be a NUMA node, so that nodes without CPUs may be that.
    coherent = host.architecture in ("aarch64", "unknown")
    gpus = _with_nodes(gpus, nodes, coherent=coherent)
    # With more memory nodes than GPUs, MIG has partitioned some GPUs, and no size is assumed.
    if listed is None and sum(node.kind == "gpu-memory" for node in nodes) <= len(gpus):
        sizes = {
            gpu.index: size
            for gpu in gpus
            if gpu.memory_total_bytes is None and (size := _published_bytes(files, gpu))
        }
        gpus = [
            replace(gpu, memory_total_bytes=sizes.get(gpu.index, gpu.memory_total_bytes))
            for gpu in gpus
        ]
        if sizes:
            assumed = next(gpu.name for gpu in gpus if gpu.index in sizes)
            notes.append(
                f"The memory size of GPU {_indices(sizes)} is unknown here; the published size of "
                f"{assumed} is assumed."
            )
    hidden: list[int] = []
    if files.live and (variable := hiding_variable(gpus, os.environ)):
        visible = visible_gpus(gpus, os.environ[variable])
        if hidden := [gpu.index for gpu in gpus if gpu not in visible]:
            notes.append(f"{variable} hides GPU {_indices(hidden)}.")
        gpus = visible
    found = replace(
        host,
        gpus=tuple(gpus),
        hidden_gpus=tuple(hidden),
        notes=(*host.notes, *notes),
        nvml_errors=errors,
    )
    return found, driver


def _indices(indices: Iterable[int]) -> str:
    return ", ".join(map(str, indices))


def _with_amds(gpus: list[Gpu], files: SystemFiles, nodes: Nodes) -> list[Gpu]:
    """Return the GPUs with what AMD's driver says of its own, which are numbered as ROCm does,
    after others. Those that the driver withholds are left out.
    """
    if (amd := _kfd_gpus(files, nodes)) is None:
        return gpus
    order = list(amd)
    gpus = [gpu for gpu in gpus if gpu.vendor != "amd" or gpu.pci_bus_id in amd]
    gpus.sort(key=lambda gpu: order.index(gpu.pci_bus_id) if gpu.pci_bus_id in amd else -1)
    return _numbered(replace(gpu, **amd.get(gpu.pci_bus_id, {})) for gpu in gpus)


def _pci_gpu(files: SystemFiles, bus_id: str) -> Gpu | None:
    folder = f"{_PCI}/{bus_id}"
    vendor, classes = _VENDORS.get(files.integer(f"{folder}/vendor") or 0, ("nvidia", ()))
    if (files.integer(f"{folder}/class") or 0) >> 8 not in classes:
        return None
    device = files.integer(f"{folder}/device") or 0
    node = files.integer(f"{folder}/numa_node")
    driver = files.text(f"/proc/driver/nvidia/gpus/{bus_id}/information")
    model = re.search(r"^Model:[ \t]*(\S.*)", driver, re.MULTILINE)
    known, _ = _PRODUCTS.get(device, (f"{vendor.upper()} GPU [{device:04x}]", 0))
    return Gpu(
        index=0,
        name=model[1].strip() if model else known,
        pci_bus_id=bus_id.lower(),
        numa_node=node if node is not None and node >= 0 else None,
        cpus=cpus_or_empty(files.text(f"{folder}/local_cpulist")),
        vendor=vendor,
    )


def _published_bytes(files: SystemFiles, gpu: Gpu) -> int:
    """Return the published memory size of GPUs with this device id; 0 where it is not known."""
    return _PRODUCTS.get(files.integer(f"{_PCI}/{gpu.pci_bus_id}/device") or 0, ("", 0))[1] << 20


def _with_nodes(gpus: list[Gpu], nodes: Nodes, *, coherent: bool) -> list[Gpu]:
    """Fill in what the bus does not report: the CPU node (if there is only one), its CPUs, the
    GPU's memory node and size.
    """
    cpu_nodes = {node.id: node for node in nodes if node.kind == "cpu"}
    only_node = next(iter(cpu_nodes)) if len(cpu_nodes) == 1 else None
    homes = [gpu.numa_node if gpu.numa_node in cpu_nodes else only_node for gpu in gpus]
    attached = [
        replace(
            gpu, numa_node=home, cpus=gpu.cpus or (cpu_nodes[home].cpus if home is not None else ())
        )
        for gpu, home in zip(gpus, homes, strict=True)
    ]
    # A container may hide the nodes that the driver names.
    known = {node.id for node in nodes}
    owned = _memory_nodes(attached, nodes) if coherent else {}
    sizes: dict[int | None, int] = {
        node.id: node.memory_total_bytes for node in nodes if node.kind == "gpu-memory"
    }
    placed = [
        (gpu, gpu.memory_node if gpu.memory_node in known else owned.get(gpu.pci_bus_id))
        for gpu in attached
    ]
    return [
        replace(gpu, memory_node=own, memory_total_bytes=gpu.memory_total_bytes or sizes.get(own))
        for gpu, own in placed
    ]


def _memory_nodes(gpus: list[Gpu], nodes: Nodes) -> dict[str, int]:
    """Return the memory node of each GPU, by bus id.

    The memory nodes nearest to a CPU node belong to the GPUs attached to it, in PCI order; without
    distances, all of them to all GPUs. If their numbers differ (some memory offline, for
    example), they are left out.
    """
    hbm = [node for node in nodes if node.kind == "gpu-memory"]
    in_bus_order = sorted(gpus, key=lambda gpu: gpu.pci_bus_id)
    nearest = {node.id: _nearest_cpu_node(node, nodes) for node in hbm}
    groups = [(in_bus_order, [node.id for node in hbm])]
    if None not in nearest.values():
        groups = [
            (
                [gpu for gpu in in_bus_order if gpu.numa_node == home],
                [node.id for node in hbm if nearest[node.id] == home],
            )
            for home in set(nearest.values())
        ]
    return {
        gpu.pci_bus_id: memory
        for here, memories in groups
        if len(here) == len(memories)
        for gpu, memory in zip(here, memories, strict=True)
    }


def _nearest_cpu_node(node: NumaNode, nodes: Nodes) -> int | None:
    """Return the CPU node at the smallest distance; None if two are equally near or no distance is
    known.
    """
    ranked = sorted(
        (far, other.id)
        for other in nodes
        if other.kind == "cpu" and (far := distance(nodes, node, other.id)) is not None
    )
    equally_near = len(ranked) > 1 and ranked[0][0] == ranked[1][0]
    return ranked[0][1] if ranked and not equally_near else None


def hiding_variable(gpus: Iterable[Gpu], environment: Environment) -> str | None:
    """Return the variable that decides which of these GPUs a process sees; None if none is set.

    ROCm has three, and each counts within what the ones before it show. Schedulers set one, or
    several alike, so the first is taken.
    """
    first = 0 if any(gpu.vendor == "amd" for gpu in gpus) else -1
    return next((name for name in ROCM_VISIBLE_DEVICES[first:] if name in environment), None)


def visible_gpus(gpus: Sequence[Gpu], shown_devices: str) -> list[Gpu]:
    """Return the GPUs that a list such as CUDA_VISIBLE_DEVICES shows. As in CUDA, it ends at the
    first unknown entry.
    """
    shown: set[int] = set()
    for entry in map(str.strip, shown_devices.split(",")):
        named = [
            gpu.index
            for gpu in gpus
            if entry == str(gpu.index)
            or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry))
        ]
        if not named:
            break
        shown.add(named[0])
    return [gpu for gpu in gpus if gpu.index in shown]
