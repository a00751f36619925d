"""The training process's end of the connection to its Adam worker: starts it, sends commands when
their data is ready, and watches it.

One thread does all of this, so that commands and results pass while the training thread is busy
launching kernels.
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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from superoffload import kernel, worker
from superoffload.errors import OffloadError, WorkerLostError
from superoffload.settings import Settings
from superoffload.shared_states import HostWeights, SharedStates
from superoffload.transfers import Event
from superoffload.worker import COMMAND_PACKET, RESULT_PACKET, Command, Operation, Result

MAX_OUTSTANDING = 2
"""Commands that the worker has: the one that it executes and the next. The others wait here, where
the most urgent overtakes.
"""
EVENT_POLL_S = 0.0005


class _Waiting(NamedTuple):
    """A command that has not been sent."""

    command: Command
    after: Event
    priority: int


@dataclass(eq=False)
class WorkerClient:
    """A running Adam worker.

    Make it in the main thread of the training process: the worker dies with the thread that started
    it.

    Raises:
        OffloadError: If the process cannot be started (``worker-start``), or may not run on these
            cores (``adam-cpus``).
    """

    states: SharedStates
    """The memory to share with the worker."""
    host_weights: HostWeights | None
    """More of it, where weights are in host memory."""
    settings: Settings
    library: Path
    """The compiled kernel."""
    on_start: Callable[[], None]
    """Called in the client's thread before anything else."""
    on_result: Callable[[Command, Result], None]
    """Called in the client's thread with every command and its result, in order. What it raises
    becomes the failure.
    """

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[_Waiting] = []
        self._outstanding: deque[Command] = deque()
        self._failure: BaseException | None = None
        self._closing = False
        self._channel, workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with workers_end:
            try:
                self.process = self._start(workers_end.fileno())
            except OffloadError:
                self._channel.close()
                raise
        self._pidfd = os.pidfd_open(self.process.pid)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._check_every_s = min(1.0, self.settings.watchdog_timeout_s / 8)
        """How often to check for progress while the worker has something to do."""
        self._restart_watchdog()
        self._thread = threading.Thread(target=self._serve, name="adam-worker-client", daemon=True)
        self._thread.start()

    def submit(self, command: Command, after: Event, priority: int = 0) -> None:
        """Send a command once ``after`` has completed. Of those that can be sent, the one with the
        lowest priority number goes first.

        Commands with the same priority are sent in the order of their submission.
        """
        with self._changed:
            self._queue.append(_Waiting(command, after, priority))
        os.eventfd_write(self._wake, 1)

    def withdraw(self, operation: Operation) -> None:
        """Drop the commands of this kind that have not been sent."""
        with self._changed:
            self._queue = [
                waiting for waiting in self._queue if waiting.command.operation != operation
            ]

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block until ``ready()``, which only a result can make true. Raises the failure, if one
        happens first.
        """
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._failure is not None)
        self.check()

    def close(self) -> None:
        """End the worker, whatever it is doing, and the thread. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._channel.close()  # which ends an idle worker
        try:
            self.process.wait(0.0 if self._failure else 2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._pidfd)
        os.close(self._wake)
        with self._changed:  # A thread that saves may wait for a copy.
            self._failure = self._failure or OffloadError(
                "The offload engine is closed and its Adam worker has ended.", code="closed"
            )
            self._changed.notify_all()

    def _start(self, channel: int) -> subprocess.Popen[bytes]:
        """Start the worker's process, which inherits its end of the channel."""
        cpus, states, weights = self.settings.worker_cpus, self.states, self.host_weights
        if missing := sorted(set(cpus) - _allowed(cpus)):
            raise OffloadError(
                f"adam_cpus has {', '.join(map(str, missing))}, on which this process may not run. "
                "Use others, or leave it empty: the Adam worker then takes all but one of those of "
                "this process.",
                code="adam-cpus",
            )
        descriptors = [states.descriptor, channel, *([weights.descriptor] if weights else [])]
        settings: dict[str, object] = {
            "cpus": list(cpus),
            "memory": states.descriptor,
            "channel": channel,
            "size": states.size,
            "weights": weights.descriptor if weights else None,
        }
        not_inherited = ("OMP_", "GOMP_", "KMP_", "MKL_")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(not_inherited)
        }
        environment |= {
            "OMP_NUM_THREADS": str(len(cpus)),
            "OMP_DYNAMIC": "false",
            "OMP_PROC_BIND": "true",
            "OMP_PLACES": "threads",
        }
        try:
            with kernel.opened(self.library) as descriptor:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", worker.__file__, str(os.getpid())],
                    env=environment,
                    pass_fds=(*descriptors, descriptor),
                    stdin=subprocess.PIPE,
                )
                assert process.stdin is not None
                with (
                    suppress(BrokenPipeError),
                    process.stdin,
                ):  # a worker that has ended already is reported by whoever waits for it
                    process.stdin.write(
                        json.dumps(settings | {"library": kernel.loadable(descriptor)}).encode()
                        + b"\n"
                    )
                return process
        except OSError as error:
            raise OffloadError(
                f"The Adam worker could not be started: {error}", code="worker-start"
            ) from error

    def _serve(self) -> None:
        poller = select.poll()
        for descriptor in (self._wake, self._channel.fileno(), self._pidfd):
            poller.register(descriptor, select.POLLIN)
        try:
            self.on_start()
            while not self._closing:
                blocked = self._send_ready()
                timeout_s = (
                    EVENT_POLL_S if blocked else self._check_every_s if self._outstanding else None
                )
                # Rounded up to whole milliseconds.
                ready = dict(poller.poll(None if timeout_s is None else timeout_s * 1e3))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._channel.fileno() in ready:
                    result = self._receive()  # First: a worker that is idle may have ended.
                    self.on_result(self._outstanding[0], result)
                    self._outstanding.popleft()
                    with self._changed:
                        self._changed.notify_all()
                if self._pidfd in ready:
                    raise self._ended()
                self._check_progress()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _receive(self) -> Result:
        packet = b""  # what a worker sends that has closed its end
        with suppress(ConnectionError):
            packet = self._channel.recv(RESULT_PACKET.size)
        if not packet:
            raise self._ended()
        return Result(*RESULT_PACKET.unpack(packet))

    def _send_ready(self) -> bool:
        """Send commands whose data is ready; return whether one is waiting for its data."""
        while len(self._outstanding) < MAX_OUTSTANDING:
            with self._changed:
                found = min(
                    (waiting for waiting in self._queue if waiting.after.query()),
                    key=lambda found: found.priority,
                    default=None,
                )
                if found is None:
                    return bool(self._queue)
                self._queue.remove(found)
            if not self._outstanding:
                self._restart_watchdog()
            self._outstanding.append(found.command)
            try:
                self._channel.send(COMMAND_PACKET.pack(*found.command))
            except OSError as error:
                raise self._ended() from error
        return False

    def _restart_watchdog(self) -> None:
        self._progress, self._idle_s, self._last_check = (
            self.states.progress,
            0.0,
            time.monotonic(),
        )

    def _check_progress(self) -> None:
        if not self._outstanding or self.states.progress != self._progress:
            self._restart_watchdog()
            return
        now = time.monotonic()
        # Time in which this process did not check is not counted: a scheduler, for example, may
        # have suspended both processes.
        self._idle_s += min(now - self._last_check, 2 * self._check_every_s)
        self._last_check = now
        if self._idle_s > self.settings.watchdog_timeout_s:
            raise WorkerLostError(
                f"The Adam worker (process {self.process.pid}) made no progress for "
                f"{self._idle_s:.0f} s {self._activity()}. {_process_state(self.process.pid)} The "
                "optimizer state in memory is lost; resume from the last checkpoint.",
                code="worker-stuck",
            )

    def _ended(self) -> WorkerLostError:
        """Return the error for a worker that has ended or closed its connection."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        code, hint = self.process.returncode, ""
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            hint = (
                " The kernel's out-of-memory killer does that."
                if code == -signal.SIGKILL
                else " Its own messages are in the log."
            )
        else:
            how = f"ended with code {code}"
            hint = " Its own messages are in the log." if code else ""
        return WorkerLostError(
            f"The Adam worker (process {self.process.pid}) {how} {self._activity()}.{hint} "
            "The optimizer state in memory is lost; resume from the last checkpoint.",
            code="worker-ended",
        )

    def _activity(self) -> str:
        if not self._outstanding:
            return "while it had nothing to do"
        command = self._outstanding[0]
        operation = Operation(command.operation).name.lower()
        return f"during {operation} of sub-group {command.sub_group}, optimizer step {command.step}"


def _allowed(cpus: Sequence[int]) -> set[int]:
    """Return those of the cores on which a thread of this process may run, whichever it is bound to
    now.
    """
    found: set[int] = set()

    def try_them() -> None:
        with suppress(OSError, OverflowError):  # none of them
            os.sched_setaffinity(0, cpus)  # of this thread only
            found.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=try_them, name="try-adam-cpus")
    thread.start()
    thread.join()
    return found


def _process_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "The process no longer exists."
    if letter in "Tt":
        return "It is stopped (SIGSTOP or a debugger); `kill -CONT` would have resumed it."
    return f"Its state is {letter} (see proc(5))."
