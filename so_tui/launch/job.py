"""The training processes as the supervisor holds them: their launch, the locks, and DeepSpeed's runner as a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from so_tui.launch import environment, locks
from so_tui.launch.attempt_files import indented
from so_tui.launch.host_check import refuse_different_host, software_differences
from so_tui.launch.marker import known_id
from so_tui.launch.nodes import ALONE, Nodes, hostfile, node_values
from so_tui.launch.partitioning import Partitioning
from so_tui.launch.preparation import Launch
from so_tui.launch.rendezvous import (
    init_method,
    make_rendezvous,
    remove_rendezvous,
    rendezvous_path,
)
from so_tui.machine import inspect_machine
from so_tui.machine.code_folders import make_code_folders
from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.types import Gpu
from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.spec import SoTuiError
from so_tui.trust.secrets import recordable


class NoCommandError(SoTuiError):
    """The attempt was written by an older version, which left no command to start."""


class Job:
    """One attempt's processes on this host. Starts what ``launch.json`` holds and writes ``command.json``."""

    def __init__(
        self, run: RunDirectory, attempt: int, host: str, launch: Launch, nodes: Nodes = ALONE
    ) -> None:
        """Prepare to start a launch.

        Args:
            run: The run.
            attempt: The attempt.
            host: The name of this host.
            launch: What was prepared for this host.
            nodes: This host among those of the run.
        """
        self._run = run
        self._attempt = attempt
        self._host = host
        self._nodes = nodes
        self.launch = launch
        self._rendezvous: Path | None = None
        self._locks: tuple[locks.Lock, ...] = ()
        self._runner: subprocess.Popen[bytes] | None = None
        self._partitioning = Partitioning()

    def start(self) -> None:
        """Take the GPUs, fill in the placeholders, and start DeepSpeed's launcher.

        The processes get the log's descriptor and the GPU locks themselves, so both outlive the supervisor for as long as they run.

        Raises:
            LockTakenError: Another run uses a GPU.
            HostDiffersError: This is not the host that was planned for.
            NoCommandError: There is no ``launch.json``.
            OSError: The process or a file could not be made.
        """
        if not self.launch.argv:
            raise NoCommandError(
                "the attempt has no launch.json, because an older version of so-tui wrote it"
            )
        folder = locks.lock_folder()
        holder = locks.Holder(run=str(self._run.path), pid=os.getpid())
        self._locks = locks.take_gpus(folder, self._gpus(), holder)
        host = inspect_machine()
        refuse_different_host(self.launch, host)
        launch = self._resolved(folder)
        processes = environment.apply(launch.environment, os.environ)
        make_code_folders(processes)
        self._write_command(launch)
        log = os.open(
            self._run.log_path(self._attempt, self._host),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o640,
        )
        try:
            for difference in software_differences(self.launch.machine, host):
                os.write(
                    log, f"so-tui: warning: {difference.message} ({difference.code})\n".encode()
                )
            for line in self._partitioned():
                os.write(log, f"so-tui: {line}\n".encode())
            with _ignored_by_children(signal.SIGUSR1):
                self._runner = subprocess.Popen(
                    launch.argv,
                    env=processes,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._run.path,
                    pass_fds=[lock.descriptor for lock in self._locks],
                    process_group=0,
                )
        finally:
            os.close(log)

    def _resolved(self, folder: Path) -> Launch:
        """Make what the ranks need to meet, and return the launch with this host's values."""
        if self._nodes.count == 1:
            self._rendezvous = make_rendezvous(folder, self._run.path, self._attempt)
            meeting, others = init_method(self._rendezvous), {}
        else:
            listed = self._run.hostfile_path(self._attempt, self._nodes.node)
            write_run_file(self._run, listed, hostfile(self._nodes, self.launch.plan).encode())
            meeting, others = (
                self._nodes.init_method,
                node_values(self._nodes, self.launch.plan, str(listed)),
            )
        return self.launch.resolved(
            run=self._run.path,
            attempt=self._attempt,
            rendezvous=meeting,
            run_id=known_id(self._run),
            others=others,
        )

    def take_over(self) -> None:
        """Take the locks of a supervisor that died, except those that its processes still hold.

        Raises:
            OSError: One could not be taken, such as because another run has it by now. The others are.
        """
        folder = locks.lock_folder()
        self._rendezvous = rendezvous_path(folder, self._run.path, self._attempt)
        holder = locks.Holder(run=str(self._run.path), pid=os.getpid())
        lost: list[str] = []
        for gpu in self._gpus():
            try:
                self._locks = (*self._locks, *locks.take_gpus(folder, [gpu], holder))
            except locks.LockTakenError as error:
                if error.holder is None or error.holder.run != holder.run:
                    lost.append(str(error))
            except OSError as error:
                lost.append(str(error))
        for line in self._partitioned():
            print(line, flush=True)
        if lost:
            raise OSError("; ".join(lost))

    def running(self) -> bool:
        """Return whether DeepSpeed's runner is alive, as far as it is our child."""
        return self._runner is not None and self._runner.poll() is None

    @property
    def runner_pid(self) -> int | None:
        """Of DeepSpeed's runner, as far as it is our child."""
        return None if self._runner is None else self._runner.pid

    def status(self) -> int | None:
        """Return the runner's exit status (below 0 for a signal); None while it runs or if it was not our child."""
        return self._runner.poll() if self._runner else None

    def refresh_locks(self) -> None:
        """Show that the locks are in use.

        Raises:
            OSError: One was lost, such as to another run after its file had been removed. The others are refreshed.
        """
        holder = locks.Holder(run=str(self._run.path), pid=os.getpid())
        kept: list[locks.Lock] = []
        lost: list[str] = []
        for lock in self._locks:
            try:
                kept.append(locks.refreshed(lock, holder))
            except (locks.LockTakenError, OSError) as error:
                kept.append(lock)
                lost.append(str(error))
        self._locks = tuple(kept)
        if lost:
            raise OSError("; ".join(lost))

    def release(self) -> None:
        """Release the locks and remove the rendezvous."""
        if self._rendezvous is not None:
            remove_rendezvous(self._rendezvous)
        for lock in self._locks:
            lock.release()
        self._locks = ()
        try:
            self._partitioning.remove()
        except OSError as error:
            print(f"resctrl groups: {error}", file=sys.stderr, flush=True)

    def _partitioned(self) -> Iterator[str]:
        """Partition memory bandwidth and cache where that is possible, and yield lines that say so. Training goes on without it."""
        try:
            for made in self._partitioning.apply(self.launch.plan.binding):
                yield f"{made.role} cores {cpu_ranges(made.cpus)} have their own partition: {', '.join(made.schemata)}"
        except OSError as error:
            yield f"warning: memory bandwidth could not be partitioned: {error}"

    def _gpus(self) -> list[Gpu]:
        chosen = {rank.gpu for rank in self.launch.plan.binding}
        return [gpu for gpu in self.launch.machine.gpus if gpu.index in chosen]

    def _write_command(self, launch: Launch) -> None:
        shown = environment.shown(launch.environment)
        record: dict[str, Any] = {
            "argv": launch.argv,
            "host": self._host,
            "started": time.time(),
            "environment": [
                {"name": change.name, "value": shown[change.name], "reason": change.reason}
                for change in launch.environment
            ],
            "inherited": recordable(os.environ),
        }
        write_run_file(
            self._run, self._run.command_path(self._attempt, self._nodes.node), indented(record)
        )


@contextlib.contextmanager
def _ignored_by_children(signum: signal.Signals) -> Iterator[None]:
    """Let processes started in this block, and their children, ignore a signal until they install a handler of their own.

    A scheduler's warning reaches every process of a job. It would end DeepSpeed's runner and launcher, which do not handle it.
    """
    handler = signal.signal(signum, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signum, handler)
