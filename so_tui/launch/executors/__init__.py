"""Where the supervisor of a run is started: on this machine, or through a scheduler's queue.

An executor receives the supervisor's command and starts it. Everything else about a start is the same for all executors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class SupervisorHandle(Protocol):
    """A supervisor that an executor has started or queued."""

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended; None while it runs, is queued, or cannot be observed from here."""


class Executor(Protocol):
    """Starts supervisors."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> SupervisorHandle:
        """Start a command so that it outlives this program, its terminal and its session.

        Args:
            argv: The supervisor's command.
            env: Its whole environment.
            log: The file that receives its output, appended.

        Raises:
            OSError: It cannot be started.
        """
