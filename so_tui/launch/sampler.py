"""Samples of the host that trains, once a second: the load of each core, the memory of each NUMA node, the GPUs, and who else computes.

Everything comes from a few small files and NVML calls, because sampling 288 cores must cost far less than one percent of one core.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from so_tui.launch.gpu_sampler import GpuSampler
from so_tui.launch.high_water import HighWater
from so_tui.launch.host_processes import GpuUse
from so_tui.launch.placement import read_placements
from so_tui.launch.process_loads import ProcessLoads
from so_tui.launch.processes import ProcessTree
from so_tui.machine.memory import caught_up, sole_memory_node
from so_tui.machine.types import Machine, NumaNode
from so_tui.runs.placement import RankPlacement
from so_tui.runs.rollup import MOST_FOREIGN
from so_tui.runs.sample import ForeignProcess, NodeSample, Sample

T = TypeVar("T")
MEMORY_INTERVAL_S = 10.0
_COST_SHARE = 1 / 500
"""Reading PSS, or where pages are, walks the run's page tables, which is slow for hundreds of GB, and naming foreign processes reads all
processes. Their intervals grow so that each stays below this share of a core."""
FOREIGN_INTERVAL_S = 5.0
_FOREIGN_CORES = 0.5
"""Cores that other processes keep busy before they are looked for: reading every process is slow on a host with thousands."""
_MEMINFO_LINE = re.compile(rb"(MemTotal|MemFree|FilePages):\s+(\d+) kB")


class _Seldom(Generic[T]):
    """A figure of the run's memory that is costly to read. It is repeated until it is read again."""

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
        self._cpu = read_cpu_times(root)
        self._own_cpu_s = time.process_time()
        self._high_water = HighWater()
        self._memory_bytes = _Seldom(tree.memory_bytes)
        # Not in the same second as the other, so that the heartbeat waits for one of them at most.
        self._placement_due = self._clock + MEMORY_INTERVAL_S / 2
        self._placement = _Seldom(lambda: read_placements(tree.alive), due=self._placement_due)
        self._loads = ProcessLoads()
        self._foreign: tuple[ForeignProcess, ...] = ()
        self._foreign_due = 0.0

    def sample(self) -> Sample:
        """Take a sample."""
        now, cpu, own_cpu_s = time.monotonic(), read_cpu_times(self._root), time.process_time()
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
            placement=self._read_placement(now),
        )

    def gpu_uses(self) -> dict[int, GpuUse]:
        """Return what processes use of the GPUs, by pid."""
        return self._gpus.processes()

    def close(self) -> None:
        """Close NVML."""
        self._gpus.close()

    def _read_placement(self, now: float) -> tuple[RankPlacement, ...]:
        """Return where the ranks are, in some samples only: it rarely changes, and takes as much space as the cores' load."""
        if now < self._placement_due:
            return ()
        self._placement_due = now + MEMORY_INTERVAL_S
        return self._placement.value(now) or ()

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
        memory = read_node_memory(self._root, node.id, sole=node.id == self._sole_memory_node)
        return NodeSample(
            id=node.id,
            cores=tuple(busy_percent(before.get(cpu), after.get(cpu)) for cpu in node.cpus),
            memory_used_bytes=memory["MemTotal"] - memory["MemFree"],
            memory_total_bytes=memory["MemTotal"],
            file_cache_bytes=memory["FilePages"],
        )


def read_cpu_times(root: Path = Path("/")) -> dict[int, tuple[int, int]]:
    """Return (idle, total) clock ticks since boot of each CPU, from /proc/stat. Waiting for I/O counts as idle."""
    times = {}
    for line in (root / "proc/stat").read_bytes().splitlines():
        if not line.startswith(b"cpu"):
            break  # the CPU lines come first; the interrupt counters after them are long
        name, *values = line.split()
        if name != b"cpu":
            ticks = [int(value) for value in values[:8]]
            times[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return times


def busy_percent(before: tuple[int, int] | None, after: tuple[int, int] | None) -> int:
    """Return the busy percentage of a CPU between two readings; 0 for a CPU that is offline or has not ticked."""
    if before is None or after is None or after[1] <= before[1]:
        return 0
    idle = (after[0] - before[0]) / (after[1] - before[1])
    return round(100 * min(1.0, max(0.0, 1 - idle)))


def read_node_memory(root: Path, node: int, *, sole: bool) -> dict[str, int]:
    """Return MemTotal, MemFree and FilePages of a node in bytes; those of the host if the kernel has no NUMA.

    ``sole`` means that no other node has memory, so that the host's figures correct those of the node, which may lag behind.
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
    """Return how many processes the kernel has killed for lack of memory, in this process's cgroup if counted there, else on the host."""
    for name in _cgroup_event_files(root):
        if (count := _counter(name, b"oom_kill")) is not None:
            return count
    return _counter(root / "proc/vmstat", b"oom_kill") or 0


def _cgroup_event_files(root: Path) -> list[Path]:
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return []
    paths = [line[3:] for line in text.splitlines() if line.startswith("0::")]
    return [root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events" for path in paths]


def _counter(path: Path, name: bytes) -> int | None:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
