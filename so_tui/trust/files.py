"""Check who owns a file or folder and who can write it. What another user owns or can change is
data, never instructions.

Links are not followed: a link in a folder that others can write could lead anywhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Literal

# Read files that anybody may have written: regular files only, and only as much as the caller
# expects.
#
# A pipe would block, a device never end, and a file of gigabytes fill the memory.


_TRIES = 5
"""How often a file is opened that other hosts replace meanwhile. They do so about once a second."""
_BLOCK_BYTES = 1 << 13


class UnfitFileError(OSError):
    """A file that is not read, because of its kind or its size."""

    def __init__(
        self, path: Path, code: Literal["not-a-file", "too-large"], limit_bytes: int
    ) -> None:
        self.path = path
        self.code = code
        self.limit_bytes = limit_bytes
        words = (
            "is not a regular file"
            if code == "not-a-file"
            else f"has more than {limit_bytes} bytes"
        )
        super().__init__(f"{path} {words}")


def open_descriptor(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Links are followed.

    Raises:
        UnfitFileError: It is a folder, a pipe, a socket or a device.
        OSError: It cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer. For a regular file it means
    # nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnfitFileError(path, "not-a-file", 0)
    return descriptor


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``limit_bytes``. Links are followed.

    Raises:
        UnfitFileError: It is not a regular file, or larger.
        OSError: It cannot be read.
    """

    def read() -> bytes:
        descriptor = open_descriptor(path)
        try:
            # Asked for the limit, Python would allocate that much for each small file.
            block_bytes = max(_BLOCK_BYTES, os.fstat(descriptor).st_size + 1)
            parts: list[bytes] = []
            left = limit_bytes + 1
            while left > 0 and (part := os.read(descriptor, min(left, block_bytes))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    content = _despite_replacement(read)
    if len(content) > limit_bytes:
        raise UnfitFileError(path, "too-large", limit_bytes)
    return content


def _despite_replacement(read: Callable[[], bytes]) -> bytes:
    """Return what a function reads that opens a file, called again if another host replaced the
    file in between.

    On a network file system the open file is gone then, and reading it fails with ESTALE. Raises
    OSError.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read()


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""With an access control list the group bits are its mask, so a right that a list gives shows here
too.
"""


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
    """Return the content of a regular file of this user that others cannot write. Links are not
    followed.

    The open file is checked, so nobody can replace it between the check and the reading.

    Raises:
        NotOwnError: It is not this user's own, or no regular file.
        OSError: It cannot be read.
    """
    return _despite_replacement(lambda: _read_own(path))


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
    """Make a folder that only this user can open, or check that an existing one belongs to this
    user, and return it.

    Others lose their rights to read an existing folder of this user. Missing parents are made
    private, too.

    Raises:
        NotOwnError: Something else has the name: a link, another user's folder, or one that others
            can write.
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


# Who may read what a run writes: its owner alone, or the owner's group with
# ``SO_TUI_SHARE=group``. Only the owner may write.
#
# The mode of the run folder records the choice for later attempts and other processes.


VARIABLE = "SO_TUI_SHARE"
GROUP = "group"
_SHARED_FOLDER = 0o750


def is_shared(folder: Path) -> bool:
    """Return whether a run folder is shared with its owner's group.

    Raises:
        OSError: There is no such folder.
    """
    return stat.S_IMODE(folder.stat().st_mode) == _SHARED_FOLDER


def make_run_folder(folder: Path, *, shared: bool) -> None:
    """Create a run folder with the modes that were chosen, whatever the umask is.

    Raises:
        FileExistsError: Another process was first.
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700)
    if shared:
        folder.chmod(_SHARED_FOLDER)


def umask_of(folder: Path) -> int:
    """Return the umask of the processes that write into a run folder.

    Raises:
        OSError: There is no such folder.
    """
    return 0o027 if is_shared(folder) else 0o077
