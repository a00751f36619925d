"""Writes of what the user changes on the screen: in threads, since a file system may be slow, and in the order of the changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Value = TypeVar("Value")


class OrderedWrites(Generic[Value]):
    """Values that are written in the order in which they were added. The threads of several writes begin, and go on, in any order."""

    def __init__(self, write: Callable[[Value], object]) -> None:
        self._write = write
        self._added: SimpleQueue[Value] = SimpleQueue()
        self._writing = threading.Lock()

    def add(self, value: Value) -> None:
        """Add a value. Somebody has to call ``write_added`` afterwards, in a thread."""
        self._added.put(value)

    def write_added(self) -> None:
        """Write what was added, unless another thread has done so. Raises what writing raises; later values are left to their own calls."""
        with self._writing:
            while True:
                try:
                    value = self._added.get_nowait()
                except Empty:
                    return
                self._write(value)
