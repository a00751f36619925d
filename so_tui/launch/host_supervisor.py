"""What the supervisors of all nodes of a run do alike: start the processes of their host, watch, sample and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from types import FrameType

from so_tui.launch.job import Job
from so_tui.launch.marker import markers
from so_tui.launch.network import NetworkWatch
from so_tui.launch.nodes import Nodes
from so_tui.launch.outcome import Evidence
from so_tui.launch.preparation import Launch
from so_tui.launch.processes import FirstLoss, ProcessTree, reap_orphans
from so_tui.launch.sampler import Sampler, oom_kills
from so_tui.launch.shutdown import Shutdown
from so_tui.runs.directory import RunDirectory
from so_tui.runs.host import this_host
from so_tui.runs.leftovers import remove_leftovers
from so_tui.runs.log import LogReader, trim_log
from so_tui.runs.records import Process
from so_tui.runs.sample import Sample
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import FULL
from so_tui.spec import Refused

TICK_S = 1.0
LOG_LINES = 400
_START_TICK_S = 0.2
_LOG_TRIM_S = 5.0
_REFRESH_S = 20.0
"""How often locks are shown to be in use. Nothing that is younger than a minute counts as left behind."""
_SWEEP_S = 5.0
"""How long the last processes are killed after the end. What survives SIGKILL for longer is stuck in the kernel."""
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
        """Look at what decides whether the processes go on. Return whether this supervisor still acts for them."""

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
        """Pids of the children that this supervisor has started itself, and collects where they are used."""
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
        """Return how long to wait for a loss. Until all ranks are known it is short: one that dies early must be seen to be cleaned up."""
        seen = sum(process.role == "rank" for process in (*self._tree.alive, *self._tree.gone))
        return TICK_S if seen >= len(self._job.launch.plan.binding) else _START_TICK_S

    def _tick(self) -> None:
        before = set(self._tree.alive)
        # In this order, so that everything a process wrote is read after the process was seen to be gone.
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
            # The launcher has just sent SIGTERM to the ranks. A second one would interrupt their handling of the first.
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
        """End marked processes that were missed, and remove the shared memory that killed processes leave behind."""
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
        """Note signals, so that the next tick can ask the run to stop, and the trainer saves and ends."""

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
        """Report an error of a full or broken file system once and continue: giving up would leave the processes without supervision.

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
