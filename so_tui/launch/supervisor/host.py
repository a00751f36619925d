"""What the supervisors of all nodes of a run do alike: start the processes of their host, watch,
sample and end them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec import Struct

from so_tui.launch import command
from so_tui.launch.command import Placeholder
from so_tui.launch.launch import indented
from so_tui.launch.supervisor import host_check
from so_tui.launch.supervisor.ending import Evidence, Shutdown
from so_tui.launch.supervisor.host_check import refuse_different_host, software_differences
from so_tui.launch.supervisor.processes import (
    FirstLoss,
    ProcessTree,
    known_id,
    markers,
    reap_orphans,
)
from so_tui.launch.supervisor.samples import Sampler, oom_kills
from so_tui.launch.supervisor.slowness import NetworkWatch
from so_tui.machine import inspect_machine
from so_tui.machine.software import make_code_folders
from so_tui.machine.types import Gpu
from so_tui.plan.plan import Launch, Plan, RankBinding
from so_tui.runs.directory import RunDirectory, write_run_file
from so_tui.runs.listing import remove_leftovers
from so_tui.runs.liveness import this_host
from so_tui.runs.reader import LogReader, trim_log
from so_tui.runs.records import Process, Sample
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import FULL
from so_tui.spec import Refused
from so_tui.trust.files import NotOwnError, distrust_of_folder, private_folder
from so_tui.trust.text import recordable

# The nodes of a run as one of them sees them: its number, and where the ranks of all nodes meet.
#
# A node is a host here and wherever a run's nodes have numbers, as schedulers call it.


_FIRST_PORT, _PORTS = 12_000, 16_000
"""Ports of rendezvous: below those that Linux gives to connections."""


class Nodes(Struct, frozen=True, kw_only=True):
    """One node among those of a run."""

    node: int = 0
    """This node's number, from 0."""
    count: int = 1
    address: str = ""
    """Of the first node; empty where there is only one."""
    port: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the node of rank 0, whose supervisor writes the run's state."""
        return self.node == 0

    @property
    def init_method(self) -> str:
        """Where the ranks meet, as torch's ``init_process_group`` takes it."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


ALONE = Nodes()
"""The only node of a run."""


def nodes_of_job(environ: Mapping[str, str]) -> Nodes:
    """Return what Slurm says of the nodes of the step that this process belongs to."""
    count = int(environ.get("SLURM_NNODES") or 1)
    if count == 1:
        return ALONE
    return Nodes(
        node=int(environ["SLURM_NODEID"]),
        count=count,
        address=environ[
            "SLURM_LAUNCH_NODE_IPADDR"
        ],  # srun runs in the batch script, on the first node
        port=_FIRST_PORT + int(environ["SLURM_JOB_ID"]) % _PORTS,  # two jobs may share a node
    )


def numbered(binding: tuple[RankBinding, ...], node: int) -> tuple[RankBinding, ...]:
    """Return a host's bindings with the numbers that its ranks have among those of all nodes."""
    return tuple(
        msgspec.structs.replace(rank, rank=rank.rank + node * len(binding)) for rank in binding
    )


def hostfile(nodes: Nodes, plan: Plan) -> str:
    """Return a file of nodes for DeepSpeed's launcher. Without ssh their names mean nothing, and
    only this node's slots are GPUs.
    """
    return "".join(
        f"{_name(node)} slots={1 + max(_devices(nodes, plan, node))}\n"
        for node in range(nodes.count)
    )


def node_values(nodes: Nodes, plan: Plan, hostfile: str) -> dict[str, str]:
    """Return the values of the placeholders that only a run on several nodes has.

    Args:
        nodes: The nodes.
        plan: This node's plan.
        hostfile: The path of its file of nodes.
    """
    devices = (
        f"{_name(node)}:{','.join(map(str, _devices(nodes, plan, node)))}"
        for node in range(nodes.count)
    )
    return {
        Placeholder.NODE: str(nodes.node),
        Placeholder.ADDRESS: nodes.address,
        Placeholder.PORT: str(nodes.port),
        Placeholder.HOSTFILE: hostfile,
        Placeholder.DEVICES: "@".join(devices),
    }


def _name(node: int) -> str:
    return f"node{node}"


def _devices(nodes: Nodes, plan: Plan, node: int) -> list[int]:
    """Return the GPUs of a node, or the numbers of its ranks without GPUs; of other nodes only how
    many there are is known.
    """
    gpus = [rank.gpu for rank in plan.binding if rank.gpu is not None]
    return gpus if gpus and node == nodes.node else list(range(len(plan.binding)))


