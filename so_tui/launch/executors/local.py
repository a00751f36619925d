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
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as output:
            process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        return _Process(process)


class _Process:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        return self._process.poll()
