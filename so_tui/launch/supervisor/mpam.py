"""Partition cache and memory bandwidth for a run, if its user wants that and may write to resctrl, and undo it.

The name of a group says which supervisor made it, so that what a killed one left is found by whoever comes next: the run's next supervisor,
the next start on this host, or ``so-tui doctor``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from so_tui.machine.host import cpu_ranges
from so_tui.machine.resctrl import MOUNT, Resctrl, read_resctrl, resctrl_mount
from so_tui.machine.system_files import SystemFiles
from so_tui.plan.partitions import Partition, partitions
from so_tui.plan.plan import RankBinding
from so_tui.runs.liveness import alive, identify, this_host
from so_tui.runs.records import Process
from so_tui.trust.text import printable_line

# A script with which an administrator partitions cache and memory bandwidth for one binding of
# ranks, and undoes it.


_NOT_MOUNTED = """\
mount -t resctrl resctrl {mount}
echo 'Mounted. Now run "so-tui doctor --mpam" again: it reads the limits of this hardware and prints the partitions.'"""


def mount_script(host: str) -> str:
    """Return a script that mounts resctrl, whose limits are only known then."""
    return _script(host, "mounts resctrl", [_NOT_MOUNTED.format(mount=MOUNT)], [f"umount {MOUNT}"])


def partition_script(host: str, found: Resctrl, wanted: Sequence[Partition]) -> str:
    """Return a script that makes the groups."""
    folders = [shlex.quote(f"{found.mount}/so-tui-{partition.role}") for partition in wanted]
    made = [
        line
        for folder, partition in zip(folders, wanted, strict=True)
        for line in _group(folder, partition)
    ]
    return _script(
        host,
        "partitions cache and memory bandwidth along main and Adam cores",
        made,
        [f"rmdir {' '.join(folders)}"],
    )


def _group(folder: str, partition: Partition) -> Iterator[str]:
    yield f"mkdir {folder}"
    yield from (f"echo {shlex.quote(line)} > {folder}/schemata" for line in partition.schemata)
    yield f"echo {cpu_ranges(partition.cpus)} > {folder}/cpus_list"


def _script(host: str, does: str, apply: Sequence[str], undo: Sequence[str]) -> str:
    lines = [
        "#!/bin/sh",
        f"# {printable_line(host)}: {does} for so-tui. Run it as root;",
        "# with the argument `undo` it takes everything back. Nothing of it survives a reboot.",
        "set -eu",
        'if [ "${1:-}" = undo ]; then',
        *(f"    {line}" for line in undo),
        "    exit",
        "fi",
        *apply,
    ]
    return "\n".join(lines)


VARIABLE = "SO_TUI_MPAM"
"""``on`` lets runs make partitions. Nothing is made by default: what it gains is not measured, and Adam's cores get less bandwidth."""
_NAME = re.compile(r"so-tui-(?:main|adam)-(\d+)-(\d+)-(\d+)")
"""PID namespace, pid and start time of a supervisor."""


class Partitioning:
    """The groups of one supervisor."""

    def __init__(self, root: Path | None = None) -> None:
        """``root`` holds copies of /sys and /proc; this host's own if absent."""
        self._files = SystemFiles(root)
        self._groups: list[Path] = []

    def apply(self, bindings: Sequence[RankBinding]) -> tuple[Partition, ...]:
        """Remove what dead supervisors left and make the groups. Return them; none where that is not wanted, permitted or possible.

        Raises:
            OSError: The kernel refused what its own limits allow. What was made is removed again.
        """
        mount = _writable_mount(self._files)
        if mount is None:
            return ()
        remove_leftovers(self._files)
        if os.environ.get(VARIABLE) != "on":
            return ()
        found = read_resctrl(self._files)
        wanted = partitions(found, bindings) if found is not None else ()
        own = identify(os.getpid())
        if isinstance(wanted, str) or own is None:
            return ()
        try:
            for partition in wanted:
                name = f"so-tui-{partition.role}-{this_host().pid_namespace}-{own.pid}-{own.start_time}"
                self._make(mount / name, partition)
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


def possible(bindings: Sequence[RankBinding], root: Path | None = None) -> bool:
    """Return whether this user's runs could have partitions for these ranks."""
    files = SystemFiles(root)
    found = read_resctrl(files) if _writable_mount(files) is not None else None
    return found is not None and not isinstance(partitions(found, bindings), str)


def remove_leftovers(files: SystemFiles | None = None) -> tuple[str, ...]:
    """Remove this user's groups whose supervisors have died, and return their names. Those of other PID namespaces are not judged.

    Raises:
        OSError: A group cannot be removed.
    """
    mount = _writable_mount(files or SystemFiles())
    left = [group for group in mount.iterdir() if _is_left(group)] if mount is not None else []
    for group in left:
        with contextlib.suppress(FileNotFoundError):  # another start was faster
            os.rmdir(group)  # noqa: PTH106 - as above
    return tuple(group.name for group in left)


def _writable_mount(files: SystemFiles) -> Path | None:
    mount = resctrl_mount(files)
    path = files.path(mount[0]) if mount is not None else None
    return path if path is not None and os.access(path, os.W_OK) else None


def _is_left(group: Path) -> bool:
    """Return whether a group is of this user and its supervisor has died. The kernel may hide processes of other users."""
    made_by = _NAME.fullmatch(group.name)
    if (
        made_by is None
        or int(made_by[1]) != this_host().pid_namespace
        or alive(Process(pid=int(made_by[2]), start_time=int(made_by[3])))
    ):
        return False
    try:
        return group.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False
