"""Samples of the host that trains, once a second: the load of each core, the memory of each NUMA
node, the GPUs, and who else computes.

Everything comes from a few small files and NVML calls, because sampling 288 cores must cost far
less than one percent of one core.
"""

from __future__ import annotations

import contextlib
import math
import os
import pwd
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import psutil

from so_tui.launch.supervisor.processes import ProcessLoads, ProcessTree
from so_tui.machine.host import caught_up, sole_memory_node
from so_tui.machine.system_files import SystemFiles, meminfo
from so_tui.machine.types import Cpus, Gpu, Machine, NumaNode
from so_tui.runs.records import (
    ForeignProcesses,
    GpuSample,
    NodeSample,
    Placements,
    Process,
    RankPlacement,
    Role,
    Sample,
)
from so_tui.runs.samples import MOST_FOREIGN
from so_tui.units import KIB

# The processes that a user of this host looks for: those that use GPUs, those that are bound to
# cores, and those that compute.


MOST = 40
"""Processes that are listed."""
_BUSY_CORES = 0.5
"""Cores that a process keeps busy from which on it is listed in any case."""
_KERNEL = 2
"""Pid of the process that starts the kernel's own, all of which are bound."""


GpuBytes = Mapping[int, int | None]
"""Memory that a process uses of GPUs, by their index; None where the driver does not say."""


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
    bound: Cpus
    """The CPUs that it is bound to; empty where it may use all that are allowed here."""
    gpu_bytes: GpuBytes
    command: tuple[str, ...] = ()
    """Its arguments, the program first; its owner chose them, too. Empty where they are unknown."""

    @property
    def gpu_total_bytes(self) -> int:
        """Memory on all GPUs, as far as known."""
        return sum(size or 0 for size in self.gpu_bytes.values())


class HostProcesses:
    """Reads the processes of this host, whoever they belong to. It costs one or two small files a
    process. Not thread-safe.
    """

    def __init__(self, allowed_cpus: Collection[int]) -> None:
        """``allowed_cpus`` are those that a process which is bound to none may use."""
        self._allowed = frozenset(allowed_cpus)
        self._loads = ProcessLoads()

    def read(self, gpu_uses: Mapping[int, GpuBytes]) -> tuple[HostProcess, ...]:
        """Return what is worth listing: users of GPUs first, then the busiest."""
        found = []
        for pid, (stat, cores) in self._loads.measure().items():
            if _KERNEL in (pid, stat.parent):
                continue
            bound, sizes = self._bound(pid), gpu_uses.get(pid, {})
            if bound or sizes or cores >= _BUSY_CORES:
                found.append(HostProcess(pid, stat.name, "", cores, None, bound, sizes))
        found.sort(key=lambda use: (not use.gpu_bytes, -use.gpu_total_bytes, -use.cores, use.pid))
        return tuple(map(_with_owner, found[:MOST]))

    def _bound(self, pid: int) -> Cpus:
        try:
            cpus = os.sched_getaffinity(pid)
        except OSError:  # it has ended
            return ()
        return tuple(sorted(cpus)) if len(cpus) < len(self._allowed) else ()


def _with_owner(process: HostProcess) -> HostProcess:
    """Return a process with its user, memory and command, which only those that are listed are
    asked for.
    """
    try:
        known = psutil.Process(process.pid)
        user, memory_bytes = _user_name(known.uids().effective), known.memory_info().rss
        command = tuple(known.cmdline()[:_MOST_ARGUMENTS])
    except psutil.Error:  # it has ended
        return process
    return replace(process, user=user, memory_bytes=memory_bytes, command=command)


_MOST_ARGUMENTS = 40
"""What nobody sees the end of is not kept."""


