"""The user's own command, run for each alert. It cannot harm the run: it is never waited for while training goes on, it has a time limit,
after which it is killed and not waited for at all, what it prints is cut, and its processes do not count as the run's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence

from so_tui.launch.log_line import log_line
from so_tui.trust.printable import brief_message

MARKER = "SO_TUI_ALERT_KIND"
"""In the environment of the command and of all that it starts."""
TEXT_ARGUMENT = "{text}"
"""An argument that is exactly this becomes the alert's sentence. Inside of others it stays, so that no name becomes part of a script."""
_MOST_WAITING = 20
_KEPT_BYTES = 2000
_END_S = 60.0
"""How long a supervisor whose run has ended waits for commands, however many."""


class AlertCommand:
    """Runs one command at a time, in order. For one thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence[str], Mapping[str, str], float]] = deque(
            maxlen=_MOST_WAITING
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        """Not collected yet. One that runs as another user may not be killed, and one that waits for a disk ends when the disk answers."""
        self._ends_at = 0.0
        self._output = b""
        self._name = ""

    @property
    def pid(self) -> int | None:
        """Of the command, if it is under way."""
        return None if self._process is None else self._process.pid

    def request(
        self, command: Sequence[str], about: Mapping[str, str], text: str, timeout_s: float
    ) -> None:
        """Have a command run soon.

        Args:
            command: Its argument list; nothing is run if it is empty.
            about: What the alert is, added to its environment.
            text: The alert's sentence.
            timeout_s: After this time its process group is killed.
        """
        if command:
            self._waiting.append(
                (
                    [text if argument == TEXT_ARGUMENT else argument for argument in command],
                    about,
                    timeout_s,
                )
            )
            self.tick()

    def tick(self) -> None:
        """Collect a command that has ended, kill one whose time is over, start the next. Never waits."""
        self._killed = [process for process in self._killed if process.poll() is None]
        if self._process is not None:
            self._read()
            # Not collected yet: until then no other process can get its number, by which its group is ended.
            ended = (
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                is not None
            )
            if not ended and time.monotonic() < self._ends_at:
                return
            self._collect(in_time=ended)
        if self._waiting:
            self._start(*self._waiting.popleft())

    def finish(self) -> None:
        """Wait for the commands that are under way or waiting, at most a minute in all."""
        deadline = time.monotonic() + _END_S
        while self._process is not None or self._waiting:
            if time.monotonic() > deadline:
                self._waiting.clear()
                self._ends_at = 0.0
            self.tick()
            time.sleep(0.05)

    def _start(self, argv: Sequence[str], about: Mapping[str, str], timeout_s: float) -> None:
        try:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **about},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            log_line(f"the alert command {argv[0]} was not started: {error}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._output, self._name = b"", argv[0]
        self._ends_at = time.monotonic() + timeout_s

    def _read(self) -> None:
        """Take what the command printed, so that it does not wait for a full pipe, and keep the beginning."""
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                block = os.read(self._process.stdout.fileno(), 1 << 16)
                if not block:
                    return
                self._output = (self._output + block)[:_KEPT_BYTES]

    def _collect(self, *, in_time: bool) -> None:
        """Log what went wrong, and end what the command left in its process group."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        if not in_time:
            self._killed.append(process)
        code = process.wait() if in_time else None
        if code != 0:
            end = f"ended with exit code {code}" if in_time else "took too long"
            said = brief_message(self._output.decode(errors="replace"))
            log_line(f"the alert command {self._name} {end}{': ' + said if said else ''}")
