"""Which processes of this host compute, whoever they belong to."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import NamedTuple

from so_tui.runs.process_stat import Stat, read_stat
from so_tui.runs.sample import ForeignProcess

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LEAST_CORES = 0.1
"""A process that uses less does not compute."""


class ProcessLoad(NamedTuple):
    """A process, and the cores that it keeps busy."""

    stat: Stat
    cores: float


class ProcessLoads:
    """Reads how much each process computed since the reading before. It costs one small file a process. Not thread-safe."""

    def __init__(self) -> None:
        self._before: dict[int, Stat] = {}
        self._clock = 0.0

    def measure(self) -> dict[int, ProcessLoad]:
        """Return every living process with the cores that it kept busy: 0 for those that are new since the reading before."""
        now = time.monotonic()
        stats = {pid: stat for pid in pids() if (stat := read_stat(pid)) is not None and stat.alive}
        before, interval_s = self._before, max(now - self._clock, 1 / _TICKS_PER_S)
        self._before, self._clock = stats, now
        return {
            pid: ProcessLoad(stat, _ticks_since(before.get(pid), stat) / _TICKS_PER_S / interval_s)
            for pid, stat in stats.items()
        }

    def read(self, *, without: Collection[int] = ()) -> tuple[ForeignProcess, ...]:
        """Return the processes that compute, the busiest first; none at the first reading.

        Args:
            without: Pids that are left out.
        """
        computing = [
            (pid, load)
            for pid, load in self.measure().items()
            if load.cores >= LEAST_CORES and pid not in without
        ]
        return tuple(
            ForeignProcess(
                pid=pid,
                name=load.stat.name,
                cores=round(load.cores, 2),
                cpu=load.stat.cpu,
                own=is_own(pid),
            )
            for pid, load in sorted(computing, key=lambda pair: -pair[1].cores)
        )


def _ticks_since(before: Stat | None, now: Stat) -> int:
    """Return the clock ticks that a process computed since it was read before; 0 if it was not."""
    return (
        now.cpu_ticks - before.cpu_ticks
        if before is not None and before.start_time == now.start_time
        else 0
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
