"""Check who owns a file or folder and who can write it. What another user owns or can change is
data, never instructions.

Links are not followed: a link in a folder that others can write could lead anywhere.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TypeVar

# Read files that anybody may have written: regular files only, and only as much as the caller
# expects.
#
# A pipe would block, a device never end, and a file of gigabytes fill the memory.


T = TypeVar("T")
_TRIES = 5
"""How often a file is opened that other hosts replace meanwhile. They do so about once a second."""
_BLOCK_BYTES = 1 << 13


class UnfitFileError(OSError):
    """A file that is not read, because of its kind or its size."""

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        """Report a file that is larger than a limit, or without one: no regular file."""
        self.path = path
        self.code, self.reason = (
            ("not-a-file", "is not a regular file")
            if limit_bytes is None
            else ("too-large", f"is larger than {limit_bytes:,} bytes")
        )
        super().__init__(f"{path} {self.reason}")


def open_descriptor(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Links are followed.

    Raises:
        UnfitFileError: It is a folder, a pipe, a socket, a device, or a link that leads nowhere but
            to links.
        OSError: It cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer. For a regular file it means
    # nothing.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a socket, with the latter
            raise UnfitFileError(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnfitFileError(path)
    return descriptor


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``limit_bytes``. Links are followed.

    Raises:
        UnfitFileError: It is not a regular file, or larger.
        OSError: It cannot be read.
    """
    return read_judged(path, limit_bytes)[0]


def read_judged(path: Path, limit_bytes: int) -> tuple[bytes, Distrust | None]:
    """Return what ``read_bounded`` does, and why the file that was read is not this user's own;
    None if it is, or root's, as what a site installs.
    """

    def read() -> tuple[bytes, Distrust | None]:
        descriptor = open_descriptor(path)
        try:
            # Asked for the limit, Python would allocate that much for each small file.
            block_bytes = max(_BLOCK_BYTES, os.fstat(descriptor).st_size + 1)
            parts: list[bytes] = []
            left = limit_bytes + 1
            while left > 0 and (part := os.read(descriptor, min(left, block_bytes))):
                parts.append(part)
                left -= len(part)
            found = os.fstat(descriptor)
            by_root = found.st_uid == 0 and not others_can_write(found, descriptor)
            return b"".join(parts), None if by_root else distrust_of(descriptor, stat.S_IFREG)
        finally:
            os.close(descriptor)

    content, distrust = _despite_replacement(read)
    if len(content) > limit_bytes:
        raise UnfitFileError(path, limit_bytes)
    return content, distrust


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none if nothing that can be listed has that path.

    Raises:
        OSError: A folder may be there, and cannot be read.
    """
    try:
        # Polled once a second: a Path for each name is too slow.
        return os.listdir(folder)  # noqa: PTH208
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        raise


def _despite_replacement(read: Callable[[], T]) -> T:
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
    with os.fdopen(open_own(path), "rb") as file:
        return file.read()


def open_own(path: Path) -> int:
    """Open a regular file of this user that others cannot write, for reading. Links are not
    followed.

    Raises:
        NotOwnError: It is not this user's own, or no regular file.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwnError(path, Distrust.WRONG_KIND) from error
        raise
    if (distrust := distrust_of(descriptor, stat.S_IFREG)) is not None:
        os.close(descriptor)
        raise NotOwnError(path, distrust)
    return descriptor


def distrust_of(descriptor: int, kind: int) -> Distrust | None:
    """Return why an open file or folder is not this user's own; None if it is.

    Args:
        descriptor: What was opened; ``O_PATH`` is enough.
        kind: ``stat.S_IFREG`` or ``stat.S_IFDIR``.
    """
    return _distrust_of(os.fstat(descriptor), kind, descriptor)


def others_can_write(found: os.stat_result, file: Path | int) -> bool:
    """Return whether another user than this one and root may write a file or folder.

    A group that is this user's alone counts as the user: with a umask of 002, as many systems have
    it, everything is writable for it. A group counts as that if it has the user's name and no other
    member; whose primary group one of another name is, a directory service may not tell.

    Args:
        found: Its state.
        file: Its path or descriptor.
    """
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    # With an access control list the group bits are its mask, and other users may be in it.
    return not _has_no_other_member(found.st_gid) or _has_access_list(file)


@cache
def _has_no_other_member(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _has_access_list(file: Path | int) -> bool:
    # A descriptor that was opened with O_PATH has no attributes of its own.
    path = f"/proc/self/fd/{file}" if isinstance(file, int) else file
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)
    return True


def _distrust(path: Path, kind: int) -> Distrust | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return Distrust.MISSING
    except OSError:
        return Distrust.UNREADABLE
    return _distrust_of(found, kind, path)


def _distrust_of(found: os.stat_result, kind: int, file: Path | int) -> Distrust | None:
    if stat.S_IFMT(found.st_mode) != kind:
        return Distrust.WRONG_KIND
    if found.st_uid != os.geteuid():
        return Distrust.OTHER_OWNER
    if others_can_write(found, file):
        return Distrust.OTHERS_CAN_WRITE
    return None
