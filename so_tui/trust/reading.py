"""Read files that anybody may have written: regular files only, and only as much as the caller expects.

A pipe would block, a device never end, and a file of gigabytes fill the memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from enum import StrEnum
from io import FileIO
from pathlib import Path

_TRIES = 5
"""How often a file is opened that other hosts replace meanwhile. They do so about once a second."""
_BLOCK_BYTES = 1 << 13


class Unfit(StrEnum):
    """Why the content of a file is not read."""

    NOT_A_FILE = "not-a-file"
    """A folder, a pipe, a socket or a device."""
    TOO_LARGE = "too-large"


class UnfitFileError(OSError):
    """A file that is not read, because of its kind or its size."""

    def __init__(self, path: Path, unfit: Unfit, limit_bytes: int) -> None:
        self.path = path
        self.unfit = unfit
        self.limit_bytes = limit_bytes
        words = (
            "is not a regular file"
            if unfit is Unfit.NOT_A_FILE
            else f"has more than {limit_bytes} bytes"
        )
        super().__init__(f"{path} {words}")


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, without a buffer. Links are followed.

    Raises:
        UnfitFileError: It is a folder, a pipe, a socket or a device.
        OSError: It cannot be opened.
    """
    return FileIO(open_descriptor(path), "rb")


def open_descriptor(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; otherwise as ``open_regular``."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer. For a regular file it means nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnfitFileError(path, Unfit.NOT_A_FILE, 0)
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

    content = despite_replacement(read)
    if len(content) > limit_bytes:
        raise UnfitFileError(path, Unfit.TOO_LARGE, limit_bytes)
    return content


def despite_replacement(read: Callable[[], bytes]) -> bytes:
    """Return what a function reads that opens a file, called again if another host replaced the file in between.

    On a network file system the open file is gone then, and reading it fails with ESTALE. Raises OSError.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read()
