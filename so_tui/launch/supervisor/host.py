"""The processes of a run on one host: how its supervisor starts, watches, samples and ends them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import Environment
from so_tui.launch import command
from so_tui.launch.command import log_line
from so_tui.launch.supervisor import host_check
from so_tui.launch.supervisor.ending import Evidence, Shutdown
from so_tui.launch.supervisor.host_check import chosen_gpus, refuse_different_host
from so_tui.launch.supervisor.processes import (
    Loss,
    ProcessTree,
    markers,
)
from so_tui.launch.supervisor.samples import Sampler, oom_kills
from so_tui.launch.supervisor.slowness import missing_network
from so_tui.machine import inspect_machine
from so_tui.machine.software import make_code_folders
from so_tui.plan.plan import Binding, Launch, Plan
from so_tui.runs.directory import RunDirectory, known_id, write_run_file, write_run_json
from so_tui.runs.liveness import this_host
from so_tui.runs.lock import RunLock
from so_tui.runs.reader import LogReader, trim_log
from so_tui.runs.records import Sample
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import FULL
from so_tui.spec import Refused
from so_tui.trust.files import NotOwnError, distrust_of_folder
from so_tui.trust.folders import private_folder
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


def nodes_of_job(environ: Environment) -> Nodes:
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


def numbered(binding: Binding, node: int) -> Binding:
    """Return a host's bindings with the numbers that its ranks have among those of all nodes."""
    return tuple(replace(rank, rank=rank.rank + node * len(binding)) for rank in binding)


def hostfile(nodes: Nodes, plan: Plan) -> str:
    """Return a file of nodes for DeepSpeed's launcher. Without ssh their names mean nothing, and
    only this node's slots are GPUs.
    """
    return "".join(
        f"node{node} slots={1 + max(_devices(nodes, plan, node))}\n" for node in range(nodes.count)
    )


def node_values(nodes: Nodes, plan: Plan, hostfile: str) -> dict[str, str]:
    """Return the values of the placeholders that only a run on several nodes has.

    Args:
        nodes: The nodes.
        plan: This node's plan.
        hostfile: The path of its file of nodes.
    """
    return {
        "{NODE}": str(nodes.node),
        "{ADDRESS}": nodes.address,
        "{PORT}": str(nodes.port),
        "{HOSTFILE}": hostfile,
        "{DEVICES}": "@".join(
            f"node{node}:{','.join(map(str, _devices(nodes, plan, node)))}"
            for node in range(nodes.count)
        ),
    }


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
    for left in folder.glob(_rendezvous_path(folder, run, "*").name):
        if (distrust := distrust_of_folder(left)) is not None:
            raise NotOwnError(left, distrust)
        shutil.rmtree(left)
    return private_folder(_rendezvous_path(folder, run, attempt))


def _rendezvous_path(folder: Path, run: Path, attempt: int | Literal["*"]) -> Path:
    """Return the folder in which the ranks of an attempt meet, or the pattern of all attempts;
    arguments as for ``make_rendezvous``.
    """
    return folder / f"rendezvous-{hashlib.sha256(bytes(run)).hexdigest()[:16]}-{attempt}"


def init_method(meeting: Path) -> str:
    """Return the address of a rendezvous as torch's ``init_process_group`` takes it."""
    return f"file://{meeting / 'store'}"


TICK_S = 1.0
LOG_LINES = 400
_START_TICK_S = 0.2
_LOG_TRIM_S = 5.0
_REFRESH_S = 20.0
"""How often locks are shown to be in use. Nothing that is younger than a minute counts as left
behind.
"""
_SWEEP_S = 5.0
"""How long the last processes are killed after the end. A process that survives SIGKILL for longer
is stuck in the kernel.
"""
_GIVES_UP = "Killing subprocess"
"""What DeepSpeed's launcher logs when a rank has failed and it ends the others."""