# Where the ranks of one host meet: a file in a folder that only this user can open.
#
# A store that listens on a port could be joined by anybody who reaches it, and torch's listens on
# every network, whatever its address.


def make_rendezvous(folder: Path, run: Path, attempt: int) -> Path:
    """Make the folder in which the ranks of an attempt meet, and remove those of the run's earlier
    attempts.

    Args:
        folder: A folder on this host, on a file system with working locks.
        run: The run directory.
        attempt: The attempt's number.

    Returns:
        The new folder.

    Raises:
        NotOwnError: Somebody else made one of these, or a link of such a name.
        OSError: It cannot be made.
    """
    for left in folder.glob(f"{_prefix(run)}*"):
        if (distrust := distrust_of_folder(left)) is not None:
            raise NotOwnError(left, distrust)
        shutil.rmtree(left)
    return private_folder(_rendezvous_path(folder, run, attempt))


def _rendezvous_path(folder: Path, run: Path, attempt: int) -> Path:
    """Return the folder in which the ranks of an attempt meet; arguments as for
    ``make_rendezvous``.
    """
    return folder / f"{_prefix(run)}{attempt}"


def init_method(meeting: Path) -> str:
    """Return the address of a rendezvous as torch's ``init_process_group`` takes it."""
    return f"file://{meeting / 'store'}"


def _remove_rendezvous(meeting: Path) -> None:
    """Remove a rendezvous after its ranks have ended; one that is gone already is no error."""
    shutil.rmtree(meeting, ignore_errors=True)


def _prefix(run: Path) -> str:
    return f"rendezvous-{hashlib.sha256(bytes(run)).hexdigest()[:16]}-"


# The training processes as the supervisor holds them: their launch, the locks, and DeepSpeed's
# runner as a child process.


class Job:
    """One attempt's processes on this host. Starts what ``launch.json`` holds and writes
    ``command.json``.
    """

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
        self._locks: tuple[host_check.Lock, ...] = ()
        self._runner: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Take the GPUs, fill in the placeholders, and start DeepSpeed's launcher.

        The processes get the log's descriptor and the GPU locks themselves, so both outlive the
        supervisor for as long as they run.

        Raises:
            LockTakenError: Another run uses a GPU.
            HostDiffersError: This is not the host that was planned for.
            OSError: The process or a file could not be made.
        """
        folder = host_check.lock_folder()
        holder = host_check.Holder(run=str(self._run.path), pid=os.getpid())
        self._locks = host_check.take_gpus(folder, self._gpus(), holder)
        host = inspect_machine()
        refuse_different_host(self.launch, host)
        launch = self._resolved(folder)
        processes = command.apply(launch.environment, os.environ)
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
            {
                **others,
                Placeholder.RUN: str(self._run.path),
                Placeholder.RUN_ID: known_id(self._run),
                Placeholder.ATTEMPT: str(self._attempt),
                Placeholder.RENDEZVOUS: meeting,
            }
        )

    def take_over(self) -> None:
        """Take the locks of a supervisor that died, except those that its processes still hold.

        Raises:
            OSError: One could not be taken, such as because another run has it by now. The others
                are.
        """
        folder = host_check.lock_folder()
        self._rendezvous = _rendezvous_path(folder, self._run.path, self._attempt)
        holder = host_check.Holder(run=str(self._run.path), pid=os.getpid())
        lost: list[str] = []
        for gpu in self._gpus():
            try:
                self._locks = (*self._locks, *host_check.take_gpus(folder, [gpu], holder))
            except host_check.LockTakenError as error:
                if error.holder is None or error.holder.run != holder.run:
                    lost.append(str(error))
            except OSError as error:
                lost.append(str(error))
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
        """Return the runner's exit status (below 0 for a signal); None while it runs or if it was
        not our child.
        """
        return self._runner.poll() if self._runner else None

    def refresh_locks(self) -> None:
        """Show that the locks are in use.

        Raises:
            OSError: One was lost, such as to another run after its file had been removed. The
                others are refreshed.
        """
        holder = host_check.Holder(run=str(self._run.path), pid=os.getpid())
        kept: list[host_check.Lock] = []
        lost: list[str] = []
        for lock in self._locks:
            try:
                kept.append(host_check.refreshed(lock, holder))
            except (host_check.LockTakenError, OSError) as error:
                kept.append(lock)
                lost.append(str(error))
        self._locks = tuple(kept)
        if lost:
            raise OSError("; ".join(lost))

    def release(self) -> None:
        """Release the locks and remove the rendezvous."""
        if self._rendezvous is not None:
            _remove_rendezvous(self._rendezvous)
        for lock in self._locks:
            lock.release()
        self._locks = ()

    def _gpus(self) -> list[Gpu]:
        chosen = {rank.gpu for rank in self.launch.plan.binding}
        return [gpu for gpu in self.launch.machine.gpus if gpu.index in chosen]

    def _write_command(self, launch: Launch) -> None:
        shown = command.shown(launch.environment)
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
    """Let processes started in this block, and their children, ignore a signal until they install a
    handler of their own.

    A scheduler's warning reaches every process of a job. It would end DeepSpeed's runner and
    launcher, which do not handle it.
    """
    handler = signal.signal(signum, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signum, handler)


TICK_S = 1.0
LOG_LINES = 400
_START_TICK_S = 0.2
_LOG_TRIM_S = 5.0
_REFRESH_S = 20.0
"""How often locks are shown to be in use. Nothing that is younger than a minute counts as left
behind.
"""
_SWEEP_S = 5.0
"""How long the last processes are killed after the end. What survives SIGKILL for longer is stuck
in the kernel.
"""
_GIVES_UP = "Killing subprocess"
"""What DeepSpeed's launcher logs when a rank has failed and it ends the others."""