@cache
def _user_name(uid: int) -> str:
    """Return a user's name; it may come from a server, and so is asked for once."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# Samples of the GPUs: NVIDIA's by NVML, AMD's from files of their kernel driver, which any user may
# read (Linux documents them in ``gpu/amdgpu``).
#
# Any figure may be missing, because drivers, containers and some GPUs do not support it.


_MIB = 2**20
_THROTTLING = {"power": 0x4, "heat": 0x20 | 0x40, "power-brake": 0x80}
"""``nvmlClocksEventReason``: the software's power cap; heat, seen by software or hardware; the
power supply's brake.
"""
_HARDWARE = 0x8
"""A slowdown by hardware, which comes with its cause where the driver knows it."""


class GpuSampler:
    """Samples the given GPUs; NVIDIA's only with a driver. Not thread-safe."""

    def __init__(self, gpus: Sequence[Gpu], root: Path = Path("/")) -> None:
        self._files = SystemFiles(root)
        self._amd = [gpu for gpu in gpus if gpu.vendor == "amd"]
        nvidia = [gpu for gpu in gpus if gpu.vendor == "nvidia"]
        if nvidia:
            _ask("nvmlInit")  # without a driver there are no handles either
        handles = [_ask("nvmlDeviceGetHandleByPciBusId", gpu.pci_bus_id.encode()) for gpu in nvidia]
        self._nvidia = [
            _NvidiaGpu(gpu, handle)
            for gpu, handle in zip(nvidia, handles, strict=True)
            if handle is not None
        ]

    def sample(self) -> tuple[GpuSample, ...]:
        """Take a sample of each GPU."""
        return (
            *(_amd_sample(gpu, self._files) for gpu in self._amd),
            *(gpu.sample() for gpu in self._nvidia),
        )

    def processes(self) -> dict[int, GpuBytes]:
        """Return what each process that computes on NVIDIA's GPUs uses of them, by pid. The driver
        of AMD's has no such list for other users.
        """
        found: defaultdict[int, dict[int, int | None]] = defaultdict(dict)
        for gpu in self._nvidia:
            for process in _ask("nvmlDeviceGetComputeRunningProcesses", gpu.handle) or ():
                found[process.pid][gpu.index] = process.usedGpuMemory
        return dict(found)

    def close(self) -> None:
        """Release the counters and NVML."""
        for gpu in self._nvidia:
            gpu.traffic.close()
        if self._nvidia:
            _ask("nvmlShutdown")  # it may fail once a GPU is lost
        self._nvidia = []


def _amd_sample(gpu: Gpu, files: SystemFiles) -> GpuSample:
    folder = f"/sys/bus/pci/devices/{gpu.pci_bus_id}"
    sensors = next(iter(files.names(f"{folder}/hwmon")), "")

    def sensor(unit: int, *names: str) -> float | None:
        """Return the first of these values that the GPU has, in a unit."""
        values = (files.integer(f"{folder}/hwmon/{sensors}/{name}") for name in names)
        return next((value / unit for value in values if value is not None), None)

    def whole(value: float | None) -> int | None:
        return None if value is None else math.floor(value)

    return GpuSample(
        index=gpu.index,
        busy_percent=files.integer(f"{folder}/gpu_busy_percent"),
        memory_used_bytes=files.integer(f"{folder}/mem_info_vram_used"),
        memory_total_bytes=gpu.memory_total_bytes,
        power_w=sensor(1_000_000, "power1_average", "power1_input"),
        power_limit_w=sensor(1_000_000, "power1_cap"),
        clock_mhz=whole(sensor(1_000_000, "freq1_input")),
        temperature_c=whole(sensor(1000, "temp1_input", "temp2_input")),
    )


