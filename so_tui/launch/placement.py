"""Where the processes of a run really are: their cores, their memory by NUMA node, their priority.

Whatever the plan says and the ranks reported at their start, others can move a process later, and the kernel allocates elsewhere when a
node is full.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from so_tui.machine.resctrl import read_groups, resctrl_mount
from so_tui.machine.system_files import SystemFiles
from so_tui.runs.placement import RankPlacement
from so_tui.runs.records import Process

_KIB = 1024
_FILES = SystemFiles()
IDLE_NICE = 20
"""Stands for SCHED_IDLE, which gives way to every nice value."""
_FILE = re.compile(rb" file=(?!/dev/shm/|/memfd:)")
"""Libraries and mapped data. Shared memory, which optimizer states are in, has names as well."""
_PAGES = re.compile(rb" N(\d+)=(\d+)")
_PAGE_SIZE = re.compile(rb" kernelpagesize_kB=(\d+)")


def read_placements(processes: Iterable[Process]) -> tuple[RankPlacement, ...]:
    """Return the placement of each rank's processes that live now.

    The kernel walks their page tables for it: milliseconds a gigabyte of small pages.
    """
    mount = resctrl_mount(_FILES)
    groups = read_groups(_FILES, mount[0]) if mount is not None else {}
    by_rank: dict[int, list[Process]] = {}
    for process in processes:
        if process.role in ("rank", "adam") and process.rank is not None:
            by_rank.setdefault(process.rank, []).append(process)
    return tuple(_placement(rank, own, groups) for rank, own in sorted(by_rank.items()))


def _placement(
    rank: int, processes: Sequence[Process], groups: dict[str, tuple[int, ...]]
) -> RankPlacement:
    sizes: Counter[int] = Counter()
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            sizes.update(node_bytes(Path(f"/proc/{process.pid}/numa_maps").read_bytes()))
    cpus = _cpus(process for process in processes if process.role == "rank")
    adam_cpus = _cpus(process for process in processes if process.role == "adam")
    return RankPlacement(
        rank=rank,
        cpus=cpus,
        adam_cpus=adam_cpus,
        node_bytes=dict(sizes),
        nice=max(map(_nice, processes)),
        mpam_groups=tuple(group for each in (cpus, adam_cpus) if (group := group_of(each, groups))),
    )


def group_of(cpus: Sequence[int], groups: dict[str, tuple[int, ...]]) -> str:
    """Return the resctrl group that all these CPUs belong to; empty for the default group."""
    return next((name for name, own in groups.items() if cpus and set(cpus) <= set(own)), "")


def node_bytes(numa_maps: bytes) -> dict[int, int]:
    """Return the bytes on each NUMA node that ``/proc/PID/numa_maps`` lists, without those of files."""
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
            for thread in os.listdir(f"/proc/{process.pid}/task"):  # noqa: PTH208 (names, not paths)
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
    """Return whether a rank's processes may run on other cores than the planned ones, or not on all of them.

    Args:
        placement: Where they may run.
        cpus: The cores that were planned for the rank.
        main_cpus: Those of them that the Adam worker leaves. The rank keeps to them when the worker has ended.
    """
    found = {*placement.cpus, *placement.adam_cpus}
    return found != set(cpus) and (bool(placement.adam_cpus) or found != set(main_cpus))


def share_on_nodes(placement: RankPlacement, nodes: Collection[int]) -> float | None:
    """Return the share of a rank's memory that is on these nodes; None if there are none, so that any will do, or nothing is known."""
    total = sum(placement.node_bytes.values())
    if not nodes:
        return 1.0 if total and len(placement.node_bytes) == 1 else None
    return sum(placement.node_bytes.get(node, 0) for node in nodes) / total if total else None
