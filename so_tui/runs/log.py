"""The trainer's log: raw bytes as the processes wrote them, kept bounded by the supervisor, made readable by the reader.

The log's descriptor belongs to the trainer's processes (opened for appending, inherited), so the file cannot be exchanged under them:
it is trimmed in place. Its first HEAD_BYTES stay; behind them stands a mark of fixed size that counts the bytes that were dropped; then
come the newest bytes. By the mark a reader finds the place again where it was.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from so_tui.runs.directory import RunDirectory
from so_tui.runs.segments import MEBIBYTE

HEAD_BYTES = MEBIBYTE
TAIL_BYTES = 16 * MEBIBYTE

_MARK = b"\n[so-tui: %015d bytes of the log were dropped here to bound its size]\n"
_MARK_BYTES = len(_MARK % 0)
_MARKED = re.compile(rb"\n\[so-tui: (\d{15}) bytes of the log were dropped here to bound its size\]\n")
_LONGEST_LINE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 17

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC and other strings: titles, links
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"  # other control characters but tab
)
_SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASS(?:WORD|WD|PHRASE)?(?:_|$)|CREDENTIAL|AUTH(?:_|$)|COOKIE", re.IGNORECASE)


def trim_log(path: Path, *, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> int:
    """Cuts the middle out of a log that has grown past ``head + 2 x tail``; returns the bytes dropped (0: nothing to do).

    For the supervisor alone. Those who write need O_APPEND. Lines written in the instant between the last copy and the cut are lost
    (microseconds, once in some 16 MiB); nothing else is. A missing log is left alone. Raises OSError.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # not O_APPEND: Linux would then append whatever the offset says
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(fd).st_size
        if size <= head_bytes + 2 * tail_bytes:
            return 0
        dropped = _dropped(fd, head_bytes)
        body = head_bytes + (_MARK_BYTES if dropped else 0)
        start = size - tail_bytes
        start += os.pread(fd, _LONGEST_LINE_BYTES, start).find(b"\n") + 1
        source, target = start, head_bytes + _MARK_BYTES
        while block := os.pread(fd, _BLOCK_BYTES, source):  # until the end, also of what is written meanwhile
            source += len(block)
            target += os.pwrite(fd, block, target)
        os.ftruncate(fd, target)
        os.pwrite(fd, _MARK % (dropped + start - body), head_bytes)
        return start - body
    finally:
        os.close(fd)


class LogReader:
    """Follows a log by position: complete lines, without escape sequences, and of a line rewritten by ``\\r`` (progress bars) the last
    state. Tolerates a log that is not there yet, that ends in mid-line, that is trimmed or replaced. For one thread.
    """

    def __init__(self, path: Path, *, head_bytes: int = HEAD_BYTES) -> None:
        self._path = path
        self._head_bytes = head_bytes
        self._position = 0  # in the log as it would be without any trim
        self._rest = b""
        self._was_shrunk = False

    @property
    def partial(self) -> str:
        """The current state of the unfinished last line: a progress bar that is still running."""
        return readable(self._rest)

    def poll(self, *, limit_bytes: int = MEBIBYTE, limit_s: float = 0.05) -> tuple[str, ...]:
        """The lines that were completed since the last poll; at most about so many bytes, in about so much time."""
        deadline = time.monotonic() + limit_s
        lines: list[str] = []
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ()
        try:
            dropped = _dropped(fd, self._head_bytes)
            end = self._position + limit_bytes
            while self._position < end and time.monotonic() < deadline:
                block = self._read(fd, dropped, min(_BLOCK_BYTES, end - self._position), lines)
                if not block:
                    break
                lines += self._lines(block)
        finally:
            os.close(fd)
        return tuple(lines)

    def tail(self, lines: int, *, limit_bytes: int = MEBIBYTE) -> tuple[str, ...]:
        """Goes to the end and returns the last lines (of the last so many bytes); later polls go on from there."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ()
        try:
            dropped = _dropped(fd, self._head_bytes)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        logical_size = size if not dropped else size - _MARK_BYTES + dropped
        self._position, self._rest = max(0, logical_size - limit_bytes), b""
        cut = self._position > 0
        found = self.poll(limit_bytes=limit_bytes, limit_s=1.0)
        return found[1 if cut else 0 :][-lines:] if lines else ()

    def _read(self, fd: int, dropped: int, count: int, lines: list[str]) -> bytes:
        head = self._head_bytes
        if not dropped:
            if self._shrunk(os.fstat(fd).st_size):
                return b""
            place = self._position
        elif self._position < head:
            place, count = self._position, min(count, head - self._position)
        else:
            missed = dropped - (self._position - head)
            if missed > 0:
                if self._rest:
                    lines.append(readable(self._rest))
                lines.append(f"[so-tui: {missed} bytes of the log were dropped here to bound its size]")
                self._position, self._rest = head + dropped, b""
            place = head + _MARK_BYTES + self._position - head - dropped
        block = os.pread(fd, count, place)
        self._position += len(block)
        return block

    def _shrunk(self, size: int) -> bool:
        """Whether the file is shorter than what was read: for an instant in the middle of a trim; if it stays so, it is another log."""
        if size >= self._position:
            self._was_shrunk = False
        elif self._was_shrunk:
            self._position, self._rest, self._was_shrunk = 0, b"", False
        else:
            self._was_shrunk = True
        return self._was_shrunk

    def _lines(self, block: bytes) -> Iterator[str]:
        *complete, self._rest = (self._rest + block).split(b"\n")
        yield from map(readable, complete)
        if len(self._rest) > _LONGEST_LINE_BYTES:
            last_state = self._rest.rpartition(b"\r")[2]
            if len(last_state) < len(self._rest):  # a progress bar redrawn for hours: its last state is enough
                self._rest = last_state
            else:
                yield readable(self._rest)
                self._rest = b""


def log_readers(run: RunDirectory) -> tuple[LogReader, ...]:
    """A reader for each log of the newest attempt, one a host; none before an attempt."""
    attempts = run.attempts()
    return tuple(LogReader(path) for path in run.logs(attempts[-1]).values()) if attempts else ()


def readable(line: bytes) -> str:
    """One line as a terminal would leave it: the last state of what ``\\r`` rewrote, no escape sequences, no control characters."""
    states = line.split(b"\r")
    shown = next((state for state in reversed(states) if state.strip()), b"")
    return _ESCAPES.sub("", shown.decode("utf-8", errors="replace"))


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, with the values of those that look like secrets replaced."""
    return {key: "<redacted>" if value and _SECRET.search(key) else value for key, value in environment.items()}


def _dropped(fd: int, head_bytes: int) -> int:
    """Bytes that trims have dropped behind the head so far; 0 for a log that was never trimmed."""
    mark = _MARKED.fullmatch(os.pread(fd, _MARK_BYTES, head_bytes))
    return int(mark[1]) if mark else 0
