"""What a helper process may take: memory, CPU time for a row or a file, and output. All of it is
decided and watched here. A helper ends with the command that started it, however that ends.

Problem codes: helper-memory-limit, helper-cpu-limit, helper-output-limit: The helper took more than
it may, and was ended.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from so_tui.machine.host import available_bytes
from so_tui.machine.system_files import SystemFiles
from so_tui.settings_file import load_settings
from so_tui.spec.errors import Problem
from so_tui.units import significant

LONGEST_ANSWER = 64 << 20
"""Characters of one line."""
_LARGEST_LOG_BYTES = 64 << 20
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
_SMALL_FILES = frozenset(("describe_model",))
_POLL_S = 0.1
_F_SETSIG = 10
"""``fcntl.F_SETSIG``, which Python does not have on every version."""


class Limits(NamedTuple):
    """What one helper may take."""

    memory_bytes: int
    """Of memory that is its own, not mapped from files. Those that it starts add to it."""
    fixed: bool
    """Whether the user set it, so that nothing adds to it."""
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
        return Limits(int(chosen.memory_gb * 1e9), True, chosen.row_s)
    most = available_bytes(SystemFiles())
    usable = int(_SHARE * most) if most is not None else 1 << 62
    needed = usable if name in _LARGE else _BASE_BYTES + _COPIES * weights_bytes
    return Limits(min(needed, usable), False, chosen.row_s)


class Lifeline:
    """Has the kernel kill a helper's whole group when the process that started it ends, whichever
    of its threads did, and whatever the helper is busy with.

    The helper holds the reading end of a pipe whose writing end only this process has. When that
    closes, the kernel signals the group that was registered for it. A parent-death signal is tied
    to a thread, and would not reach the helper's own processes.
    """

    def __init__(self) -> None:
        self.inherited, self._held = os.pipe()
        """The end that the helper inherits."""

    def tie(self, group: int) -> None:
        """Register the helper's group, and keep only this process's end."""
        fcntl.fcntl(self.inherited, fcntl.F_SETOWN, -group)
        fcntl.fcntl(self.inherited, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self.inherited, fcntl.F_SETFL, os.O_ASYNC)
        os.close(self.inherited)

    def cut(self) -> None:
        """Kill what is left of the group."""
        os.close(self._held)


class Watch:
    """Ends a helper that takes more than it may, and says what it took."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[str],
        limits: Limits,
        log: IO[str],
        note: IO[bytes],
    ) -> None:
        """Begin, in a thread.

        Args:
            name: The helper's module.
            process: The helper, which leads a group.
            limits: What it may take.
            log: What it writes to stderr.
            note: Where it notes what it does.
        """
        self._name, self._process, self._limits = name, process, limits
        self._log, self._note = log, note
        self._over = threading.Event()
        self._reached: Problem | None = None
        with suppress(OSError):  # it has ended already
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            if name in _SMALL_FILES:
                size = _LARGEST_FILE_BYTES, _LARGEST_FILE_BYTES
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, size)
        self._thread = threading.Thread(target=self._look, name=f"limits of {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look no longer."""
        self._over.set()
        self._thread.join()

    def reached(self) -> Problem | None:
        """Return which limit ended the helper, None if none did. Call it when it has ended."""
        if self._reached is None and self._process.returncode == -signal.SIGXCPU:
            took = "took more CPU time than a row or a file may"
            self._reached = self._problem("helper-cpu-limit", "row_s", self._limits.row_s, took)
        return self._reached

    @property
    def doing(self) -> str:
        """What the helper noted last."""
        text = os.pread(self._note.fileno(), 1 << 12, 0).rstrip(b"\0").decode(errors="replace")
        return text or f"so_tui_trainer.tools.{self._name}"

    def too_long(self) -> Problem:
        """End the helper because of what it writes, and return the problem."""
        self._kill()
        return Problem(
            "helper-output-limit",
            self.doing,
            "",
            f"wrote more than {LONGEST_ANSWER >> 20} MiB of text",
            "Correct or remove what it reads; `--verbose` shows what it wrote.",
        )

    def _look(self) -> None:
        while not self._over.wait(_POLL_S) and self._process.poll() is None:
            pids = _tree(self._process.pid)
            allowed = self._limits.memory_bytes
            if not self._limits.fixed:
                allowed += _PROCESS_BYTES * (len(pids) - 1)
            if (taken := sum(map(_own_bytes, pids))) > allowed:
                words = f"took {significant(taken / 1e9)} GB of memory, more than it may"
                value = round(allowed / 1e9, 1)
                self._reached = self._problem("helper-memory-limit", "memory_gb", value, words)
            elif os.fstat(self._log.fileno()).st_size > _LARGEST_LOG_BYTES:
                self._reached = self.too_long()
            if self._reached is not None:
                self._kill()
                return

    def _problem(self, code: str, key: str, value: float, message: str) -> Problem:
        return Problem(
            code,
            f"helpers.{key}",
            f"{value:g}",
            f"{self.doing} {message}",
            f"Correct or remove it, or allow more: `so-tui settings helpers.{key}={2 * value:g}`.",
        )

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _tree(pid: int) -> list[int]:
    """Return a process and those that it and they started. Kernels without the list of children
    give the first alone.
    """
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                known = Path(f"/proc/{each}/task/{task.name}/children").read_text()
                found += map(int, known.split())
    return found


def _own_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs: weights that are mapped and address space
    that CUDA reserves do not count.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0
