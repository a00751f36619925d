"""The processes that a user of this host looks for: those that use GPUs, those that are bound to cores, and those that compute."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

from so_tui.launch.process_loads import ProcessLoad, ProcessLoads

MOST = 40
"""Processes that are listed."""
_BUSY_CORES = 0.5
"""Cores that a process keeps busy from which on it is listed in any case."""
_KERNEL = 2
"""Pid of the process that starts the kernel's own, all of which are bound."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class GpuUse:
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
    gpu: GpuUse | None


class HostProcesses:
    """Reads the processes of this host, whoever they belong to. It costs one or two small files a process. Not thread-safe."""

    def __init__(self, allowed_cpus: Collection[int]) -> None:
        """``allowed_cpus`` are those that a process which is bound to none may use."""
        self._allowed = frozenset(allowed_cpus)
        self._loads = ProcessLoads()

    def read(self, gpu_uses: Mapping[int, GpuUse]) -> tuple[HostProcess, ...]:
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
    pid: int, load: ProcessLoad, bound: tuple[int, ...], use: GpuUse | None
) -> HostProcess:
    return HostProcess(
        pid, load.stat.name, _user(pid), load.cores, _resident_bytes(pid), bound, use
    )


def _user(pid: int) -> str:
    try:
        return _user_name(os.stat(f"/proc/{pid}").st_uid)  # noqa: PTH116 (as in process_loads)
    except OSError:
        return ""


@cache
def _user_name(uid: int) -> str:
    """Return a user's name; it may come from a server, and so is asked for once."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _resident_bytes(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 (many a second)
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None
