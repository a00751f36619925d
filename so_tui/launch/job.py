"""The training processes as the supervisor holds them: what was planned, the locks, the command, and DeepSpeed's runner as a child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from so_tui.launch import command, environment, locks
from so_tui.machine.types import Gpu, Machine
from so_tui.plan.types import Plan
from so_tui.runs.directory import RunDirectory
from so_tui.spec.files import write_atomic


class Job:
    """One attempt's processes on this host. Reads ``plan.json`` and ``machine.<host>.json``; writes ``command.json``."""

    def __init__(self, run: RunDirectory, attempt: int, host: str) -> None:
        """Raises OSError or msgspec.DecodeError when the attempt was not prepared for this host."""
        self._run = run
        self._attempt = attempt
        self._host = host
        self.plan = msgspec.json.decode(run.plan_path(attempt).read_bytes(), type=Plan)
        self.machine = msgspec.json.decode(run.machine_path(attempt, host).read_bytes(), type=Machine)
        self.port: int | None = None
        self._locks: tuple[locks.Lock, ...] = ()
        self._runner: subprocess.Popen[bytes] | None = None

    @property
    def marker(self) -> str:
        """The environment entry that marks the processes of the run."""
        return f"{environment.RUN_MARKER}={self._run.path}"

    def start(self) -> None:
        """Take the GPUs and a port, and start DeepSpeed's launcher. Raises LockTakenError or OSError.

        The log's descriptor is given to the processes themselves, and so are the GPU locks: both outlive the supervisor as long as they do.
        """
        folder = locks.lock_folder()
        holder = locks.Holder(run=str(self._run.path), pid=os.getpid())
        gpu_locks = locks.take_gpus(folder, self._gpus(), holder)
        self.port, port_lock = locks.take_port(folder, holder)
        self._locks = (*gpu_locks, port_lock)
        argv = command.argv(self.plan, run=str(self._run.path), attempt=self._attempt, port=self.port)
        changes = environment.variables(self.plan, self.machine, os.environ, run=str(self._run.path), attempt=self._attempt)
        self._write_command(argv, changes)
        log = os.open(self._run.log_path(self._attempt, self._host), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            with _unheard_by_children(signal.SIGUSR1):
                self._runner = subprocess.Popen(
                    argv,
                    env=environment.apply(changes, os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._run.path,
                    pass_fds=[lock.descriptor for lock in self._locks],
                    process_group=0,
                )
        finally:
            os.close(log)

    def take_over(self) -> None:
        """Take the locks of a supervisor that died, as far as its processes do not hold them still. Raises LockTakenError or OSError."""
        with contextlib.suppress(FileNotFoundError):  # it died before it started anything
            self.port = msgspec.json.decode(self._run.command_path(self._attempt).read_bytes())["port"]
        folder = locks.lock_folder()
        holder = locks.Holder(run=str(self._run.path), pid=os.getpid())
        for gpu in self._gpus():
            try:
                self._locks = (*self._locks, *locks.take_gpus(folder, [gpu], holder))
            except locks.LockTakenError as error:
                if error.holder is None or error.holder.run != holder.run:
                    raise

    def running(self) -> bool:
        """Whether DeepSpeed's runner lives, as far as it is our child."""
        return self._runner is not None and self._runner.poll() is None

    def status(self) -> int | None:
        """The runner's exit status (below 0: a signal); None when it still runs or was not our child."""
        return self._runner.poll() if self._runner else None

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks = ()

    def _gpus(self) -> list[Gpu]:
        chosen = {rank.gpu for rank in self.plan.binding}
        return [gpu for gpu in self.machine.gpus if gpu.index in chosen]

    def _write_command(self, argv: tuple[str, ...], changes: tuple[environment.Variable, ...]) -> None:
        record: dict[str, Any] = {
            "argv": argv,
            "port": self.port,
            "host": self._host,
            "started": time.time(),
            "environment": [
                {"name": change.name, "value": environment.shown((change,))[change.name], "reason": change.reason} for change in changes
            ],
            "inherited": environment.inherited_of_interest(os.environ),
        }
        write_atomic(self._run.command_path(self._attempt), msgspec.json.format(msgspec.json.encode(record), indent=1))


@contextlib.contextmanager
def _unheard_by_children(signum: signal.Signals) -> Iterator[None]:
    """What is started meanwhile ignores the signal until it says otherwise, and so do its children.

    A scheduler's warning reaches every process of a job, and would end DeepSpeed's runner and launcher, which do not know it.
    """
    handler = signal.signal(signum, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signum, handler)
