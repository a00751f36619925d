"""Follow a run by polling its directory, for the screen and for commands."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from so_tui.runs.directory import RunDirectory
from so_tui.runs.liveness import HeartbeatWatch, state_with_truth
from so_tui.runs.metrics import MetricsReader, Progress
from so_tui.runs.records import (
    RunState,
    Sample,
    StepRecord,
)
from so_tui.runs.samples import SampleReader
from so_tui.runs.segments import MEBIBYTE
from so_tui.spec.errors import InputError
from so_tui.trust.files import UnfitFileError, open_descriptor
from so_tui.trust.text import printable

# The trainer's log: raw bytes of its processes, trimmed by the supervisor and made readable by the
# reader.
#
# The processes inherit the log as an open descriptor, so the file cannot be replaced; it is
# trimmed in place. The first HEAD_BYTES stay. They are followed by a marker of fixed size with the
# number of dropped bytes, from which readers find their position again, and then by the newest
# bytes.


HEAD_BYTES = MEBIBYTE
TAIL_BYTES = 16 * MEBIBYTE

_MARK = b"\n[so-tui: %015d bytes of the log were dropped here to bound its size]\n"
_MARK_BYTES = len(_MARK % 0)
_MARKED = re.compile(
    rb"\n\[so-tui: (\d{15}) bytes of the log were dropped here to bound its size\]\n"
)
_LONGEST_LINE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 17

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC and other strings: titles, links
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"  # other control characters but tab
)


def trim_log(path: Path) -> int:
    """Remove the middle of a log that is longer than ``HEAD_BYTES + 2 x TAIL_BYTES``. Only the
    supervisor may call this.

    Writers must use O_APPEND. Lines written between the last copy and the truncation (microseconds,
    once in about 16 MiB) are lost.

    Returns:
        Number of bytes dropped; 0 if the log is short or missing.

    Raises:
        OSError: If the log cannot be read or written.
    """
    try:
        fd = os.open(
            path, os.O_RDWR | os.O_CLOEXEC
        )  # without O_APPEND, with which pwrite ignores its offset on Linux
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(fd).st_size
        if size <= HEAD_BYTES + 2 * TAIL_BYTES:
            return 0
        dropped = _dropped(fd)
        body = HEAD_BYTES + (_MARK_BYTES if dropped else 0)
        start = size - TAIL_BYTES
        start += os.pread(fd, _LONGEST_LINE_BYTES, start).find(b"\n") + 1
        source, target = start, HEAD_BYTES + _MARK_BYTES
        while block := os.pread(
            fd, _BLOCK_BYTES, source
        ):  # until the end, including what is written meanwhile
            source += len(block)
            target += os.pwrite(fd, block, target)
        os.ftruncate(fd, target)
        os.pwrite(fd, _MARK % (dropped + start - body), HEAD_BYTES)
        return start - body
    finally:
        os.close(fd)


class LogReader:
    """Follows a log: complete lines without escape sequences, and only the last state of a line
    rewritten with ``\\r`` (progress bars).

    The log may be missing, end within a line, or be trimmed at any time. For one thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0  # in the log as it would be if never trimmed
        self._rest = b""
        self.behind = False
        """Whether the last poll reached its limits, so that there may be more."""

    @property
    def partial(self) -> str:
        """Current state of the unfinished last line, such as a running progress bar."""
        return _readable(self._rest)

    def poll(
        self, *, limit_bytes: int = MEBIBYTE, limit_s: float = 0.05, at_end: bool = False
    ) -> tuple[str, ...]:
        """Return the lines completed since the last poll, within about ``limit_bytes`` and
        ``limit_s``: or, ``at_end``, those within ``limit_bytes`` of the end.

        Reads at least one block, however long a busy host or file system takes.
        """
        deadline = time.monotonic() + limit_s
        lines: list[str] = []
        self.behind = False
        try:
            fd = open_descriptor(self._path)
        except (
            FileNotFoundError,
            UnfitFileError,
        ):  # not written yet, or no log: a pipe would block, a device never end
            return ()
        try:
            dropped = _dropped(fd)
            if at_end:
                size = os.fstat(fd).st_size + max(0, dropped - _MARK_BYTES)
                self._position, self._rest = max(0, size - limit_bytes), b""
            cut = 1 if at_end and self._position else 0
            end = self._position + limit_bytes
            while block := self._read(fd, dropped, min(_BLOCK_BYTES, end - self._position), lines):
                lines += self._lines(block)
                if self._position >= end or time.monotonic() >= deadline:
                    self.behind = True
                    break
        finally:
            os.close(fd)
        return tuple(lines[cut:])

    def tail(self, lines: int) -> tuple[str, ...]:
        """Return the last lines, within a MiB of the end; later polls continue from there."""
        found = self.poll(limit_s=1.0, at_end=True)
        return found[-lines:] if lines else ()

    def _read(self, fd: int, dropped: int, count: int, lines: list[str]) -> bytes:
        head = HEAD_BYTES
        if not dropped:
            offset = self._position
        elif self._position < head:
            offset, count = self._position, min(count, head - self._position)
        else:
            missed = dropped - (self._position - head)
            if missed > 0:
                if self._rest:
                    lines.append(_readable(self._rest))
                lines.append(
                    f"[so-tui: {missed} bytes of the log were dropped here to bound its size]"
                )
                self._position, self._rest = head + dropped, b""
            offset = head + _MARK_BYTES + self._position - head - dropped
        block = os.pread(fd, count, offset)
        self._position += len(block)
        return block

    def _lines(self, block: bytes) -> Iterator[str]:
        *complete, self._rest = (self._rest + block).split(b"\n")
        yield from map(_readable, complete)
        if len(self._rest) > _LONGEST_LINE_BYTES:
            last_state = self._rest.rpartition(b"\r")[2]
            if len(last_state) < len(
                self._rest
            ):  # a progress bar redrawn for hours: keep only its last state
                self._rest = last_state
            else:
                yield _readable(self._rest)
                self._rest = b""


