"""The supervisor: one light process for each run and host that starts the training processes, watches them, and ends what they leave.

The trainer's log and metrics do not pass through it, so training continues if it is killed, and another supervisor takes over from the
record in ``state.json``. It is the only writer of the state and of this host's samples.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from types import FrameType

import msgspec

from so_tui.launch import locks, run_state
from so_tui.launch.alert_watch import remembered
from so_tui.launch.announcer import Announcer
from so_tui.launch.evidence import failures_in, not_started, with_advice
from so_tui.launch.job import Job
from so_tui.launch.marker import markers
from so_tui.launch.outcome import Evidence, Outcome, conclude
from so_tui.launch.outcome_text import RunFacts, outcome_text
from so_tui.launch.processes import FirstLoss, ProcessTree
from so_tui.launch.sampler import Sampler, oom_kills
from so_tui.launch.shutdown import Shutdown, StopRequest, request_stop, stop_request
from so_tui.launch.slow_watch import SlowWatch
from so_tui.runs.directory import RunDirectory, deleted
from so_tui.runs.host import this_host
from so_tui.runs.leftovers import remove_leftovers
from so_tui.runs.liveness import identify
from so_tui.runs.log import LogReader, trim_log
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import MetricRecord, RunState
from so_tui.runs.run_lock import RunLock
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import FULL, read_state, write_last_state, write_state
from so_tui.spec import InputError, SoTuiError

TICK_S = 1.0
_START_TICK_S = 0.2
_LOG_TRIM_S = 5.0
_LOG_LINES = 400
_REFRESH_S = 20.0
"""How often locks are shown to be in use. Nothing that is younger than a minute counts as left behind."""
_SWEEP_S = 5.0
"""How long the last processes are killed after the end. What survives SIGKILL for longer is stuck in the kernel."""
_DELETED_S = 10.0
"""How long the run directory may be missing before it counts as deleted. A network file system may lose it for a moment."""
_GIVES_UP = "Killing subprocess"
"""What DeepSpeed's launcher logs when a rank has failed and it ends the others."""


