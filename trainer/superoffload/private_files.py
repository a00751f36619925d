"""Folders and files that only this user can have written, because whoever writes compiled code decides what this user runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> bool:
    """Make a folder that only this user can open, or check that an existing one is this user's own and take others' rights from it.

    Returns:
        Whether the folder can be used. A link, another user's folder and one that others can write cannot.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        own = (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.geteuid()
            and not found.st_mode & _OTHERS_WRITE
        )
        if own and stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError:
        return False
    return own and os.access(folder, os.W_OK)


def open_own(path: Path) -> int | None:
    """Open a file for reading if it is this user's own: a regular file, no link, and nobody else can write it.

    The open file is checked, so nobody can replace it between the check and its use through the descriptor.

    Returns:
        The descriptor, or None for any other file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & _OTHERS_WRITE
    ):
        return descriptor
    os.close(descriptor)
    return None


def is_own(path: Path) -> bool:
    """Return whether ``open_own`` would open a file."""
    descriptor = open_own(path)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True
