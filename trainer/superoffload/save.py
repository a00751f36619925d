"""A save that goes on while training does: the sub-groups that were copied are written in a thread of the caller's."""

from __future__ import annotations

from collections.abc import Callable

from superoffload.checkpoint import StatesFile
from superoffload.states_copy import StatesCopy


class Save:
    """What is still to be written of this rank's state.

    Args:
        file: The file, into which every sub-group that is not copied is written beforehand.
        attach: Prepares a thread for reading copies.

    Attributes:
        copies: The copies that are not written yet, by sub-group, in the order in which they are written.
    """

    def __init__(self, file: StatesFile, *, attach: Callable[[], None]) -> None:
        self._file, self._attach = file, attach
        self.copies: dict[int, StatesCopy] = {}

    def finish(self) -> int:
        """Write the rest, sync it to disk and return the size of this rank's state. No collective runs, and no rank waits for another.

        Raises:
            OffloadError: If the Adam worker ended before it had copied everything.
            OSError: If the disk does not take it.
        """
        try:
            if self.copies:
                self._attach()
            for index in tuple(self.copies):
                self._file.write(index, self.copies[index].tensors())
                self.copies.pop(index).release()
            return self._file.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Give up what is not written. Safe to call twice."""
        self._file.close()
        while self.copies:
            self.copies.popitem()[1].release()
