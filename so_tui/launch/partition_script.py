"""A script with which an administrator partitions cache and memory bandwidth for one binding of ranks, and undoes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.resctrl import MOUNT, Resctrl
from so_tui.plan.partitions import Partition
from so_tui.trust.printable import printable_line

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