class HostSupervisor(ABC):
    """Watches the processes of one attempt on this host. Subclasses say what becomes of the run."""

    def __init__(self, run: RunDirectory, attempt: int, launch: Launch, nodes: Nodes) -> None:
        """Prepare to start a launch, or to watch what is left of it.

        Args:
            run: The run.
            attempt: The attempt.
            launch: What was prepared for this host.
            nodes: This host among those of the run.
        """
        self._run = run
        self._attempt = attempt
        self._here = this_host()
        self._host = self._here.name
        self._job = Job(run, attempt, self._host, launch, nodes)
        self._tree = ProcessTree(
            markers(run, attempt, nodes.node if nodes.count > 1 else None), os.getpid()
        )
        self._recorded: tuple[Process, ...] = ()
        self._first_loss = FirstLoss(self._tree)
        self._log = LogReader(run.log_path(attempt, self._host))
        self._last_lines: deque[str] = deque(maxlen=LOG_LINES)
        self._network = NetworkWatch(os.environ)
        self._shutdown = Shutdown()
        self._oom_kills_before = oom_kills()
        self._signal: signal.Signals | None = None
        self._refresh_due = time.monotonic() + _REFRESH_S
        self._trim_due = 0.0
        self._trouble: dict[str, int | None] = {}

    @abstractmethod
    def watch(self) -> int:
        """Run the attempt on this host from its start to its end. Return an exit code."""

    @abstractmethod
    def _look(self) -> bool:
        """Look at what decides whether the processes go on. Return whether this supervisor still
        acts for them.
        """

    @abstractmethod
    def _report(self) -> None:
        """Record what was seen."""

    @abstractmethod
    def _sampled(self, sample: Sample) -> None:
        """Take note of a sample, which has yet to be written."""

    @property
    def _acts(self) -> bool:
        """Whether this supervisor still acts for the processes."""
        return True

    @property
    def _watches(self) -> bool:
        """Whether there is anything to watch."""
        return bool(self._tree.alive) or self._job.running()

    @property
    def _started(self) -> set[int | None]:
        """Pids of the children that this supervisor has started itself, and collects where they are
        used.
        """
        return {self._job.runner_pid}

    def _follow(self) -> None:
        """Scan, record and act once a second, and whenever a process ends, until none is left."""
        sampler = Sampler(self._job.launch.machine, self._tree, self._attempt)
        samples: SampleWriter | None = None
        due = time.monotonic() + TICK_S
        try:
            while self._watches:
                self._tree.wait_for_loss(min(max(0.0, due - time.monotonic()), self._wait_s()))
                self._tick()
                if time.monotonic() < due:
                    continue
                due = time.monotonic() + TICK_S
                if self._acts:
                    with self._despite_errors_of("samples"):
                        sample = sampler.sample()
                        self._sampled(sample)
                        samples = samples or SampleWriter(self._run, self._host)
                        samples.append(sample)
        finally:
            sampler.close()
            with self._despite_errors_of("samples"):
                if samples is not None:
                    samples.close()

    def _wait_s(self) -> float:
        """Return how long to wait for a loss. Until all ranks are known it is short: one that dies
        early must be seen to be cleaned up.
        """
        seen = sum(process.role == "rank" for process in (*self._tree.alive, *self._tree.gone))
        return TICK_S if seen >= len(self._job.launch.plan.binding) else _START_TICK_S

    def _tick(self) -> None:
        before = set(self._tree.alive)
        # In this order, so that everything a process wrote is read after the process was seen to be
        # gone.
        self._tree.scan()
        reap_orphans(
            {*self._started, *(process.pid for process in self._tree.alive)}
        )  # after the scan, which reads their exit codes
        with self._despite_errors_of("records"):
            self._read()
        self._check_losses(before)
        if not self._look():
            return
        self._act()
        if time.monotonic() >= self._refresh_due:
            self._refresh_due = time.monotonic() + _REFRESH_S
            with self._despite_errors_of("locks"):
                self._refresh_locks()
        with self._despite_errors_of("log"):
            self._trim()
        self._report()

    def _read(self) -> None:
        self._take_lines(self._log.poll())

    def _take_lines(self, lines: tuple[str, ...]) -> None:
        self._last_lines.extend(lines)
        if self._shutdown.terminated_at is None and any(_GIVES_UP in line for line in lines):
            # The launcher has just sent SIGTERM to the ranks. A second one would interrupt their
            # handling of the first.
            self._shutdown.terminated_at = time.monotonic()
        if self._network.missing(lines) and self._shutdown.broken_at is None:
            self._shutdown.broken_at = time.monotonic()

    def _check_losses(self, before: set[Process]) -> None:
        lost = self._first_loss.update(before, ending=self._shutdown.terminated_at is not None)
        if self._shutdown.broken_at is None and any(process.role != "rank" for process in lost):
            self._shutdown.broken_at = time.monotonic()

    def _refresh_locks(self) -> None:
        self._job.refresh_locks()

    def _act(self) -> None:
        action = self._shutdown.next_action(time.monotonic())
        if action != "wait":
            self._signal_all(signal.SIGTERM if action == "terminate" else signal.SIGKILL)

    def _signal_all(self, signum: signal.Signals) -> None:
        with self._despite_errors_of("signals to processes"):
            self._tree.signal(signum)

    def _trim(self) -> None:
        if time.monotonic() >= self._trim_due:
            trim_log(self._run.log_path(self._attempt, self._host))
            self._trim_due = time.monotonic() + _LOG_TRIM_S

    def _sweep(self) -> None:
        """End marked processes that were missed, and remove the shared memory that killed processes
        leave behind.
        """
        deadline = time.monotonic() + _SWEEP_S
        self._tree.scan(thorough=True)
        while self._tree.alive and time.monotonic() < deadline:
            self._signal_all(signal.SIGKILL)
            time.sleep(0.1)
            self._tree.scan()
        with self._despite_errors_of("shared memory"):
            remove_leftovers({*self._tree.gone, *self._recorded})
        with self._despite_errors_of("records"):
            self._read()
            deadline = (
                time.monotonic() + _SWEEP_S
            )  # a process that nobody could end may write without end
            while self._log.behind and time.monotonic() < deadline:  # the last lines say why
                self._take_lines(self._log.poll())

    def _evidence(self) -> Evidence:
        """Return what this host alone shows."""
        return Evidence(
            runner_status=self._job.status(),
            first_lost=self._first_loss.process,
            first_lost_code=self._first_loss.exit_code,
            unprompted=self._first_loss.unprompted,
            missing_network=self._network.missing_name,
            oom_kills=oom_kills() - self._oom_kills_before,
            disk_full=self._disk_full(),
            log=tuple(self._last_lines),
        )

    def _disk_full(self) -> bool:
        return any(trouble in FULL for trouble in self._trouble.values())

    def _install_signals(self) -> None:
        """Note signals, so that the next tick can ask the run to stop, and the trainer saves and
        ends.
        """

        def ask(signum: int, _frame: FrameType | None) -> None:
            self._signal = signal.Signals(signum)

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, ask)
        # Not SIG_IGN, because the training processes would inherit that.
        signal.signal(signal.SIGHUP, lambda *_: None)
        # Where whoever started this ignores it, nobody below could tell how a child ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    @contextlib.contextmanager
    def _despite_errors_of(self, what: str) -> Iterator[None]:
        """Report an error of a full or broken file system once and continue: giving up would leave
        the processes without supervision.

        So would a refusal to follow a link, where the run's folder has been moved.
        """
        try:
            yield
        except (OSError, Refused) as error:
            number = error.errno if isinstance(error, OSError) else None
            if what not in self._trouble or self._trouble[what] != number:
                with contextlib.suppress(OSError):  # our log may be on the same full disk
                    print(f"{what} of {self._run.path}: {error}", file=sys.stderr, flush=True)
            self._trouble[what] = number
        else:
            self._trouble.pop(what, None)
