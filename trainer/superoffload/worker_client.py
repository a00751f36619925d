"""The training process's end of the line to its Adam worker: starts it, sends it commands when their data is there, watches over it.

One thread does it all, so that commands leave and results return while the training thread is busy launching kernels.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from superoffload import worker
from superoffload.arena import Arena
from superoffload.errors import OffloadError, WorkerLostError
from superoffload.transfers import Event

MOST_OUTSTANDING = 64
"""Commands in the worker's socket: far below what it can hold, so that neither side ever blocks in a send."""
EVENT_POLL_S = 0.0005


class WorkerClient:
    """A running worker. Make it in the training process's main thread: the worker dies with the thread that started it.

    ``on_start`` is called first in the link's thread, then ``on_result`` for every result, in the order of the commands; what they raise
    becomes the failure.
    """

    def __init__(
        self,
        arena: Arena,
        cpus: Sequence[int],
        library: Path,
        on_start: Callable[[], None],
        on_result: Callable[[worker.Result], None],
        watchdog_timeout_s: float,
    ) -> None:
        self._arena = arena
        self._on_start, self._on_result = on_start, on_result
        self._watchdog_timeout_s = watchdog_timeout_s
        self._changed = threading.Condition()
        self._queue: deque[tuple[worker.Command, Event]] = deque()
        self._outstanding: deque[worker.Command] = deque()
        self._failure: BaseException | None = None
        self._closing = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.process = _start(arena, cpus, library, theirs.fileno())
            except OffloadError:
                self._channel.close()
                raise
        self._pidfd = os.pidfd_open(self.process.pid)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._look_s = min(1.0, watchdog_timeout_s / 8)
        """How often to look for progress while the worker has something to do."""
        self._restart_watchdog()
        self._thread = threading.Thread(target=self._serve, name="adam-worker-link", daemon=True)
        self._thread.start()

    def submit(self, command: worker.Command, after: Event) -> None:
        """Sends the command once ``after`` has happened; commands leave in the order of their submission."""
        with self._changed:
            self._queue.append((command, after))
        os.eventfd_write(self._wake, 1)

    def check(self) -> None:
        """Raises what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure

    def wait(self, ready: Callable[[], bool]) -> None:
        """Blocks until ``ready()``, which only a result can make true. Raises what goes wrong meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._failure is not None)
        self.check()

    def close(self) -> None:
        """Ends the worker, whatever it is doing, and the thread. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._channel.close()  # an idle worker leaves at once
        try:
            self.process.wait(0.0 if self._failure else 2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._pidfd)
        os.close(self._wake)
        self._failure = self._failure or OffloadError("The offload engine is closed, and its worker was ended.")

    def _serve(self) -> None:
        poller = select.poll()
        for descriptor in (self._wake, self._channel.fileno(), self._pidfd):
            poller.register(descriptor, select.POLLIN)
        try:
            self._on_start()
            while not self._closing:
                blocked = self._send_ready()
                timeout_s = EVENT_POLL_S if blocked else self._look_s if self._outstanding else None
                ready = {descriptor for descriptor, _ in poller.poll(None if timeout_s is None else max(1, int(timeout_s * 1e3)))}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._channel.fileno() in ready:
                    self._receive()
                if self._pidfd in ready:
                    raise WorkerLostError(self._obituary())
                self._check_progress()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the training thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _send_ready(self) -> bool:
        """Sends what can be sent; returns whether a command is waiting for its data."""
        while self._queue and len(self._outstanding) < MOST_OUTSTANDING:
            command, after = self._queue[0]
            if not after.query():
                return True
            self._queue.popleft()
            if not self._outstanding:
                self._restart_watchdog()
            self._outstanding.append(command)
            try:
                self._channel.send(worker.COMMAND.pack(*command))
            except OSError as error:
                raise WorkerLostError(self._obituary()) from error
        return False

    def _receive(self) -> None:
        try:
            packet = self._channel.recv(worker.RESULT.size)
        except ConnectionError:
            packet = b""
        if not packet:
            raise WorkerLostError(self._obituary())
        self._on_result(worker.Result(*worker.RESULT.unpack(packet)))
        self._outstanding.popleft()
        with self._changed:
            self._changed.notify_all()

    def _restart_watchdog(self) -> None:
        self._progress, self._idle_s, self._looked = self._arena.progress, 0.0, time.monotonic()

    def _check_progress(self) -> None:
        if not self._outstanding or self._arena.progress != self._progress:
            self._restart_watchdog()
            return
        now = time.monotonic()
        # Time in which this process did not look does not count: both may have been suspended together, by a scheduler for instance.
        self._idle_s += min(now - self._looked, 2 * self._look_s)
        self._looked = now
        if self._idle_s > self._watchdog_timeout_s:
            raise WorkerLostError(
                f"The Adam worker (process {self.process.pid}) made no progress for {self._idle_s:.0f} s {self._doing()}. "
                f"{_process_state(self.process.pid)} The optimizer state in memory is lost; resume from the last checkpoint."
            )

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        code = self.process.returncode
        how = "closed its line" if code is None else f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        hint = (
            " The kernel's out-of-memory killer does that." if code == -signal.SIGKILL else " What it said is in the log." if code else ""
        )
        return (
            f"The Adam worker (process {self.process.pid}) {how} {self._doing()}.{hint} "
            "The optimizer state in memory is lost; resume from the last checkpoint."
        )

    def _doing(self) -> str:
        if not self._outstanding:
            return "while it had nothing to do"
        command = self._outstanding[0]
        return f"in {worker.Operation(command.operation).name.lower()} of sub-group {command.sub_group}, optimizer step {command.step}"


def _start(arena: Arena, cpus: Sequence[int], library: Path, channel: int) -> subprocess.Popen[bytes]:
    settings = {
        "parent": os.getpid(),
        "cpus": list(cpus),
        "library": str(library),
        "memory": arena.descriptor,
        "channel": channel,
        "numels": arena.numels,
        "exchange_size": arena.dtype.itemsize,
        "accumulate": arena.accumulate,
    }
    foreign = ("OMP_", "GOMP_", "KMP_", "MKL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"OMP_NUM_THREADS": str(len(cpus)), "OMP_DYNAMIC": "false", "OMP_PROC_BIND": "true", "OMP_PLACES": "threads"}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", worker.__file__, json.dumps(settings)],
            env=environment,
            pass_fds=(arena.descriptor, channel),
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise OffloadError(f"The Adam worker could not be started: {error}") from error


def _process_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "It is gone."
    if letter in "Tt":
        return "It is stopped (SIGSTOP or a debugger): `kill -CONT` would have let it go on."
    return f"Its state is {letter} (see proc(5))."