class Host:
    """The processes of one attempt on this host: starts, watches, samples and ends them for the
    supervisor that owns it.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        launch: Launch,
        digest: str,
        nodes: Nodes,
        lock: RunLock | None = None,
    ) -> None:
        """Prepare to start a launch, or to watch what is left of it.

        Args:
            run: The run.
            attempt: The attempt.
            launch: What was prepared for this host.
            digest: Its hash, if it is to be started.
            nodes: This host among those of the run.
            lock: The run's, if this host's supervisor holds it.
        """
        self._run = run
        self._attempt = attempt
        self._run_lock = lock
        self.name = this_host().name
        self.launch = launch
        self._digest = digest
        self._nodes = nodes
        self._rendezvous: Path | None = None
        self._locks: tuple[host_check.Lock, ...] = ()
        self._runner: subprocess.Popen[bytes] | None = None
        self.tree = ProcessTree(
            markers(run, attempt, nodes.node if nodes.count > 1 else None), os.getpid()
        )
        self.first_loss: Loss | None = None
        """The first of runner, launcher and ranks that ended: the cause of what follows."""
        self.shutdown = Shutdown()
        self.signal: signal.Signals | None = None
        """The last signal that this process received and has not acted upon."""
        self.handed_over = False
        """Whether another supervisor watches the same processes."""
        self._log = LogReader(run.log_path(attempt, self.name))
        self._last_lines: deque[str] = deque(maxlen=LOG_LINES)
        self._missing_network = ""
        self._oom_kills_before = oom_kills()
        self._refresh_due = time.monotonic() + _REFRESH_S
        self._trim_due = 0.0
        self._trouble: dict[str, int | None] = {}

    def start(self) -> None:
        """Take the GPUs, fill in the placeholders, and start DeepSpeed's launcher.

        The processes get the log's descriptor and the GPU locks themselves, so both outlive the
        supervisor for as long as they run.

        Raises:
            LockTakenError: Another run uses a GPU.
            HostDiffersError: This is not the host that was planned for.
            OSError: The process or a file could not be made.
        """
        self._locks = host_check.take_gpus(chosen_gpus(self.launch), str(self._run.path))
        refuse_different_host(self.launch, inspect_machine())
        launch = self._resolved()
        processes = command.apply(launch.environment, os.environ)
        processes |= make_code_folders(processes)
        self._write_command(launch)
        path = self._run.log_path(self._attempt, self.name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        # A scheduler's warning reaches every process of a job. It would end DeepSpeed's runner and
        # launcher, which do not handle it; ranks install a handler.
        warned = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            with os.fdopen(os.open(path, flags, 0o640), "ab") as log:
                self._runner = subprocess.Popen(
                    launch.argv,
                    env=processes,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._run.at,
                    pass_fds=[lock.descriptor for lock in self._locks],
                    process_group=0,
                )
        finally:
            signal.signal(signal.SIGUSR1, warned)

    def _resolved(self) -> Launch:
        """Make what the ranks need to meet, and return the launch with this host's values."""
        if self._nodes.count == 1:
            self._rendezvous = make_rendezvous(
                host_check.lock_folder(), self._run.path, self._attempt
            )
            meeting, others = init_method(self._rendezvous), {}
        else:
            listed = self._run.hostfile_path(self._attempt, self._nodes.node)
            write_run_file(self._run, listed, hostfile(self._nodes, self.launch.plan).encode())
            meeting, others = (
                self._nodes.init_method,
                node_values(self._nodes, self.launch.plan, str(self._run.named(listed))),
            )
        return self.launch.resolved(
            {
                **others,
                "{RUN}": str(self._run.path),
                "{RUN_ID}": known_id(self._run),
                "{LAUNCH}": self._digest,
                "{ATTEMPT}": str(self._attempt),
                "{RENDEZVOUS}": meeting,
            }
        )

    def take_over(self) -> None:
        """Take the locks of a supervisor that died, except those that its processes still hold, or
        that another run has taken. Living processes are watched in any case.
        """
        path = self._run.path
        with self.despite_errors_of("rendezvous"):
            self._rendezvous = _rendezvous_path(host_check.lock_folder(), path, self._attempt)
        for gpu in chosen_gpus(self.launch):
            with self.despite_errors_of(f"the lock of GPU {gpu.index}"):
                try:
                    self._locks += host_check.take_gpus([gpu], str(path))
                except host_check.LockTakenError as error:
                    if error.holder.run != str(path):
                        raise

    def running(self) -> bool:
        """Return whether DeepSpeed's runner is alive, as far as it is our child."""
        return self._runner is not None and self.status() is None

    def status(self) -> int | None:
        """Return the runner's exit status (below 0 for a signal); None while it runs or if it was
        not our child.
        """
        return self._runner.poll() if self._runner else None

    def release(self) -> None:
        """Release the locks and remove the rendezvous."""
        if self._rendezvous is not None:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
        for lock in self._locks:
            lock.release()
        self._locks = ()

    def _write_command(self, launch: Launch) -> None:
        shown = command.shown(launch.environment)
        record = {
            "argv": launch.argv,
            "host": self.name,
            "started": time.time(),
            "environment": [
                {"name": change.name, "value": shown[change.name], "reason": change.reason}
                for change in launch.environment
            ],
            "inherited": recordable(os.environ),
        }
        write_run_json(
            self._run,
            self._run.command_path(self._attempt, self._nodes.node),
            record,
            indented=True,
        )

    def follow(self, tick: Callable[[], bool], take: Callable[[Sample], None]) -> None:
        """Scan once a second, and whenever a process ends, until none is left.

        Args:
            tick: Acts after each scan; returns whether the host is still sampled.
            take: Takes note of a sample, which has yet to be written.
        """
        with self.despite_errors_of("log"):  # another supervisor may have begun it
            self._take_lines(self._log.tail(LOG_LINES))
        sampler = Sampler(self.launch.machine, self.tree, self._attempt)
        samples: SampleWriter | None = None
        due = time.monotonic() + TICK_S
        try:
            while not self.handed_over and (self.tree.alive or self.running()):
                self.tree.wait_for_loss(min(max(0.0, due - time.monotonic()), self._wait_s()))
                self._scan()
                acts = tick()
                if time.monotonic() < due:
                    continue
                due = time.monotonic() + TICK_S
                if acts:
                    with self.despite_errors_of("samples"):
                        sample = sampler.sample()
                        take(sample)
                        samples = samples or SampleWriter(self._run, self.name)
                        samples.append(sample)
        finally:
            sampler.gpus.close()
            with self.despite_errors_of("samples"):
                if samples is not None:
                    samples.close()

    def reap(self, *kept: int | None) -> None:
        """Collect ended children, which would stay zombies: a subreaper's orphans. Call it after a
        scan, which reads their exit codes.

        Args:
            kept: Pids of children that another process collects. One that has ended may let
                others wait until it is collected.
        """
        known = {self._runner.pid if self._runner else None, *kept}
        known |= {process.pid for process in self.tree.alive}
        looks = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (ended := os.waitid(os.P_ALL, 0, looks)) and ended.si_pid not in known:
                os.waitpid(ended.si_pid, 0)

    def act(self) -> None:
        """End the processes if it is time, show that the locks are in use, and keep the log
        short.
        """
        now = time.monotonic()
        if (signum := self.shutdown.next_signal(now)) is not None:
            self.signal_all(signum)
        if now >= self._refresh_due:
            self._refresh_due = now + _REFRESH_S
            locks: tuple[RunLock | host_check.Lock | None, ...] = (self._run_lock, *self._locks)
            for number, lock in enumerate(locks):
                with self.despite_errors_of(f"lock {number}"):
                    if lock is not None:
                        lock.refresh()
        if now >= self._trim_due:
            with self.despite_errors_of("log"):
                trim_log(self._run.log_path(self._attempt, self.name))
                self._trim_due = now + _LOG_TRIM_S

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to every process of the run."""
        with self.despite_errors_of("signals to processes"):
            self.tree.signal(signum)

    def sweep(self) -> None:
        """End marked processes that were missed, and read the last lines of the log, which say
        why.
        """
        deadline = time.monotonic() + _SWEEP_S
        self.tree.scan(thorough=True)
        while self.tree.alive and time.monotonic() < deadline:
            self.signal_all(signal.SIGKILL)
            time.sleep(0.1)
            self.tree.scan()
        with self.despite_errors_of("output"):
            self._take_lines(self._log.poll())
            # A process that nobody could end may write without end.
            deadline = time.monotonic() + _SWEEP_S
            while self._log.behind and time.monotonic() < deadline:
                self._take_lines(self._log.poll())

    def evidence(self) -> Evidence:
        """Return what this host alone shows."""
        return Evidence(
            runner_status=self.status(),
            first_loss=self.first_loss,
            missing_network=self._missing_network,
            oom_kills=oom_kills() - self._oom_kills_before,
            disk_full=self.disk_full,
            log=tuple(self._last_lines),
        )

    @property
    def disk_full(self) -> bool:
        """Whether the disk of the run accepts nothing more."""
        return any(trouble in FULL for trouble in self._trouble.values())

    def install_signals(self) -> None:
        """Note signals, so that the next tick can ask the run to stop, and the trainer saves and
        ends.
        """

        def ask(signum: int, _frame: FrameType | None) -> None:
            self.signal = signal.Signals(signum)

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, ask)
        # Not SIG_IGN, because the training processes would inherit that.
        signal.signal(signal.SIGHUP, lambda *_: None)
        # Where whoever started this ignores it, nobody below could tell how a child ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    @contextlib.contextmanager
    def despite_errors_of(self, what: str) -> Iterator[None]:
        """Report an error of a full or broken file system once and continue: giving up would leave
        the processes without supervision.

        So would a refusal to follow a link, where the run's folder has been moved.
        """
        try:
            yield
        except (OSError, Refused) as error:
            number = error.errno if isinstance(error, OSError) else None
            if what not in self._trouble or self._trouble[what] != number:
                log_line(f"{what} of {self._run.path}: {error}")
            self._trouble[what] = number
        else:
            self._trouble.pop(what, None)

    def _wait_s(self) -> float:
        """Return how long to wait for a loss. Until all ranks are known it is short: one that dies
        early must be seen to be cleaned up.
        """
        seen = sum(process.role == "rank" for process in (*self.tree.alive, *self.tree.gone))
        return TICK_S if seen >= len(self.launch.plan.binding) else _START_TICK_S

    def _scan(self) -> None:
        """Look at the processes, then at what they wrote: all of it is read after a process was
        seen to be gone.
        """
        lost = self.tree.scan()
        with self.despite_errors_of("output"):
            self._take_lines(self._log.poll())
        if lost and self.first_loss is None:
            self.first_loss = Loss(
                lost[0], self.tree.gone[lost[0]], self.shutdown.terminated_at is None
            )
        if any(process.role != "rank" for process in lost):
            self.shutdown.broken = True

    def _take_lines(self, lines: tuple[str, ...]) -> None:
        self._last_lines.extend(lines)
        if self.shutdown.terminated_at is None and any(_GIVES_UP in line for line in lines):
            # The launcher has just sent SIGTERM to the ranks. A second one would interrupt their
            # handling of the first.
            self.shutdown.terminated_at = time.monotonic()
        if missing := missing_network(lines, os.environ):
            self._missing_network, self.shutdown.broken = missing, True
