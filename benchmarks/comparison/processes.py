"""Run one process at a time with a time limit: record what it prints and when, and kill everything
that it leaves behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

MARK = "comparison-row: "
_GRACE_S = 1.0


class Line(NamedTuple):
    """A line of output."""

    at_s: float
    """When it arrived, by the monotonic clock."""
    text: str


class Ended(NamedTuple):
    """A process that has ended."""

    lines: tuple[Line, ...]
    code: int | None
    """None if it was killed, at the limit or because its output was complete."""
    late: bool
    wall_s: float

    def tail(self, limit_s: float, characters: int = 1500) -> str:
        """Return the end of its output, for an error."""
        why = f"took longer than {limit_s:.0f} s" if self.late else f"exit code {self.code}"
        return f"{why}\n" + "\n".join(line.text for line in self.lines)[-characters:].strip()


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    enough: Callable[[str], bool],
) -> Ended:
    """Run a command until it ends, a line is ``enough``, or the limit is reached; then kill its
    whole process tree.

    Some of these processes do not end by themselves when their work is done, and the next part
    needs the memory that they hold.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        argv,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[Line] = []
    heard = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for text in process.stdout:
            lines.append(Line(time.monotonic(), text.rstrip("\n")))
            if enough(text):
                break
        heard.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    # A child that outlives the process keeps the pipe open, so also check the process itself.
    while not heard.wait(0.2) and process.poll() is None and time.monotonic() - begin < limit_s:
        pass
    late = not heard.is_set() and process.poll() is None
    tree = _tree(process.pid)
    if not late:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    code = process.poll()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in tree:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(tree, timeout=30)  # Releasing gigabytes of pinned memory takes a while.
    process.wait()
    reader.join(_GRACE_S)
    return Ended(tuple(lines), code, late, time.monotonic() - begin)


def row_of(ended: Ended, limit_s: float) -> dict[str, Any]:
    """Return the row that a process printed, or its error."""
    for line in ended.lines:
        if line.text.startswith(MARK):
            row: dict[str, Any] = json.loads(line.text.removeprefix(MARK))
            return row
    return {"error": ended.tail(limit_s)}


def tell(row: Mapping[str, Any]) -> None:
    """Print the row of this process, which completes its output."""
    print(MARK + json.dumps(row), flush=True)


def says_row(text: str) -> bool:
    """Return whether a line is a row."""
    return text.startswith(MARK)


def free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
