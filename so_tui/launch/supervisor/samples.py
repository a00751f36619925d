"""Samples of the host that trains, once a second: the load of each core, the memory of each NUMA
node, the GPUs, and who else computes.

Everything comes from a few small files and NVML calls, because sampling 288 cores must cost far
less than one percent of one core.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import psutil

from so_tui.launch.supervisor.processes import ProcessLoad, ProcessLoads, ProcessTree
from so_tui.machine.host import caught_up, sole_memory_node
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Gpu, Machine, NumaNode
from so_tui.runs.records import (
    ForeignProcess,
    GpuSample,
    NodeSample,
    Process,
    RankPlacement,
    Sample,
)
from so_tui.runs.samples import MOST_FOREIGN

# Samples of AMD's GPUs, from files of their kernel driver that any user may read. Linux documents
# them in ``gpu/amdgpu``.
#
# Which of them there are depends on the GPU; what is missing is unknown. Processes on the GPUs are
# not named.


class _AmdDevice:
    """Samples one GPU."""

    def __init__(self, gpu: Gpu, root: Path = Path("/")) -> None:
        self.index = gpu.index
        self._memory_total_bytes = gpu.memory_total_bytes
        self._files = SystemFiles(root)
        self._folder = f"/sys/bus/pci/devices/{gpu.pci_bus_id}"
        sensors = next(
            (
                name
                for name in self._files.names(f"{self._folder}/hwmon")
                if name.startswith("hwmon")
            ),
            "",
        )
        self._sensors = f"{self._folder}/hwmon/{sensors}"
        limit = self._files.integer(f"{self._sensors}/power1_cap")
        self._power_limit_w = None if limit is None else limit / 1e6

    def sample(self) -> GpuSample:
        """Take a sample."""
        clock_hz, millidegrees = (
            self._sensor("freq1_input"),
            self._sensor("temp1_input", "temp2_input"),
        )
        microwatts = self._sensor("power1_average", "power1_input")
        return GpuSample(
            index=self.index,
            busy_percent=self._files.integer(f"{self._folder}/gpu_busy_percent"),
            memory_used_bytes=self._files.integer(f"{self._folder}/mem_info_vram_used"),
            memory_total_bytes=self._memory_total_bytes,
            power_w=None if microwatts is None else microwatts / 1e6,
            power_limit_w=self._power_limit_w,
            clock_mhz=None if clock_hz is None else clock_hz // 1_000_000,
            temperature_c=None if millidegrees is None else millidegrees // 1000,
        )

    def processes(self) -> list[tuple[int, int | None]]:
        """Return nothing: the driver has no such list for other users."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _sensor(self, *names: str) -> int | None:
        """Return the first of these values that the GPU has."""
        return next(
            (
                value
                for name in names
                if (value := self._files.integer(f"{self._sensors}/{name}")) is not None
            ),
            None,
        )


# The processes that a user of this host looks for: those that use GPUs, those that are bound to
# cores, and those that compute.


MOST = 40
"""Processes that are listed."""
_BUSY_CORES = 0.5
"""Cores that a process keeps busy from which on it is listed in any case."""
_KERNEL = 2
"""Pid of the process that starts the kernel's own, all of which are bound."""


