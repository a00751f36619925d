"""Room on the disk for a checkpoint: whether there is enough, and removing checkpoints that are no longer needed."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from so_tui.units import disk_size
from so_tui_trainer.failures import TrainingError

PARTIAL = ".partial"
"""Ends the name of a checkpoint that is being written or removed."""
_FREED_BYTES = 1 << 30
"""How much of a file is freed at a time."""


def make_room(folder: Path, needed_bytes: int, field: str) -> None:
    """Remove partial checkpoints of killed processes, and check the free space.

    Args:
        folder: The folder of the run's checkpoints.
        needed_bytes: Size of a checkpoint.
        field: What the user sets to change the folder.

    Raises:
        TrainingError: A checkpoint does not fit beside the existing ones.
    """
    folder.mkdir(exist_ok=True)
    for left in folder.glob(f"*{PARTIAL}"):
        if left.is_dir() and not left.is_symlink():
            _remove_or_say(left)
        else:  # A link: what it points to is none of ours.
            left.unlink()
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise TrainingError(
            "disk-full",
            f"{field} = {folder}: a checkpoint needs {disk_size(needed_bytes)}, but only {disk_size(free_bytes)} are free",
            "Free some space there, of older checkpoints say, then resume. A new run can set `checkpoint.folder` to a larger disk.",
        )


def retire(checkpoint: Path) -> None:
    """Remove a checkpoint that is no longer needed. What cannot be removed now is said in the log; the next checkpoint tries again."""
    half_removed = checkpoint.with_name(checkpoint.name + PARTIAL)
    try:
        checkpoint.rename(half_removed)  # first: half removed, it is no checkpoint
    except OSError as error:
        print(f"{checkpoint} is no longer needed and cannot be removed: {error}", flush=True)
        return
    _remove_or_say(half_removed)


def _remove_or_say(checkpoint: Path) -> None:
    """Remove a folder, or say why not: whoever has a file in it open on a network file system keeps it, and that costs no training."""
    try:
        remove(checkpoint)
    except OSError as error:
        print(f"{checkpoint} is no longer needed and cannot be removed: {error}", flush=True)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint's folder, its large files a piece at a time.

    A file system that frees tens of GB at once keeps everyone waiting who writes to it meanwhile. Links, and files that have another name
    elsewhere, are only unlinked.
    """
    for _, _, names, folder in os.fwalk(checkpoint):
        for name in names:
            _empty(name, folder)
    shutil.rmtree(checkpoint)


def _empty(name: str, folder: int) -> None:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size <= _FREED_BYTES:
        return
    with suppress(PermissionError):  # it can be unlinked all the same
        descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            for size in range(found.st_size - _FREED_BYTES, 0, -_FREED_BYTES):
                os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
