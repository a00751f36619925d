"""Supervisors as processes of this machine."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from so_tui.launch.executor_types import JobStatus, SupervisorHandle
from so_tui.launch.starter import TOKEN_VARIABLE
from so_tui.runs.directory import RunDirectory
from so_tui.spec import Problem
from so_tui.trust.printable import quoted

if TYPE_CHECKING:
    from so_tui.launch.preparation import Launch

_LOG = logging.getLogger(__name__)


class LocalExecutor:
    """Starts a supervisor on this host, in a session of its own."""

    here = True

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """``environment`` has what supervisors get beside, or in place of, this program's."""
        self._environment = environment

    def start(self, run: RunDirectory, attempt: int, token: str) -> SupervisorHandle:
        """Start the supervisor detached from this program; see ``Executor.start``."""
        return _started(run, attempt, {**os.environ, **self._environment, TOKEN_VARIABLE: token})

    def attach(self, run: RunDirectory, attempt: int) -> None:
        """Start a supervisor for an attempt whose own has died. It starts nothing of the run. Raises OSError."""
        _started(run, attempt, {**os.environ, **self._environment})

    def unavailable(self, launch: Launch) -> tuple[Problem, ...]:
        return ()

    def preview(self, launch: Launch) -> str:
        return ""

    def status(self, run: RunDirectory, attempt: int) -> JobStatus | None:
        return None

    def cancel(self, run: RunDirectory, attempt: int) -> bool:
        return False


def supervisor_log(run: RunDirectory, attempt: int) -> Path:
    """Return the file that receives the output of an attempt's supervisor on this host."""
    return run.attempt_dir(attempt) / f"supervisor.{socket.gethostname()}.log"


def _started(run: RunDirectory, attempt: int, env: Mapping[str, str]) -> SupervisorHandle:
    argv = (
        sys.executable,
        "-P",
        "-m",
        "so_tui",
        "supervise",
        str(run.path),
        "--attempt",
        str(attempt),
    )
    _LOG.info("calling %s", quoted(*argv))
    descriptor = os.open(
        supervisor_log(run, attempt), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(descriptor, "ab") as output:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    return _Process(process)


class _Process:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        return self._process.poll()