@dataclass(frozen=True, slots=True)
class _GpuUse:
    """What a process uses of GPUs, by their index; None where the driver does not say how much."""

    memory_bytes: Mapping[int, int | None]

    @property
    def total_bytes(self) -> int:
        """Memory on all GPUs, as far as known."""
        return sum(size or 0 for size in self.memory_bytes.values())


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process of this host."""

    pid: int
    name: str
    """As the kernel has it, at most 15 bytes. Its owner chose it."""
    user: str
    cores: float
    """Cores that it keeps busy."""
    memory_bytes: int | None
    """Resident memory."""
    bound: tuple[int, ...]
    """The CPUs that it is bound to; empty where it may use all that are allowed here."""
    gpu: _GpuUse | None


class HostProcesses:
    """Reads the processes of this host, whoever they belong to. It costs one or two small files a
    process. Not thread-safe.
    """

    def __init__(self, allowed_cpus: Collection[int]) -> None:
        """``allowed_cpus`` are those that a process which is bound to none may use."""
        self._allowed = frozenset(allowed_cpus)
        self._loads = ProcessLoads()

    def read(self, gpu_uses: Mapping[int, _GpuUse]) -> tuple[HostProcess, ...]:
        """Return what is worth listing: users of GPUs first, then the busiest."""
        found = [
            (pid, load, bound, gpu_uses.get(pid))
            for pid, load in self._loads.measure().items()
            if _KERNEL not in (pid, load.stat.parent)
            and ((bound := self._bound(pid)) or pid in gpu_uses or load.cores >= _BUSY_CORES)
        ]
        found.sort(
            key=lambda process: (
                process[3] is None,
                -(process[3].total_bytes if process[3] else 0),
                -process[1].cores,
                process[0],
            )
        )
        return tuple(_process(pid, load, bound, use) for pid, load, bound, use in found[:MOST])

    def _bound(self, pid: int) -> tuple[int, ...]:
        try:
            cpus = os.sched_getaffinity(pid)
        except OSError:  # it has ended
            return ()
        return tuple(sorted(cpus)) if len(cpus) < len(self._allowed) else ()


def _process(
    pid: int, load: ProcessLoad, bound: tuple[int, ...], use: _GpuUse | None
) -> HostProcess:
    user, memory_bytes = "", None
    with contextlib.suppress(psutil.Error):  # it has ended
        process = psutil.Process(pid)
        user = _user_name(process.uids().effective)
        memory_bytes = process.memory_info().rss
    return HostProcess(pid, load.stat.name, user, load.cores, memory_bytes, bound, use)


@cache
def _user_name(uid: int) -> str:
    """Return a user's name; it may come from a server, and so is asked for once."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# Samples of the GPUs: NVIDIA's by NVML, AMD's from sysfs.
#
# Any figure may be missing, because drivers, containers and some GPUs do not support it.


T = TypeVar("T")
_MIB = 2**20
_THROTTLING = {"power": 0x4, "heat": 0x20 | 0x40, "power-brake": 0x80}
"""``nvmlClocksEventReason``: the software's power cap; heat, seen by software or hardware; the
power supply's brake.
"""
_HARDWARE = 0x8
"""A slowdown by hardware, which comes with its cause where the driver knows it."""


class GpuSampler:
    """Samples the given GPUs; none without a driver. Not thread-safe."""

    def __init__(self, gpus: Sequence[Gpu], root: Path = Path("/")) -> None:
        self._nvml: Any = None
        self._devices: list[_Device | _AmdDevice] = [
            _AmdDevice(gpu, root) for gpu in gpus if gpu.vendor == "amd"
        ]
        if len(self._devices) == len(gpus):
            return
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._nvml = pynvml
        for gpu in (gpu for gpu in gpus if gpu.vendor == "nvidia"):
            handle = _asked(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id.encode())
            if handle is not None:
                self._devices.append(_Device(pynvml, gpu, handle))

    def sample(self) -> tuple[GpuSample, ...]:
        """Take a sample of each GPU."""
        return tuple(device.sample() for device in self._devices)

    def processes(self) -> dict[int, _GpuUse]:
        """Return what each process that computes on the GPUs uses of them, by pid."""
        found: dict[int, dict[int, int | None]] = {}
        for device in self._devices:
            for pid, size in device.processes():
                found.setdefault(pid, {})[device.index] = size
        return {pid: _GpuUse(sizes) for pid, sizes in found.items()}

    def close(self) -> None:
        """Release the counters and NVML."""
        for device in self._devices:
            device.close()
        self._devices = []
        if self._nvml is not None:
            _asked(self._nvml, self._nvml.nvmlShutdown)  # it may fail once a GPU is lost
            self._nvml = None


