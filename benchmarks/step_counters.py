"""What the host and its processes did during a step, besides computing: for finding out why a step
of a benchmark was slow.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MINOR_FAULTS, _MAJOR_FAULTS, _USER_TICKS, _SYSTEM_TICKS = 7, 9, 11, 12
"""Fields of ``/proc/PID/stat`` after the name of the process."""
_STEAL = 8
"""Field of ``/proc/stat``'s first line: time in which the hypervisor ran something else."""
_HOST = ("numa_hint_faults", "pgmigrate_success", "compact_stall", "thp_collapse_alloc")
"""Counters of ``/proc/vmstat``: balancing, compaction and collapsing of memory, each of which stops
a process that uses it.
"""


class StepCounters:
    """Counts from one call of ``lap`` to the next.

    Args:
        worker_pid: The Adam worker; None without one.
        allocator: Returns counters of the GPU's memory allocator (``torch.cuda.memory_stats``);
            None without a GPU.
    """

    def __init__(
        self, worker_pid: int | None, allocator: Callable[[], dict[str, Any]] | None
    ) -> None:
        self._worker_pid, self._allocator = worker_pid, allocator
        self._collecting_s = self._began = 0.0
        gc.callbacks.append(self._on_collection)
        self._last = self._now()

    def lap(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        before, self._last = self._last, self._now()
        return {name: count - before[name] for name, count in self._last.items()}

    def _now(self) -> dict[str, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        found: dict[str, float] = {
            "minor_faults": own.ru_minflt,
            "major_faults": own.ru_majflt,
            "preempted": own.ru_nivcsw,
            "cpu_s": own.ru_utime + own.ru_stime,
            "system_s": own.ru_stime,
            "collecting_s": self._collecting_s,
            "stolen_s": _stolen_s(),
            **_host(),
        }
        if self._worker_pid is not None:
            found |= _worker(self._worker_pid)
        if self._allocator is not None:
            stats = self._allocator()
            found["reserved_bytes"] = stats.get("reserved_bytes.all.current", 0)
            found["device_allocations"] = stats.get("num_device_alloc", 0) + stats.get(
                "num_device_free", 0
            )
            found["allocation_retries"] = stats.get("num_alloc_retries", 0)
        return found

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._collecting_s += time.perf_counter() - self._began


def _worker(pid: int) -> dict[str, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "worker_minor_faults": int(fields[_MINOR_FAULTS]),
        "worker_major_faults": int(fields[_MAJOR_FAULTS]),
        "worker_cpu_s": (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_PER_S,
        "worker_system_s": int(fields[_SYSTEM_TICKS]) / _TICKS_PER_S,
    }


def _stolen_s() -> float:
    fields = Path("/proc/stat").read_text().split(maxsplit=_STEAL + 1)
    return int(fields[_STEAL]) / _TICKS_PER_S if len(fields) > _STEAL else 0.0


def _host() -> dict[str, float]:
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return {}
    return {name: int(counters[name]) for name in _HOST if name in counters}
