"""Waiting until something has happened, however long a busy machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 60.0
"""After so long something will not happen any more."""
_LOOK_EVERY_S = 0.01


def wait_until(happened: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Return once ``happened`` returns something true; fail after the limit."""
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
        time.sleep(_LOOK_EVERY_S)


def wait_for_environment(pid: int) -> None:
    """Return once /proc shows the environment of a new process, which is being loaded."""
    wait_until(lambda: Path(f"/proc/{pid}/environ").read_bytes())


def running(pid: int) -> bool:
    """Return whether a process runs: no zombie, and none that is being ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