class _Device:
    def __init__(self, nvml: Any, gpu: Gpu, handle: Any) -> None:
        self._nvml = nvml
        self.index = gpu.index
        self._handle = handle
        self._traffic = _Traffic(nvml, handle, c2c=gpu.c2c is not False)
        self._clock_max_mhz = _asked(
            nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM
        )

    def sample(self) -> GpuSample:
        nvml, handle = self._nvml, self._handle
        memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        module_w, module_limit_w = self._module_power_w()
        reasons = _asked(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        return GpuSample(
            index=self.index,
            busy_percent=_asked(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            power_w=_watts(_asked(nvml, nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_watts(_asked(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            module_power_w=module_w,
            module_power_limit_w=module_limit_w,
            clock_mhz=_asked(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            clock_max_mhz=self._clock_max_mhz,
            temperature_c=_asked(
                nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            throttling=throttling(reasons or 0),
            **self._traffic.rates(),
        )

    def processes(self) -> list[tuple[int, int | None]]:
        """Return pid and memory in bytes of each process that computes."""
        nvml = self._nvml
        found = _asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()
        return [(process.pid, process.usedGpuMemory) for process in found]

    def close(self) -> None:
        self._traffic.close()

    def _module_power_w(self) -> tuple[float | None, float | None]:
        """Return power and limit of the superchip; None where a GPU has a module of its own, and
        the driver therefore no such figures.
        """
        nvml, scope = self._nvml, self._nvml.NVML_POWER_SCOPE_MODULE
        wanted = [
            (nvml.NVML_FI_DEV_POWER_INSTANT, scope),
            (nvml.NVML_FI_DEV_POWER_CURRENT_LIMIT, scope),
        ]
        values = _asked(nvml, nvml.nvmlDeviceGetFieldValues, self._handle, wanted) or ()
        watts = [
            _watts(value.value.uiVal or None) if value.nvmlReturn == 0 else None for value in values
        ]
        return (watts[0], watts[1]) if len(watts) == 2 else (None, None)


def throttling(reasons: int) -> tuple[str, ...]:
    """Return why a clock is held down, from NVML's event reasons, without those that the user or
    idleness asked for.
    """
    found = tuple(name for name, bits in _THROTTLING.items() if reasons & bits)
    return found or (("hardware",) if reasons & _HARDWARE else ())


class _Traffic:
    """Bytes over NVLink-C2C and PCIe by GPM: the difference of two readings, which the driver
    converts to MiB/s.
    """

    def __init__(self, nvml: Any, handle: Any, *, c2c: bool) -> None:
        self._nvml = nvml
        self._handle = handle
        self._metrics = {
            "pcie_to_gpu_bytes_per_s": nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
            "pcie_to_host_bytes_per_s": nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
        }
        if c2c:  # a GPU on PCIe would report zeros, which look like an idle link
            self._metrics |= {
                "c2c_to_gpu_bytes_per_s": nvml.NVML_GPM_METRIC_C2C_DATA_RX_PER_SEC,
                "c2c_to_host_bytes_per_s": nvml.NVML_GPM_METRIC_C2C_DATA_TX_PER_SEC,
            }
        self._readings: list[Any] = []
        support = _asked(nvml, nvml.nvmlGpmQueryDeviceSupport, handle)
        if support is not None and support.isSupportedDevice:
            readings = [_asked(nvml, nvml.nvmlGpmSampleAlloc) for _ in range(2)]
            self._readings = readings if all(reading is not None for reading in readings) else []
        self._started = False

    def rates(self) -> dict[str, float]:
        """Return bytes per second since the previous call, by fields of a sample; those that are
        not measured are absent.
        """
        if not self._readings:
            return {}
        self._readings.reverse()
        newer = self._readings[1]
        if _asked(self._nvml, self._nvml.nvmlGpmSampleGet, self._handle, newer) is None:
            return {}
        first, self._started = not self._started, True
        return {} if first else self._between(*self._readings)

    def close(self) -> None:
        for reading in self._readings:
            _asked(self._nvml, self._nvml.nvmlGpmSampleFree, reading)
        self._readings = []

    def _between(self, older: Any, newer: Any) -> dict[str, float]:
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.sample1, query.sample2 = older, newer
        query.numMetrics = len(self._metrics)
        for metric, number in zip(query.metrics, self._metrics.values(), strict=False):
            metric.metricId = number
        if _asked(self._nvml, self._nvml.nvmlGpmMetricsGet, query) is None:
            return {}
        named = zip(self._metrics, query.metrics, strict=False)
        return {
            name: round(metric.value * _MIB) for name, metric in named if metric.nvmlReturn == 0
        }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _asked(nvml: Any, function: Callable[..., T], *arguments: Any) -> T | None:
    """Return the result of an NVML call; None if the driver, the GPU or nvidia-ml-py does not
    support or allow it.
    """
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


# The peak host memory of a run, from the kernel's high-water mark of each process, which catches
# peaks of any length.
#
# ``VmHWM`` is a process's largest resident size, private and shared memory together. A plain sum
# would count shared memory twice: the optimizer states that a rank and its Adam worker both map,
# and the libraries that all processes map. Therefore the private part of each process is summed,
# shared memory counts once for each rank (the largest mapping of one of its processes), and files
# count once for all. A plain sum would also add peaks of different times, such as weights that
# pass through a rank before its states exist. Therefore a mark counts only if it has risen since
# the last sample; otherwise the current size counts.


_FIELDS = {b"VmHWM", b"VmRSS", b"RssFile", b"RssShmem"}


class Mark(NamedTuple):
    """Bytes of one process: the largest resident size so far, the current one, and its parts that
    are file pages and shared memory.
    """

    highest: int
    resident: int
    files: int
    shared: int


class _HighWater:
    """Tracks the processes of one run. Not thread-safe."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], Mark] = {}
        self._highest: int | None = None

    def read(self, processes: Iterable[Process], root: Path = Path("/")) -> int | None:
        """Return the peak so far in bytes. None until the kernel has reported the memory of a
        process.
        """
        marks: dict[tuple[int, int], Mark] = {}
        since: list[tuple[Process, Mark]] = []
        for process in processes:
            key = (process.pid, process.start_time)
            if (now := _read_mark(root, process.pid)) is not None:
                before = self._marks.get(key)
                marks[key] = (
                    now._replace(highest=max(now.highest, before.highest)) if before else now
                )
                since.append((process, _since_last(before, now)))
        self._marks = marks
        if since:
            self._highest = max(self._highest or 0, _together(since))
        return self._highest


def _since_last(before: Mark | None, now: Mark) -> Mark:
    """Return the largest sizes of a process since the last sample, as far as the kernel reports
    them.
    """
    if before is None:
        return now._replace(resident=now.highest)
    if (
        now.highest <= before.highest
    ):  # the kernel's counters are approximate, so a mark may even decrease a little
        return now
    return Mark(
        now.highest, now.highest, max(before.files, now.files), max(before.shared, now.shared)
    )


def _together(marks: Iterable[tuple[Process, Mark]]) -> int:
    """Return the bytes that these processes occupy together, with nothing counted twice."""
    private, files = 0, 0
    shared: dict[int | None, int] = {}
    for process, mark in marks:
        private += max(0, mark.resident - mark.files - mark.shared)
        files = max(files, mark.files)
        shared[process.rank] = max(shared.get(process.rank, 0), mark.shared)
    return private + files + sum(shared.values())


def _read_mark(root: Path, pid: int) -> Mark | None:
    """Read /proc/PID/status. Return None for a process that has ended, or if the kernel does not
    report its memory.
    """
    try:
        lines = (root / f"proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return None
    sizes = {
        name: 1024 * int(value.split()[0])
        for name, _, value in (line.partition(b":") for line in lines)
        if name in _FIELDS
    }
    return (
        Mark(sizes[b"VmHWM"], sizes[b"VmRSS"], sizes[b"RssFile"], sizes[b"RssShmem"])
        if len(sizes) == len(_FIELDS)
        else None
    )


# Where the processes of a run really are: their cores, their memory by NUMA node, their priority.
#
# Whatever the plan says and the ranks reported at their start, others can move a process later,
# and the kernel allocates elsewhere when a node is full.


_KIB = 1024
IDLE_NICE = 20
"""Stands for SCHED_IDLE, which gives way to every nice value."""
_FILE = re.compile(rb" file=(?!/dev/shm/|/memfd:)")
"""Libraries and mapped data. Shared memory, which optimizer states are in, has names as well."""
_PAGES = re.compile(rb" N(\d+)=(\d+)")
_PAGE_SIZE = re.compile(rb" kernelpagesize_kB=(\d+)")


def _read_placements(processes: Iterable[Process]) -> tuple[RankPlacement, ...]:
    """Return the placement of each rank's processes that live now.

    The kernel walks their page tables for it: milliseconds a gigabyte of small pages.
    """
    by_rank: dict[int, list[Process]] = {}
    for process in processes:
        if process.role in ("rank", "adam") and process.rank is not None:
            by_rank.setdefault(process.rank, []).append(process)
    return tuple(_placement(rank, own) for rank, own in sorted(by_rank.items()))


def _placement(rank: int, processes: Sequence[Process]) -> RankPlacement:
    sizes: Counter[int] = Counter()
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            sizes.update(_node_bytes(Path(f"/proc/{process.pid}/numa_maps").read_bytes()))
    return RankPlacement(
        rank=rank,
        cpus=_cpus(process for process in processes if process.role == "rank"),
        adam_cpus=_cpus(process for process in processes if process.role == "adam"),
        node_bytes=dict(sizes),
        nice=max(map(_nice, processes)),
    )


def _node_bytes(numa_maps: bytes) -> dict[int, int]:
    """Return the bytes on each NUMA node that ``/proc/PID/numa_maps`` lists, without those of
    files.
    """
    sizes: Counter[int] = Counter()
    for line in numa_maps.splitlines():
        page = _PAGE_SIZE.search(line)
        if page is not None and not _FILE.search(line):
            for node, pages in _PAGES.findall(line):
                sizes[int(node)] += int(pages) * int(page[1]) * _KIB
    return dict(sizes)


def _cpus(processes: Iterable[Process]) -> tuple[int, ...]:
    """Return the CPUs on which any thread of these processes may run."""
    found: set[int] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            # Names, not paths; psutil would read a file of each thread.
            for thread in os.listdir(f"/proc/{process.pid}/task"):  # noqa: PTH208
                with contextlib.suppress(ProcessLookupError):  # this thread alone has
                    found |= os.sched_getaffinity(int(thread))
    return tuple(sorted(found))


def _nice(process: Process) -> int:
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(process.pid) == os.SCHED_IDLE:
            return IDLE_NICE
        return os.getpriority(os.PRIO_PROCESS, process.pid)
    return 0


def misplaced(placement: RankPlacement, cpus: Collection[int], main_cpus: Collection[int]) -> bool:
    """Return whether a rank's processes may run on other cores than the planned ones, or not on all
    of them.

    Args:
        placement: Where they may run.
        cpus: The cores that were planned for the rank.
        main_cpus: Those of them that the Adam worker leaves. The rank keeps to them when the worker
            has ended.
    """
    found = {*placement.cpus, *placement.adam_cpus}
    return found != set(cpus) and (bool(placement.adam_cpus) or found != set(main_cpus))


def share_on_nodes(placement: RankPlacement, nodes: Collection[int]) -> float | None:
    """Return the share of a rank's memory that is on these nodes; None if there are none, so that
    any will do, or nothing is known.
    """
    total = sum(placement.node_bytes.values())
    if not nodes:
        return 1.0 if total and len(placement.node_bytes) == 1 else None
    return sum(placement.node_bytes.get(node, 0) for node in nodes) / total if total else None


MEMORY_INTERVAL_S = 10.0
_COST_SHARE = 1 / 500
"""Reading PSS, or where pages are, walks the run's page tables, which is slow for hundreds of GB,
and naming foreign processes reads all processes. Their intervals grow so that each stays below this
share of a core.
"""
FOREIGN_INTERVAL_S = 5.0
_FOREIGN_CORES = 0.5
"""Cores that other processes keep busy before they are looked for: reading every process is slow on
a host with thousands.
"""
_MEMINFO_LINE = re.compile(rb"(MemTotal|MemFree|FilePages):\s+(\d+) kB")


class _Seldom(Generic[T]):
    """A figure of the run's memory that is costly to read. It is repeated until it is read
    again.
    """

    def __init__(self, read: Callable[[], T], *, due: float = 0.0) -> None:
        """Read from ``due`` on, by the clock of ``value``."""
        self._read = read
        self._value: T | None = None
        self._due = due

    def value(self, now: float) -> T | None:
        if now >= self._due:
            started = time.process_time()
            self._value = self._read()
            self._due = now + max(MEMORY_INTERVAL_S, (time.process_time() - started) / _COST_SHARE)
        return self._value


class Sampler:
    """Takes samples, each of which covers the time since the one before. Not thread-safe."""

    def __init__(
        self, machine: Machine, tree: ProcessTree, attempt: int, root: Path = Path("/")
    ) -> None:
        self._nodes = tuple(node for node in machine.numa_nodes if node.kind != "empty")
        self._sole_memory_node = sole_memory_node(machine.numa_nodes)
        self._tree = tree
        self._attempt = attempt
        self._root = root
        self._gpus = GpuSampler(machine.gpus, root)
        self._clock = time.monotonic()
        self._cpu = _read_cpu_times(root)
        self._own_cpu_s = time.process_time()
        self._high_water = _HighWater()
        self._memory_bytes = _Seldom(tree.memory_bytes)
        # Not in the same second as the other, so that the heartbeat waits for one of them at most.
        self._placement_due = self._clock + MEMORY_INTERVAL_S / 2
        self._placement = _Seldom(lambda: _read_placements(tree.alive), due=self._placement_due)
        self._loads = ProcessLoads()
        self._foreign: tuple[ForeignProcess, ...] = ()
        self._foreign_due = 0.0

    def sample(self) -> Sample:
        """Take a sample."""
        now, cpu, own_cpu_s = time.monotonic(), _read_cpu_times(self._root), time.process_time()
        before, self._cpu = self._cpu, cpu
        interval_s, self._clock = now - self._clock, now
        spent_s, self._own_cpu_s = own_cpu_s - self._own_cpu_s, own_cpu_s
        nodes = tuple(self._node_sample(node, before, cpu) for node in self._nodes)
        run_cpu_s = self._tree.cpu_s()
        self._read_foreign(
            now, sum(sum(node.cores) for node in nodes) / 100 - run_cpu_s / max(interval_s, 1e-3)
        )
        peak = self._high_water.read(
            self._tree.alive
        )  # before the GPUs, which may answer late while they start
        # In some samples only: it rarely changes, and takes as much space as the cores' load.
        placement: tuple[RankPlacement, ...] = ()
        if now >= self._placement_due:
            self._placement_due = now + MEMORY_INTERVAL_S
            placement = self._placement.value(now) or ()
        return Sample(
            attempt=self._attempt,
            time=time.time(),
            interval_s=round(interval_s, 3),
            nodes=nodes,
            gpus=self._gpus.sample(),
            run_cpu_s=round(run_cpu_s, 3),
            run_memory_bytes=self._memory_bytes.value(now),
            run_memory_peak_bytes=peak,
            supervisor_cpu_s=round(spent_s, 4),
            foreign=self._foreign,
            placement=placement,
        )

    def gpu_uses(self) -> dict[int, _GpuUse]:
        """Return what processes use of the GPUs, by pid."""
        return self._gpus.processes()

    def close(self) -> None:
        """Close NVML."""
        self._gpus.close()

    def _read_foreign(self, now: float, busy_cores: float) -> None:
        """Name the other processes if they keep ``busy_cores`` busy, which takes two readings."""
        if busy_cores < _FOREIGN_CORES:
            self._loads, self._foreign, self._foreign_due = ProcessLoads(), (), 0.0
        elif now >= self._foreign_due:
            started = time.process_time()
            ours = {process.pid for process in self._tree.alive} | {os.getpid()}
            self._foreign = self._loads.read(without=ours)[:MOST_FOREIGN]
            self._foreign_due = now + max(
                FOREIGN_INTERVAL_S, (time.process_time() - started) / _COST_SHARE
            )

    def _node_sample(
        self, node: NumaNode, before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]
    ) -> NodeSample:
        memory = _read_node_memory(self._root, node.id, sole=node.id == self._sole_memory_node)
        return NodeSample(
            id=node.id,
            cores=tuple(_busy_percent(before.get(cpu), after.get(cpu)) for cpu in node.cpus),
            memory_used_bytes=memory["MemTotal"] - memory["MemFree"],
            memory_total_bytes=memory["MemTotal"],
            file_cache_bytes=memory["FilePages"],
        )


def _read_cpu_times(root: Path = Path("/")) -> dict[int, tuple[int, int]]:
    """Return (idle, total) clock ticks since boot of each CPU, from /proc/stat. Waiting for I/O
    counts as idle.
    """
    times = {}
    for line in (root / "proc/stat").read_bytes().splitlines():
        if not line.startswith(b"cpu"):
            break  # the CPU lines come first; the interrupt counters after them are long
        name, *values = line.split()
        if name != b"cpu":
            ticks = [int(value) for value in values[:8]]
            times[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return times


def _busy_percent(before: tuple[int, int] | None, after: tuple[int, int] | None) -> int:
    """Return the busy percentage of a CPU between two readings; 0 for a CPU that is offline or has
    not ticked.
    """
    if before is None or after is None or after[1] <= before[1]:
        return 0
    idle = (after[0] - before[0]) / (after[1] - before[1])
    return round(100 * min(1.0, max(0.0, 1 - idle)))


def _read_node_memory(root: Path, node: int, *, sole: bool) -> dict[str, int]:
    """Return MemTotal, MemFree and FilePages of a node in bytes; those of the host if the kernel
    has no NUMA.

    ``sole`` means that no other node has memory, so that the host's figures correct those of the
    node, which may lag behind.
    """
    try:
        own = _memory_sizes(root / f"sys/devices/system/node/node{node}/meminfo")
    except FileNotFoundError:
        return _memory_sizes(root / "proc/meminfo")
    return caught_up(own, _memory_sizes(root / "proc/meminfo")) if sole else own


def _memory_sizes(path: Path) -> dict[str, int]:
    sizes = {"MemTotal": 0, "MemFree": 0, "FilePages": 0}
    text = path.read_bytes().replace(b"\nCached:", b"\nFilePages:")
    for name, kib in _MEMINFO_LINE.findall(text):
        sizes[name.decode()] = int(kib) * 1024
    return sizes


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory, in this process's cgroup
    if counted there, else on the host.
    """
    count = None
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = root / "sys/fs/cgroup" / line[3:].lstrip("/")
                count = _counter(folder / "memory.events", b"oom_kill")
    return (_counter(root / "proc/vmstat", b"oom_kill") or 0) if count is None else count


def _counter(path: Path, name: bytes) -> int | None:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
