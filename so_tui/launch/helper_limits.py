"""What a helper process may take: memory, CPU time for a row or a file, and output. All of it is
decided here, and watched by who started it. A helper ends with the command that started it, however
that ends.

Problem codes: helper-memory-limit, helper-cpu-limit, helper-output-limit: The helper took more than
it may, and was ended.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from so_tui.machine.host import available_bytes
from so_tui.machine.system_files import SystemFiles
from so_tui.settings_file import load_settings

LONGEST_ANSWER = 64 << 20
"""Characters of one line."""
LARGEST_LOG_BYTES = 64 << 20
"""Of what a helper writes to stderr."""
_LARGEST_FILE_BYTES = 1 << 30
"""Of a file that a helper writes which has nothing large to write."""
_BASE_BYTES = 3 << 30
"""Memory of a helper that loads no weights. The imported packages take half a gigabyte."""
_PROCESS_BYTES = 1 << 29
"""Memory in addition for each process that a helper starts."""
_COPIES = 3
"""How often weights may be in memory while they are loaded."""
_SHARE = 0.9
"""Largest share of the machine's free memory."""
_LARGE = frozenset(("build_ops", "calibrate", "convert", "export", "fetch", "prepare"))
"""Helpers that move weights, measure the machine or compile, and may take what is free."""
_OWN_KIB = re.compile(r"^RssAnon:\s*(\d+)", re.MULTILINE)
_F_SETSIG = 10
"""``fcntl.F_SETSIG``, which Python does not have on every version."""


class Limits(NamedTuple):
    """What one helper may take."""

    memory_bytes: int
    """Of memory that is its own, not mapped from files."""
    process_bytes: int
    """Memory in addition for each process that the helper starts; none if the user set a limit."""
    row_s: float
    """CPU time for a row or a file."""


def limits_of(name: str, weights_bytes: int = 0) -> Limits:
    """Return what a helper may take: what the user set, or what follows from its work.

    Args:
        name: Its module.
        weights_bytes: Size of the weights that it loads.
    """
    chosen = load_settings().settings.helpers
    if chosen.memory_gb is not None:
        return Limits(int(chosen.memory_gb * 1e9), 0, chosen.row_s)
    most = available_bytes(SystemFiles())
    usable = int(_SHARE * most) if most is not None else 1 << 62
    needed = usable if name in _LARGE else _BASE_BYTES + _COPIES * weights_bytes
    return Limits(min(needed, usable), _PROCESS_BYTES, chosen.row_s)


def restrict(name: str, pid: int, inherited: int) -> None:
    """Limit the files that a helper writes, and have the kernel kill its whole group when this
    process ends, whichever of its threads started it, and whatever the helper is busy with.

    The helper holds the reading end of a pipe whose writing end only this process has. When that
    closes, the kernel signals the group that was registered for it. A parent-death signal is tied
    to a thread, and would not reach the helper's own processes.

    Args:
        name: The helper's module.
        pid: The helper, which leads a group.
        inherited: The end that it inherits, which this process no longer needs.
    """
    with suppress(OSError):  # it has ended already
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        if name == "describe_model":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LARGEST_FILE_BYTES,) * 2)
    fcntl.fcntl(inherited, fcntl.F_SETOWN, -pid)
    fcntl.fcntl(inherited, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(inherited, fcntl.F_SETFL, os.O_ASYNC)
    os.close(inherited)


def taken_bytes(pid: int, limits: Limits) -> tuple[int, int]:
    """Return the memory that a helper and what it started take, and what they may take.

    Memory that a file backs does not count: weights that are mapped, and address space that CUDA
    reserves. Kernels without the list of children give the helper alone.
    """
    pids, taken = [pid], 0
    for each in pids:
        process = Path(f"/proc/{each}")
        with suppress(OSError):
            for task in (process / "task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        with suppress(OSError):
            own = _OWN_KIB.search((process / "status").read_text())
            taken += int(own[1]) << 10 if own else 0
    return taken, limits.memory_bytes + limits.process_bytes * (len(pids) - 1)
