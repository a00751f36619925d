"""Check who owns a file or folder and who can write it. What another user owns or can change is data, never instructions.

Links are not followed: a link in a folder that others can write could lead anywhere.
"""

from __future__ import annotations

import errno
import os
import stat
from enum import StrEnum
from pathlib import Path

from so_tui.trust.reading import despite_replacement

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""With an access control list the group bits are its mask, so a right that a list gives shows here too."""


class Distrust(StrEnum):
    """Why a file or folder does not count as this user's own."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    OTHER_OWNER = "other-owner"
    OTHERS_CAN_WRITE = "others-can-write"
    WRONG_KIND = "wrong-kind"
    """A link, a device or a pipe; a file where a folder is expected, or the reverse."""


class NotOwnError(OSError):
    """A file or folder that must belong to this user alone does not."""

    def __init__(self, path: Path, distrust: Distrust) -> None:
        self.path = path
        self.distrust = distrust
        super().__init__(f"{path} does not belong to you alone ({distrust})")


def distrust_of_file(path: Path) -> Distrust | None:
    """Return why a regular file is not this user's own; None if it is."""
    return _distrust(path, stat.S_IFREG)


def distrust_of_folder(path: Path) -> Distrust | None:
    """Return why a folder is not this user's own; None if it is. Others may be able to read it."""
    return _distrust(path, stat.S_IFDIR)


def read_own(path: Path) -> bytes:
    """Return the content of a regular file of this user that others cannot write. Links are not followed.

    The open file is checked, so nobody can replace it between the check and the reading.

    Raises:
        NotOwnError: It is not this user's own, or no regular file.
        OSError: It cannot be read.
    """
    return despite_replacement(lambda: _read_own(path))


def _read_own(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwnError(path, Distrust.WRONG_KIND) from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        distrust = _distrust_of(os.fstat(descriptor), stat.S_IFREG)
        if distrust is not None:
            raise NotOwnError(path, distrust)
        return file.read()


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can open, or check that an existing one belongs to this user, and return it.

    Others lose their rights to read an existing folder of this user. Missing parents are made private, too.

    Raises:
        NotOwnError: Something else has the name: a link, another user's folder, or one that others can write.
        OSError: It cannot be made.
    """
    if not path.parent.exists():
        private_folder(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if (distrust := distrust_of_folder(path)) is not None:
            raise NotOwnError(path, distrust) from None
        if stat.S_IMODE(path.lstat().st_mode) & 0o077:
            path.chmod(0o700)
    return path


def _distrust(path: Path, kind: int) -> Distrust | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return Distrust.MISSING
    except OSError:
        return Distrust.UNREADABLE
    return _distrust_of(found, kind)


def _distrust_of(found: os.stat_result, kind: int) -> Distrust | None:
    if stat.S_IFMT(found.st_mode) != kind:
        return Distrust.WRONG_KIND
    if found.st_uid != os.geteuid():
        return Distrust.OTHER_OWNER
    if found.st_mode & _OTHERS_WRITE:
        return Distrust.OTHERS_CAN_WRITE
    return None
