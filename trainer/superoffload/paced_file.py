"""A large file that reaches the disk while it is written, a piece at a time, and leaves no pages behind.

Linux lets a tenth of the host's memory fill with data that is still to be written. Whoever then writes a line to the same disk, such as a
rank that records its step, waits behind tens of GB, and memory that training needs has to be freed first. So each piece is sent to the
disk at once, and the next but one is written when it is there: never more than two are on their way.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from pathlib import Path

PIECE_BYTES = 32 << 20
"""Large enough for a disk's full rate: it has two of them to work on."""
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range(2)."""
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)


class PacedFile:
    """A new file, written by one thread at a time, at any offsets.

    Args:
        path: Where it is; it is emptied if it exists.
        piece_bytes: Bytes that are sent to the disk at a time.

    Raises:
        OSError: By all methods, if the disk does not take it.
    """

    def __init__(self, path: Path, piece_bytes: int = PIECE_BYTES) -> None:
        self._file = path.open("wb", buffering=0)
        self._piece_bytes = piece_bytes
        self._on_their_way: deque[tuple[int, int]] = deque()
        """Offset and length of the pieces that were sent to the disk and may not be there yet."""

    def write(self, content: memoryview, offset: int) -> None:
        """Write bytes at an offset. Waits for the disk, but for the last two pieces."""
        for start in range(0, len(content), self._piece_bytes):
            piece = content[start : start + self._piece_bytes]
            self._write_piece(piece, offset + start)

    def finish(self) -> None:
        """Wait until all is on the disk, drop the file's pages from memory, and close it."""
        os.fsync(self._file.fileno())
        os.posix_fadvise(
            self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
        )  # so that what is read back is what the disk has
        self.close()

    def close(self) -> None:
        """Close the file, whatever is in it. Safe to call twice."""
        self._file.close()

    def _write_piece(self, piece: memoryview, offset: int) -> None:
        written, length = 0, len(piece)
        while written < length:
            written += os.pwrite(self._file.fileno(), piece[written:], offset + written)
        if not self._sync(offset, length, _WRITE):
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        self._on_their_way.append((offset, length))
        while len(self._on_their_way) > 2:
            begin, size = self._on_their_way.popleft()
            self._sync(begin, size, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)

    def _sync(self, offset: int, length: int, flags: int) -> bool:
        """Call sync_file_range(2), which Python does not have; return whether this file system can do it."""
        if _sync_file_range(self._file.fileno(), offset, length, flags) == 0:
            return True
        if (code := ctypes.get_errno()) in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code), str(self._file.name))


_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_sync_file_range.restype = ctypes.c_int
