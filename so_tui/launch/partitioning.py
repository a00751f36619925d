"""Partition cache and memory bandwidth for a run, where this user may write to resctrl, and undo it.

The name of a group says which supervisor made it, so that what a killed one left is found by whoever comes next: the run's next supervisor,
the next start on this host, or ``so-tui doctor``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.resctrl import read_resctrl, resctrl_mount
from so_tui.machine.system_files import SystemFiles
from so_tui.plan.partitions import Partition, partitions
from so_tui.plan.types import RankBinding
from so_tui.runs.host import this_host
from so_tui.runs.liveness import alive, identify
from so_tui.runs.records import Process

VARIABLE = "SO_TUI_MPAM"
"""``off`` leaves resctrl alone."""
_NAME = re.compile(r"so-tui-(?:main|adam)-(\d+)-(\d+)-(\d+)")
"""PID namespace, pid and start time of a supervisor."""


class Partitioning:
    """The groups of one supervisor."""

    def __init__(self, root: Path | None = None) -> None:
        """``root`` holds copies of /sys and /proc; this host's own if absent."""
        self._files = SystemFiles(root)
        self._groups: list[Path] = []

    def apply(self, bindings: Sequence[RankBinding]) -> tuple[Partition, ...]:
        """Make the groups, and return them; none where that is switched off, not permitted or not possible.

        Raises:
            OSError: The kernel refused what its own limits allow. What was made is removed again.
        """
        mount = resctrl_mount(self._files)
        if os.environ.get(VARIABLE) == "off" or mount is None or not os.access(self._files.path(mount[0]), os.W_OK):
            return ()
        remove_leftovers(self._files)
        found = read_resctrl(self._files)
        wanted = partitions(found, bindings) if found is not None else ()
        own = identify(os.getpid())
        if isinstance(wanted, str) or own is None:
            return ()
        try:
            for partition in wanted:
                name = f"so-tui-{partition.role}-{this_host().pid_namespace}-{own.pid}-{own.start_time}"
                self._make(self._files.path(mount[0]) / name, partition)
        except OSError:
            self.remove()
            raise
        return wanted

    def remove(self) -> None:
        """Remove the groups; their CPUs return to the default group. Safe to call twice. Raises OSError."""
        while self._groups:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self._groups.pop())  # noqa: PTH106 - as the kernel removes the files of a group

    def _make(self, group: Path, partition: Partition) -> None:
        group.mkdir()
        self._groups.append(group)
        (group / "schemata").write_text("".join(f"{line}\n" for line in partition.schemata))
        (group / "cpus_list").write_text(f"{cpu_ranges(partition.cpus)}\n")


def remove_leftovers(files: SystemFiles | None = None) -> tuple[str, ...]:
    """Remove the groups of supervisors that have died, and return their names; those of other PID namespaces are not judged.

    Raises:
        OSError: A group cannot be removed.
    """
    files = files or SystemFiles()
    mount = resctrl_mount(files)
    removed = []
    for name in files.names(mount[0]) if mount is not None else ():
        made_by = _NAME.fullmatch(name)
        if mount is None or made_by is None or int(made_by[1]) != this_host().pid_namespace:
            continue
        if not alive(Process(pid=int(made_by[2]), start_time=int(made_by[3]))):
            with contextlib.suppress(PermissionError):  # another user's
                os.rmdir(files.path(mount[0]) / name)  # noqa: PTH106 - as above
                removed.append(name)
    return tuple(removed)