def last_lines(path: Path) -> str:
    """Return the last three lines of a log, on one; empty if it is missing, empty or cannot be
    read.
    """
    log = LogReader(path)
    try:
        return " / ".join(filter(None, (*log.tail(3), log.partial)))
    except OSError:
        return ""


def log_readers(run: RunDirectory, attempt: int | None = None) -> tuple[LogReader, ...]:
    """Return a reader for each host's log of an attempt, by default the newest; none before the
    first attempt.
    """
    chosen = max(run.attempts(), default=0) if attempt is None else attempt
    return tuple(LogReader(path) for path in run.logs(chosen).values())


def _readable(line: bytes) -> str:
    """Return a line as a terminal would show it: the last state after ``\\r``, without escape
    sequences and control characters.

    Characters that would act on a terminal or reorder the line in another way are spelled out.
    """
    states = line.split(b"\r")
    shown = next((state for state in reversed(states) if state.strip()), b"")
    return printable(_ESCAPES.sub("", shown.decode("utf-8", errors="replace")))


def _dropped(fd: int) -> int:
    """Return the bytes that trims have dropped so far; 0 if the log was never trimmed."""
    mark = _MARKED.fullmatch(os.pread(fd, _MARK_BYTES, HEAD_BYTES))
    return int(mark[1]) if mark else 0


class LogLine(msgspec.Struct, frozen=True):
    """A line of the log of one host."""

    attempt: int
    host: str
    text: str


class Update(Progress, frozen=True, kw_only=True):
    """Result of one poll."""

    samples: Mapping[str, tuple[Sample, ...]]
    """New samples by host."""
    log_lines: tuple[LogLine, ...]
    state: RunState | None
    """State corrected by ``liveness``; None if it cannot be read (yet)."""

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Step records among the new records."""
        return tuple(record for record in self.records if isinstance(record, StepRecord))


class RunReader:
    """Follows one run. For one thread.

    Opening and the first poll are cheap, however long the run is: only new records are read one by
    one.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        watch: HeartbeatWatch | None = None,
        log_lines: int = 1000,
        state_of: Callable[[RunDirectory, HeartbeatWatch], RunState] = state_with_truth,
    ) -> None:
        """Prepare to follow a run; nothing is read yet.

        Args:
            run: The run.
            watch: Times the heartbeats of runs on other hosts; shared by several readers.
            log_lines: Number of lines that the first poll returns of an existing log; later polls
                return all new lines.
            state_of: Returns the state; one that also asks the scheduler of a submitted run, if
                there is one.
        """
        self.run = run
        self.metrics = MetricsReader(run)
        self.state: RunState | None = None
        self._watch = watch or HeartbeatWatch()
        self._state_of = state_of
        self._log_lines = log_lines
        self.samples: dict[str, SampleReader] = {}
        """By host."""
        self._logs: dict[str, LogReader] = {}
        self._log_attempt = 0

    def poll(
        self, *, limit_records: int = 5000, limit_s: float = 0.1, earlier: bool = True
    ) -> Update:
        """Return what is new, within about ``limit_records`` and ``limit_s``, and read ``earlier``
        metrics, unless ``StepRows`` does. Raises OSError if the directory cannot be read.
        """
        deadline = time.monotonic() + limit_s
        progress = self.metrics.poll(limit_records=limit_records, limit_s=limit_s, earlier=earlier)
        for host in self.run.sample_hosts():
            if host not in self.samples:
                self.samples[host] = SampleReader(self.run, host)
        samples = {host: reader.poll() for host, reader in self.samples.items()}
        log = self._poll_log(max(0.01, deadline - time.monotonic()))
        # The directory may be unreachable for a moment: a stale state is better than none.
        with contextlib.suppress(InputError):
            self.state = self._state_of(self.run, self._watch)
        return Update(
            records=progress.records,
            samples={host: new for host, new in samples.items() if new},
            log_lines=log,
            state=self.state,
            more=progress.more,
            behind=progress.behind,
        )

    @property
    def log_partial(self) -> str:
        """Unfinished last line of the log, such as a running progress bar."""
        return next((reader.partial for reader in self._logs.values() if reader.partial), "")

    def _poll_log(self, limit_s: float) -> tuple[LogLine, ...]:
        """Return new lines of the newest attempt's logs, and unread lines of earlier attempts."""
        newest = max(self.run.attempts(), default=0)
        first_poll = self._log_attempt == 0
        lines = [
            LogLine(self._log_attempt, host, text)
            for host, reader in self._logs.items()
            for text in reader.poll(limit_s=limit_s)
        ]
        if newest != self._log_attempt:
            self._log_attempt, self._logs = newest, {}
        for host, path in self.run.logs(newest).items():
            if host not in self._logs:
                self._logs[host] = LogReader(path)
                tail = (
                    self._logs[host].tail(self._log_lines)
                    if first_poll
                    else self._logs[host].poll(limit_s=limit_s)
                )
                lines += [LogLine(newest, host, text) for text in tail]
        return tuple(lines)
