"""Which processes of this host compute, whoever they belong to."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from so_tui.runs.process_stat import Stat, read_stat
from so_tui.runs.records import ForeignProcess

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LEAST_CORES = 0.1
"""A process that uses less does not compute."""


class ProcessLoads:
    """Reads how much each process computed since the reading before. It costs one small file a process. Not thread-safe."""

    def __init__(self) -> None:
        self._before: dict[int, Stat] = {}
        self._clock = 0.0

    def read(self, *, without: Collection[int] = ()) -> tuple[ForeignProcess, ...]:
        """Return the processes that compute, the busiest first; none at the first reading.

        Args:
            without: Pids that are left out.
        """
        now = time.monotonic()
        stats = {pid: stat for pid in pids() if (stat := read_stat(pid)) is not None and stat.alive}
        before, interval_s = self._before, now - self._clock
        self._before, self._clock = stats, now
        loads = [
            (pid, (stat.cpu_ticks - earlier.cpu_ticks) / _TICKS_PER_S / interval_s)
            for pid, stat in stats.items()
            if (earlier := before.get(pid)) is not None and earlier.start_time == stat.start_time and pid not in without
        ]
        computing = sorted((load for load in loads if load[1] >= LEAST_CORES), key=lambda load: -load[1])
        return tuple(
            ForeignProcess(pid=pid, name=stats[pid].name, cores=round(cores, 2), cpu=stats[pid].cpu, own=is_own(pid))
            for pid, cores in computing
        )


def pids() -> set[int]:
    """Return the processes that this one may see."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (names, not paths, once a second)


def is_own(pid: int) -> bool:
    """Return whether a process belongs to this user. One that changed its user, as ``sudo`` does, belongs to that user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116 (as above)
    except OSError:
        return False