class Supervisor:
    """Watches one attempt on this host."""

    def __init__(self, run: RunDirectory, attempt: int, found: RunState, lock: RunLock) -> None:
        self._run = run
        self._attempt = attempt
        self._lock = lock
        self._here = this_host()
        self._host = self._here.name
        self._superseded = False
        self._handed_over = False
        self._refresh_due = time.monotonic() + _REFRESH_S
        self._job = Job(run, attempt, self._host)
        # A state of this attempt: its supervisor has died, and the processes it started may still be alive.
        self._takes_over = found.attempt == attempt
        self._recorded = found.processes if self._takes_over else ()
        self._state = self._first_state(found)
        self._tree = ProcessTree(markers(run, attempt), os.getpid())
        self._first_loss = FirstLoss(self._tree)
        self._reader = MetricsReader(run)
        self._log = LogReader(run.log_path(attempt, self._host))
        self._last_lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._shutdown = Shutdown()
        self._stop: StopRequest | None = None
        self._gone_unseen = False
        self._heartbeat_at: float | None = None
        self._oom_kills_before = oom_kills()
        self._signal: signal.Signals | None = None
        self._trim_due = 0.0
        self._directory_seen_at = time.monotonic()
        self._trouble: dict[str, int | None] = {}
        self._records: list[MetricRecord] = []
        self._slow = SlowWatch(self._job.launch.plan, self._job.launch.machine, attempt)
        checkpoints = self._job.launch.spec.checkpoint.folder
        self._announcer = Announcer(run, attempt, self._host, checkpoints)

    def watch(self) -> int:
        """Run the attempt from its start to its end. Return the run's exit code."""
        self._install_signals()
        heartbeat_at = self._run.state_path.stat().st_mtime
        write_state(self._run, self._state)
        try:
            self._job.take_over() if self._takes_over else self._job.start()
        except (locks.LockTakenError, SoTuiError, OSError) as error:
            return self._finish(not_started(error))
        self._tree.scan(thorough=self._takes_over)
        self._gone_unseen = self._takes_over and not self._tree.alive
        self._heartbeat_at = heartbeat_at if self._gone_unseen else None
        self._take_lines(self._log.tail(_LOG_LINES))
        self._follow()
        if self._handed_over:
            return 0  # the other supervisor watches the same processes
        self._sweep()
        return self._finish(conclude(self._evidence()))

    def _follow(self) -> None:
        """Scan, record and act once a second, and whenever a process ends, until none is left."""
        sampler = Sampler(self._job.launch.machine, self._tree, self._attempt)
        samples = SampleWriter(self._run, self._host)
        due = time.monotonic() + TICK_S
        try:
            while (self._tree.alive or self._job.running()) and not self._handed_over:
                self._tree.wait_for_loss(min(max(0.0, due - time.monotonic()), self._wait_s()))
                self._tick()
                if time.monotonic() >= due and not self._superseded:
                    due = time.monotonic() + TICK_S
                    with self._despite_errors_of("samples"):
                        sample = sampler.sample()
                        self._slow.sample(sample)
                        self._announcer.publish(self._state, self._reader.latest, sample)
                        samples.append(sample)
        finally:
            sampler.close()
            with self._despite_errors_of("samples"):
                samples.close()

    def _wait_s(self) -> float:
        """Return how long to wait for a loss. Until ranks are known it is short: one that dies early must be seen to be cleaned up."""
        seen = any(process.role == "rank" for process in (*self._tree.alive, *self._tree.gone))
        return TICK_S if seen else _START_TICK_S

    def _tick(self) -> None:
        before = {process.pid for process in self._tree.alive}
        # In this order, so that everything a process wrote is read after the process was seen to be gone.
        self._tree.scan()
        with self._despite_errors_of("records"):
            self._read()
        self._check_losses(before)
        self._check_superseded()
        if self._superseded:
            return
        with self._despite_errors_of("control"):
            self._check_stop_request()
        self._check_directory()
        self._act()
        self._refresh_locks()
        with self._despite_errors_of("log"):
            self._trim()
        self._state = run_state.observed(self._state, self._reader, self._attempt)
        if self._stop is not None:
            self._state = msgspec.structs.replace(self._state, detail=self._state.detail or "asked to stop")
        self._look_at_records()
        beat, slowdown = self._state.heartbeat + 1, self._slow.found
        self._state = msgspec.structs.replace(self._state, heartbeat=beat, processes=self._tree.alive, slowdown=slowdown)
        self._write_state()

    def _look_at_records(self) -> None:
        records, self._records = self._records, []
        self._slow.take(records)
        with self._despite_errors_of("alerts"):
            new = self._announcer.tick(self._state, records, full=self._disk_full())
            self._state = msgspec.structs.replace(self._state, alerts=remembered(self._state.alerts, new))

    def _disk_full(self) -> bool:
        return any(trouble in FULL for trouble in self._trouble.values())

    def _read(self) -> None:
        # Earlier segments are read on at each tick: a resumed run may have gigabytes of them, and the heartbeat must not wait.
        behind = True
        while behind:
            progress = self._reader.poll(limit_records=10_000, limit_s=0.2)
            self._records += progress.records
            behind = progress.behind
        self._take_lines(self._log.poll())
        if self._shutdown.ended_at is None and run_state.end_record(self._reader, self._attempt) is not None:
            self._shutdown.ended_at = time.monotonic()

    def _take_lines(self, lines: tuple[str, ...]) -> None:
        self._last_lines.extend(lines)
        if self._shutdown.terminated_at is None and any(_GIVES_UP in line for line in lines):
            # The launcher has just sent SIGTERM to the ranks. A second one would interrupt their handling of the first.
            self._shutdown.terminated_at = time.monotonic()

    def _check_losses(self, before: set[int]) -> None:
        lost = self._first_loss.update(before, ending=self._shutdown.terminated_at is not None)
        if self._shutdown.broken_at is None and any(process.role != "rank" for process in lost):
            self._shutdown.broken_at = time.monotonic()

    def _check_stop_request(self) -> None:
        if self._signal:
            request_stop(self._run, reason=f"the supervisor received {self._signal.name}", warned=self._signal is signal.SIGUSR1)
            self._signal = None
        asked = stop_request(self._run)
        if asked is not None:
            self._stop = asked
            saved = self._reader.checkpoints[-1].step if self._reader.checkpoints else None
            self._shutdown.stop(asked, saved, time.monotonic())

    def _check_directory(self) -> None:
        """End a run whose directory was deleted: it can be neither seen nor stopped, and would save into a folder that is no run."""
        now = time.monotonic()
        if not deleted(self._run):
            self._directory_seen_at = now
        elif self._shutdown.broken_at is None and now - self._directory_seen_at > _DELETED_S:
            print(f"{self._run.path} has been deleted: ending its processes", file=sys.stderr)
            self._shutdown.broken_at = now

    def _check_superseded(self) -> None:
        """Stop acting for a run that another supervisor has taken over because it counted as lost, and end what a newer attempt repeats."""
        try:
            found = read_state(self._run)
        except (InputError, OSError):
            return  # deleted, or its file system is away: neither says who supervises it
        if not run_state.superseded(self._state, found):
            return
        if not self._superseded:
            print(f"{self._run.path} is supervised by another process now: attempt {found.attempt} on {found.host}", file=sys.stderr)
            self._superseded, self._handed_over = True, found.attempt == self._attempt
        if not self._handed_over:
            self._signal_all(signal.SIGKILL)

    def _refresh_locks(self) -> None:
        if time.monotonic() >= self._refresh_due:
            self._refresh_due = time.monotonic() + _REFRESH_S
            with self._despite_errors_of("locks"):
                self._lock.refresh()
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

    def _evidence(self) -> Evidence:
        overdue = self._stop is not None and self._shutdown.stop_overdue(time.monotonic())
        return Evidence(
            end=run_state.end_record(self._reader, self._attempt),
            failures=failures_in(self._run.attempt_dir(self._attempt)),
            runner_status=self._job.status(),
            first_lost=self._first_loss.process,
            first_lost_code=self._first_loss.exit_code,
            unprompted=self._first_loss.unprompted,
            stop_overdue_s=self._stop.grace_s if self._stop is not None and overdue else None,
            gone_unseen=self._gone_unseen,
            oom_kills=oom_kills() - self._oom_kills_before,
            disk_full=self._disk_full(),
            log=tuple(self._last_lines),
        )

    def _finish(self, outcome: Outcome) -> int:
        state = run_state.observed(self._state, self._reader, self._attempt)
        launch, known = self._job.launch, RunFacts(name=self._run.name, saved_step=state.saved_step)
        facts = with_advice(outcome, launch.spec, known, launch.plan.optional)
        ended = time.time() if self._heartbeat_at is None else run_state.last_alive(self._reader, self._attempt, self._heartbeat_at)
        self._state = run_state.final_state(state, outcome, outcome_text(outcome, facts), ended)
        if not deleted(self._run) and not self._superseded:
            with self._despite_errors_of("alerts"):
                new = self._announcer.end(self._state)
                self._state = msgspec.structs.replace(self._state, alerts=remembered(self._state.alerts, new))
            with self._despite_errors_of("state"):
                write_last_state(self._run, self._state)
        self._job.release()
        self._announcer.finish()
        return outcome.run_exit_code

    def _first_state(self, found: RunState) -> RunState:
        supervisor = identify(os.getpid(), "supervisor")
        if self._takes_over:
            here = self._here
            return msgspec.structs.replace(
                found,
                supervisor=supervisor,
                host=here.name,
                boot_id=here.boot_id,
                pid_namespace=here.pid_namespace,
                heartbeat=found.heartbeat + 1,
            )
        return run_state.first_state(
            self._run.name,
            self._attempt,
            self._here,
            supervisor,
            found,
            forced=self._job.launch.forced,
            start_over=self._job.launch.start_over,
            checks_s=self._job.launch.checks_s,
        )

    def _install_signals(self) -> None:
        """Treat a signal to us as a request to stop the run: the next tick records it, and the trainer saves and ends."""

        def ask(signum: int, _frame: FrameType | None) -> None:
            self._signal = signal.Signals(signum)

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, ask)
        # Not SIG_IGN, because the training processes would inherit that.
        signal.signal(signal.SIGHUP, lambda *_: None)

    def _write_state(self) -> None:
        """Write the state, except into a deleted run directory: that would look like a run, or prevent the deletion."""
        if not deleted(self._run) and not self._superseded:
            with self._despite_errors_of("state"):
                try:
                    write_state(self._run, self._state)
                except OSError:
                    os.utime(self._run.state_path)  # on a full disk: other hosts judge by its age whether we live
                    raise

    @contextlib.contextmanager
    def _despite_errors_of(self, what: str) -> Iterator[None]:
        """Report an error of a full or broken file system once and continue: giving up would leave the processes without supervision."""
        try:
            yield
        except OSError as error:
            if self._trouble.get(what) != error.errno:
                with contextlib.suppress(OSError):  # our log may be on the same full disk
                    print(f"{what} of {self._run.path}: {error}", file=sys.stderr, flush=True)
            self._trouble[what] = error.errno
        else:
            self._trouble.pop(what, None)
