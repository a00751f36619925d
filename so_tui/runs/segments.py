"""Numbered files of lines, written by one process. A file does not change once a higher number
exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from so_tui.trust.files import UnfitFileError, names_in, open_descriptor

MEBIBYTE = 1 << 20
SUFFIX = ".jsonl"
LONGEST_LINE_BYTES = 8 * MEBIBYTE
"""Limit of a record. The binding of a thousand ranks takes less than one."""
_LARGEST_BYTES = 32 * MEBIBYTE
"""What is beyond it in a segment is not read. Writers begin another one after four."""
MOST_SEGMENTS = 4096
"""Older ones are not read. A run of a million steps has some hundred."""


Lines = tuple[list[bytes], int]
"""Complete lines without newlines, and the offset after them."""


def segments(folder: Path, stem: str = "") -> dict[int, Path]:
    """Return the newest segments ``<stem>000001.jsonl`` of a folder by number, ascending; empty if
    the folder is missing.
    """
    found = {}
    for name in names_in(folder):
        number = name[len(stem) : -len(SUFFIX)]
        if (
            name.startswith(stem)
            and name.endswith(SUFFIX)
            and number.isdecimal()
            and number.isascii()
            and len(number) <= 12
        ):
            found[int(number)] = name
    return {number: folder / name for number, name in sorted(found.items())[-MOST_SEGMENTS:]}


def size_of(path: Path) -> int:
    """Return how many bytes of a segment are read at most; 0 if it is gone."""
    try:
        # Once for each segment: a method of Path costs twice as much.
        return min(os.stat(path).st_size, _LARGEST_BYTES)  # noqa: PTH116
    except OSError:
        return 0


def read_lines(path: Path, offset: int, limit_bytes: int) -> Lines:
    """Return the complete lines from ``offset`` on, without newlines, and the offset after them.

    Reads about ``limit_bytes``, more if a single line is longer. An incomplete last line is left
    for the next call. A file that does not exist, or is no regular file, reads as empty, and so
    does the rest of a file after a line that is longer than any record.
    """
    try:
        descriptor = open_descriptor(path)
    except (FileNotFoundError, UnfitFileError):
        return [], offset
    try:
        unread_bytes = min(os.fstat(descriptor).st_size, _LARGEST_BYTES) - offset
        if unread_bytes <= 0:
            return [], offset
        block = os.pread(descriptor, min(limit_bytes, unread_bytes), offset)
        if b"\n" not in block:
            parts, at = [block], offset + len(block)
            while (
                b"\n" not in parts[-1]
                and at - offset < LONGEST_LINE_BYTES
                and (more := os.pread(descriptor, MEBIBYTE, at))
            ):
                parts.append(more)
                at += len(more)
            block = b"".join(parts)
    finally:
        os.close(descriptor)
    end = block.rfind(b"\n") + 1
    return block[:end].split(b"\n")[:-1], offset + end


def read_span(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the complete lines between two offsets, without newlines; otherwise as
    ``read_lines``.
    """
    while start < end:
        lines, reached = read_lines(path, start, min(MEBIBYTE, end - start))
        if reached == start:
            return
        yield from lines
        start = reached


def cut_incomplete_line(path: Path) -> None:
    """Cut off what a killed writer or a full disk left of a segment's last line. Only for a segment
    that nobody writes.

    Raises:
        OSError: It cannot be read or written.
    """
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


class SegmentWriter:
    """Appends lines to the newest segment and starts another one when it is full.

    Each line is one write, so lines never mix, and a crash can only leave the last line incomplete.
    A writer never changes segments of other writers: after a restart it continues with the next
    number. For one thread.
    """

    def __init__(
        self,
        folder: Path,
        stem: str = "",
        *,
        limit_bytes: int,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the folder, but not its parent, so that a deleted run stays deleted. Raises
        OSError.
        """
        self._folder = folder
        self._stem = stem
        self._limit_bytes = limit_bytes
        self._on_closed = on_closed
        self._path: Path | None = None
        self._fd = -1
        self._size = 0
        self._incomplete = False
        folder.mkdir(exist_ok=True)

    def append(self, line: bytes) -> None:
        """Write a line that ends in a newline. After an OSError (disk full), the next line starts
        on a new line.
        """
        if self._path is not None and self._size + len(line) > self._limit_bytes:
            self.close()
        if self._path is None:
            self._open_next()
        data = b"\n" + line if self._incomplete else line
        self._incomplete = True
        while data:
            written = os.write(self._fd, data)  # short only when the disk fills up
            self._size += written
            data = data[written:]
        self._incomplete = False

    def close(self) -> None:
        """Close the current segment; no more lines are appended to it, even if an OSError says that
        some of it is lost.
        """
        if self._path is None:
            return
        self._path, self._size, self._incomplete = None, 0, False
        os.close(self._fd)  # once: after an error, too, its number is free for another file
        self._on_closed()

    def _open_next(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        for number in count(max(segments(self._folder, self._stem), default=0) + 1):
            with suppress(FileExistsError):  # another writer was first
                path = self._folder / f"{self._stem}{number:06d}{SUFFIX}"
                self._fd = os.open(path, flags, 0o640)
                self._path = path
                return
