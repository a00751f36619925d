"""How much host memory a rank has, measured beside training.

For a hundred gigabytes the kernel takes more than a second, in which training would stand still.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from so_tui.machine.memory import pss_bytes

_INTERVAL_S = 20.0
_SETTLES_S = 120.0
"""While memory is touched for the first time, it is read at each interval, whatever that costs."""
_COST_SHARE = 0.01
"""Most of the time that reads may take after that."""


def rank_memory_bytes() -> int:
    """Return the proportional set size of this process and its descendants (Adam workers): pages that they share count once."""
    return sum(pss_bytes(pid) or 0 for pid in _process_tree(os.getpid()))


class HostMemory:
    """The newest measurement. The first is made at once, each later one by a thread."""

    def __init__(
        self,
        read: Callable[[], int] = rank_memory_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._reading: threading.Thread | None = None
        self._bytes = 0
        self._begun: float | None = None
        self._due = 0.0

    def latest_bytes(self) -> int:
        """Return the newest measurement, and begin another one if it is due."""
        now = self._clock()
        if self._begun is None:
            self._begun = now
            self._measure()
        elif now >= self._due and (self._reading is None or not self._reading.is_alive()):
            # It ends with the process: nothing depends on it.
            self._reading = threading.Thread(target=self._measure, name="host memory", daemon=True)
            self._reading.start()
        return self._bytes

    def _measure(self) -> None:
        assert self._begun is not None
        before = self._clock()
        self._bytes = self._read()
        after = self._clock()
        settled = after - self._begun >= _SETTLES_S
        self._due = after + (
            max(_INTERVAL_S, (after - before) / _COST_SHARE) if settled else _INTERVAL_S
        )


def _process_tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for child in _children(pid):
        yield from _process_tree(child)


def _children(pid: int) -> set[int]:
    """Return the children of all threads of a process."""
    found: set[int] = set()
    with suppress(OSError):  # The process has ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # The thread has ended. Another one has its children now.
                found.update(map(int, (task / "children").read_text().split()))
    return found
