"""Supervisors as processes of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from so_tui.launch.executors import SupervisorHandle


class LocalExecutor:
    """Starts a supervisor on this host, in a session of its own."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> SupervisorHandle:
        """Start the command detached from this program; see ``Executor.start``."""
        with open(log, "ab", opener=_own_file) as output:
            process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        return _Process(process)


def _own_file(path: str, flags: int) -> int:
    """Open a file that only this user may write, whatever the umask: a supervisor refuses an attempt that others can change."""
    return os.open(path, flags, 0o644)


class _Process:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        return self._process.poll()