class _NvidiaGpu:
    def __init__(self, gpu: Gpu, handle: Any) -> None:
        import pynvml

        self.index, self.handle = gpu.index, handle
        self.traffic = _Traffic(handle, c2c=gpu.c2c is not False)
        self._clock_max_mhz = _ask("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM)

    def sample(self) -> GpuSample:
        import pynvml

        load = _ask("nvmlDeviceGetUtilizationRates", self.handle)
        memory = _ask("nvmlDeviceGetMemoryInfo", self.handle)
        module_w, module_limit_w = self._module_power_w()
        reasons = _ask("nvmlDeviceGetCurrentClocksEventReasons", self.handle)
        return GpuSample(
            index=self.index,
            busy_percent=load.gpu if load else None,
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            power_w=_watts(_ask("nvmlDeviceGetPowerUsage", self.handle)),
            power_limit_w=_watts(_ask("nvmlDeviceGetEnforcedPowerLimit", self.handle)),
            module_power_w=module_w,
            module_power_limit_w=module_limit_w,
            clock_mhz=_ask("nvmlDeviceGetClockInfo", self.handle, pynvml.NVML_CLOCK_SM),
            clock_max_mhz=self._clock_max_mhz,
            temperature_c=_ask(
                "nvmlDeviceGetTemperature", self.handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            throttling=_throttling(reasons or 0),
            **self.traffic.rates(),
        )

    def _module_power_w(self) -> list[float | None]:
        """Return power and limit of the superchip; None where a GPU has a module of its own, and
        the driver therefore no such figures.
        """
        import pynvml

        figures = pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT
        asked = [(figure, pynvml.NVML_POWER_SCOPE_MODULE) for figure in figures]
        values = _ask("nvmlDeviceGetFieldValues", self.handle, asked)
        if values is None:
            return [None, None]
        return [
            _watts(value.value.uiVal or None) if value.nvmlReturn == 0 else None for value in values
        ]


def _throttling(reasons: int) -> tuple[str, ...]:
    """Return why a clock is held down, from NVML's event reasons, without those that the user or
    idleness asked for.
    """
    found = tuple(name for name, bits in _THROTTLING.items() if reasons & bits)
    return found or (("hardware",) if reasons & _HARDWARE else ())


class _Traffic:
    """Bytes over NVLink-C2C and PCIe by GPM: the difference of two readings, which the driver
    converts to MiB/s.
    """

    def __init__(self, handle: Any, *, c2c: bool) -> None:
        import pynvml

        self._handle = handle
        self._metrics = {
            "pcie_to_gpu_bytes_per_s": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
            "pcie_to_host_bytes_per_s": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
        }
        if c2c:  # a GPU on PCIe would report zeros, which look like an idle link
            self._metrics |= {
                "c2c_to_gpu_bytes_per_s": pynvml.NVML_GPM_METRIC_C2C_DATA_RX_PER_SEC,
                "c2c_to_host_bytes_per_s": pynvml.NVML_GPM_METRIC_C2C_DATA_TX_PER_SEC,
            }
        support = _ask("nvmlGpmQueryDeviceSupport", handle)
        known = support is not None and support.isSupportedDevice
        self._readings = [_ask("nvmlGpmSampleAlloc") for _ in range(2)] if known else []
        if None in self._readings:
            self.close()
        self._started = False

    def rates(self) -> dict[str, float]:
        """Return bytes per second since the previous call, by fields of a sample; those that are
        not measured are absent.
        """
        if not self._readings:
            return {}
        self._readings.reverse()
        if _ask("nvmlGpmSampleGet", self._handle, self._readings[1]) is None:
            return {}
        first, self._started = not self._started, True
        return {} if first else self._between(*self._readings)

    def close(self) -> None:
        for reading in filter(None, self._readings):
            _ask("nvmlGpmSampleFree", reading)
        self._readings = []

    def _between(self, older: Any, newer: Any) -> dict[str, float]:
        import pynvml

        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        query.sample1, query.sample2 = older, newer
        query.numMetrics = len(self._metrics)
        for metric, number in zip(query.metrics, self._metrics.values(), strict=False):
            metric.metricId = number
        if _ask("nvmlGpmMetricsGet", query) is None:
            return {}
        named = zip(self._metrics, query.metrics, strict=False)
        return {
            name: round(metric.value * _MIB) for name, metric in named if metric.nvmlReturn == 0
        }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _ask(function: str, *arguments: Any) -> Any:
    """Return the result of an NVML call; None if the driver or the GPU does not support or allow
    it.
    """
    import pynvml

    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError:
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


_SIZES = re.compile(rb"^(?:VmHWM|VmRSS|RssFile|RssShmem):\s*(\d+) kB", re.MULTILINE)
"""Of /proc/PID/status, in the order of the kernel and of ``_Mark``."""


class _Mark(NamedTuple):
    """Bytes of one process: the largest resident size so far, the current one, and its parts that
    are file pages and shared memory.
    """

    highest: int
    resident: int
    files: int
    shared: int


@dataclass
class _HighWater:
    """Tracks the processes of one run. Not thread-safe."""

    _marks: dict[tuple[int, int], _Mark] = field(default_factory=dict)
    _highest: int | None = None

    def read(self, processes: Iterable[Process], root: Path = Path("/")) -> int | None:
        """Return the peak so far in bytes. None until the kernel has reported the memory of a
        process.
        """
        marks: dict[tuple[int, int], _Mark] = {}
        since: list[tuple[Process, _Mark]] = []
        for process in processes:
            if (now := _read_mark(root, process.pid)) is None:
                continue
            key = process.pid, process.start_time
            before = self._marks.get(key, _Mark(0, 0, 0, 0))
            # The kernel's counters are approximate, so a mark may even decrease a little.
            highest = max(now.highest, before.highest)
            marks[key] = now._replace(highest=highest)
            # So large, as far as the kernel says, since the last sample.
            if highest > before.highest:
                files, shared = max(before.files, now.files), max(before.shared, now.shared)
                now = _Mark(highest, highest, files, shared)
            since.append((process, now))
        self._marks = marks
        if since:
            self._highest = max(self._highest or 0, _together(since))
        return self._highest


def _together(marks: Iterable[tuple[Process, _Mark]]) -> int:
    """Return the bytes that these processes occupy together, with nothing counted twice."""
    private, files = 0, 0
    shared: dict[int | None, int] = {}
    for process, mark in marks:
        private += max(0, mark.resident - mark.files - mark.shared)
        files = max(files, mark.files)
        shared[process.rank] = max(shared.get(process.rank, 0), mark.shared)
    return private + files + sum(shared.values())


def _read_mark(root: Path, pid: int) -> _Mark | None:
    """Read /proc/PID/status. Return None for a process that has ended, or if the kernel does not
    report its memory.
    """
    try:
        sizes = _SIZES.findall((root / f"proc/{pid}/status").read_bytes())
    except OSError:
        return None
    return _Mark(*(int(kib) * KIB for kib in sizes)) if len(sizes) == len(_Mark._fields) else None


# Where the processes of a run really are: their cores, their memory by NUMA node, their priority.
#
# Whatever the plan says and the ranks reported at their start, others can move a process later,
# and the kernel allocates elsewhere when a node is full.


IDLE_NICE = 20
"""Stands for SCHED_IDLE, which gives way to every nice value."""
_FILE = re.compile(rb" file=(?!/dev/shm/|/memfd:)")
"""Libraries and mapped data. Shared memory, which optimizer states are in, has names as well."""
_PAGES = re.compile(rb" N(\d+)=(\d+)")
_PAGE_SIZE = re.compile(rb" kernelpagesize_kB=(\d+)")


def _read_placements(processes: Iterable[Process]) -> Placements:
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
        cpus=_cpus(processes, "rank"),
        adam_cpus=_cpus(processes, "adam"),
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
                sizes[int(node)] += int(pages) * int(page[1]) * KIB
    return dict(sizes)


def _cpus(processes: Iterable[Process], role: Role) -> Cpus:
    """Return the CPUs on which any thread of the processes of a role may run."""
    found: set[int] = set()
    for process in (process for process in processes if process.role == role):
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
"""Reading where pages are walks the run's page tables, which is slow for hundreds of GB, and naming
foreign processes reads all processes. Their intervals grow so that each stays below this share of a
core.
"""
FOREIGN_INTERVAL_S = 5.0
_FOREIGN_CORES = 0.5
"""Cores that other processes keep busy before they are looked for: reading every process is slow on
a host with thousands.
"""
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CGROUP = re.compile(r"^0::(.*)$", re.MULTILINE)


T = TypeVar("T")


@dataclass
class _Seldom(Generic[T]):
    """A figure that is costly to read. It is repeated until it is read again."""

    read: Callable[[], T]
    due: float
    """When it is read next, by the clock of ``value``."""
    interval_s: float
    known: T | None = None

    def value(self, now: float) -> T | None:
        if now >= self.due:
            started = time.process_time()
            self.known = self.read()
            self.due = now + max(self.interval_s, (time.process_time() - started) / _COST_SHARE)
        return self.known


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
        self._files = SystemFiles(root)
        self.gpus = GpuSampler(machine.gpus, root)
        self._clock = time.monotonic()
        self._cpu = _read_cpu_times(root)
        self._own_cpu_s = time.process_time()
        self._high_water = _HighWater()
        self._placement_due = self._clock + MEMORY_INTERVAL_S
        self._placement = _Seldom(
            lambda: _read_placements(tree.alive),
            due=self._placement_due,
            interval_s=MEMORY_INTERVAL_S,
        )
        self._foreign = self._foreign_reader()

    def sample(self) -> Sample:
        """Take a sample."""
        now, cpu, own_cpu_s = time.monotonic(), _read_cpu_times(self._root), time.process_time()
        interval_s, spent_s = now - self._clock, own_cpu_s - self._own_cpu_s
        nodes = tuple(self._node_sample(node, self._cpu, cpu) for node in self._nodes)
        self._clock, self._cpu, self._own_cpu_s = now, cpu, own_cpu_s
        run_cpu_s = self._tree.cpu_s()
        busy_cores = sum(sum(node.cores) for node in nodes) / 100
        foreign: ForeignProcesses = ()
        if busy_cores - run_cpu_s / max(interval_s, 1e-3) < _FOREIGN_CORES:
            self._foreign = self._foreign_reader()
        else:
            foreign = self._foreign.value(now) or ()
        # Before the GPUs, which may answer late while they start.
        peak = self._high_water.read(self._tree.alive)
        # In some samples only: it rarely changes, and takes as much space as the cores' load.
        placement: Placements = ()
        if now >= self._placement_due:
            self._placement_due = now + MEMORY_INTERVAL_S
            placement = self._placement.value(now) or ()
        return Sample(
            attempt=self._attempt,
            time=time.time(),
            interval_s=round(interval_s, 3),
            nodes=nodes,
            gpus=self.gpus.sample(),
            run_cpu_s=round(run_cpu_s, 3),
            run_memory_peak_bytes=peak,
            supervisor_cpu_s=round(spent_s, 4),
            foreign=foreign,
            placement=placement,
        )

    def _foreign_reader(self) -> _Seldom[ForeignProcesses]:
        """Return what names the other processes that compute, for which it takes two readings."""
        loads = ProcessLoads()

        def read() -> ForeignProcesses:
            ours = {process.pid for process in self._tree.alive} | {os.getpid()}
            return loads.read(without=ours)[:MOST_FOREIGN]

        return _Seldom(read, due=0.0, interval_s=FOREIGN_INTERVAL_S)

    def _node_sample(
        self, node: NumaNode, before: dict[int, _Ticks], after: dict[int, _Ticks]
    ) -> NodeSample:
        memory = _read_node_memory(self._files, node.id, sole=node.id == self._sole_memory_node)
        total = memory.get("MemTotal", 0)
        return NodeSample(
            id=node.id,
            cores=tuple(
                _busy_percent(before.get(cpu, _NONE), after.get(cpu, _NONE)) for cpu in node.cpus
            ),
            memory_used_bytes=total - memory.get("MemFree", 0),
            memory_total_bytes=total,
            file_cache_bytes=memory.get("FilePages", memory.get("Cached", 0)),
        )


_Ticks = tuple[int, int]
"""Idle and all clock ticks of a CPU since the host started. Waiting for I/O counts as idle."""
_NONE: _Ticks = 0, 0


def _read_cpu_times(root: Path = Path("/")) -> dict[int, _Ticks]:
    """Return the ticks of each CPU that is online, from /proc/stat."""
    times = {}
    for line in (root / "proc/stat").read_bytes().splitlines():
        if not line.startswith(b"cpu"):
            break  # the CPU lines come first; the interrupt counters after them are long
        name, *values = line.split()
        if name != b"cpu":
            ticks = [int(value) for value in values[:8]]
            times[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return times


def _busy_percent(before: _Ticks, after: _Ticks) -> int:
    """Return the busy percentage of a CPU between two readings; 0 for a CPU that was offline or has
    not ticked.
    """
    if not before[1] or after[1] <= before[1]:
        return 0
    idle = (after[0] - before[0]) / (after[1] - before[1])
    return round(100 * min(1.0, max(0.0, 1 - idle)))


def _read_node_memory(files: SystemFiles, node: int, *, sole: bool) -> dict[str, int]:
    """Return the sizes of a node's ``meminfo`` in bytes; those of the host if the kernel has no
    NUMA.

    ``sole`` means that no other node has memory, so that the host's figures correct those of the
    node, which may lag behind.
    """
    own = meminfo(files.text(f"/sys/devices/system/node/node{node}/meminfo"))
    if own and not sole:
        return own
    whole = meminfo(files.text("/proc/meminfo"))
    return caught_up(own, whole) if own else whole


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory, in this process's cgroup
    if counted there, else on the host.
    """
    files = SystemFiles(root)
    cgroup = _CGROUP.search(files.text("/proc/self/cgroup"))
    counts = (
        _OOM_KILLS.search(files.text(name))
        for name in (
            *([f"/sys/fs/cgroup{cgroup[1]}/memory.events"] if cgroup else []),
            "/proc/vmstat",
        )
    )
    return next((int(count[1]) for count in counts if count), 0)
