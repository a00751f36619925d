"""Where a run's supervisor is started.

Today that is this machine; a scheduler is another Place, which hands the same command to its queue.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Started(Protocol):
    """A supervisor that was asked for."""

    def ended(self) -> int | None:
        """Its exit code once it has ended; None while it runs, waits in a queue, or cannot be seen from here."""


class Place(Protocol):
    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Started:
        """Start the command so that it outlives this program, its terminal and its session. Raises OSError when it cannot be started."""


class ThisMachine:
    """A process of its own session on this host."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Started:
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        return _Detached(process)


class _Detached:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ended(self) -> int | None:
        return self._process.poll()
