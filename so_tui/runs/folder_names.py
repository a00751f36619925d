"""Names in a folder that is polled: listed again only where they may have changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_SETTLED_S = 3.0
"""For so long after a change a folder is listed at each poll: where its time is in whole seconds, more may change within the same one."""
_LISTED_S = 5.0
"""A folder is listed this often in any case: not every file system dates its folders."""


class FolderNames:
    """Lists one folder, at most as often as it is polled. For one thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._names: tuple[str, ...] = ()
        self._state: tuple[int, int] | None = None
        """What the folder was when it was listed last."""
        self._changed = self._listed = 0.0

    def poll(self) -> tuple[str, ...]:
        """Return the names in the folder, sorted: the same tuple until they change. Raises OSError, but not where it is missing."""
        now = self._clock()
        try:
            status = os.stat(self._folder)  # noqa: PTH116 - polled once a second
            state = status.st_ino, status.st_mtime_ns
            if state != self._state:
                self._changed = now
            elif now - self._changed > _SETTLED_S and now - self._listed < _LISTED_S:
                return self._names
            names = tuple(sorted(os.listdir(self._folder)))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            state, names = None, ()
        self._state, self._listed = state, now
        if names != self._names:
            self._names = names
        return self._names
