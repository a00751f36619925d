"""Files that hold up whoever opens or reads them without care."""

from __future__ import annotations

import os
from pathlib import Path


def make_pipe(path: Path) -> None:
    """Make a pipe that nobody writes to: opening it waits for ever."""
    os.mkfifo(path)


def link_device(path: Path) -> None:
    """Make a link to a device that never ends."""
    path.symlink_to("/dev/zero")


def make_sparse(path: Path) -> None:
    """Make a file of 8 GiB without a line."""
    with path.open("wb") as file:
        file.truncate(8 << 30)
