"""The supervisor: one light process for each run and host that starts the training processes, watches them, and ends what they leave.

The trainer's log and metrics do not pass through it, so training continues if it is killed, and another supervisor takes over from the
record in ``state.json``. It is the only writer of the state and of this host's samples.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from so_tui.launch import locks, run_state
from so_tui.launch.host_check import HostDiffersError
from so_tui.launch.job import Job
from so_tui.launch.outcome import Evidence, Failure, Outcome, conclude
from so_tui.launch.outcome_text import RunFacts, outcome_text
from so_tui.launch.processes import FirstLoss, ProcessTree, become_subreaper
from so_tui.launch.sampler import Sampler, oom_kills, shm_leftovers
from so_tui.launch.shutdown import Shutdown, StopRequest, request_stop, stop_request
from so_tui.plan.alternatives import less_gpu_memory, less_host_memory
from so_tui.runs.directory import RunDirectory, deleted
from so_tui.runs.liveness import identify
from so_tui.runs.log import LogReader, trim_log
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import FULL, read_state, write_last_state, write_state
from so_tui.spec import RunSpec, SoTuiError
from so_tui.trust.sharing import umask_of

TICK_S = 1.0
_START_TICK_S = 0.2
_LOG_TRIM_S = 5.0
_LOG_LINES = 400
_SWEEP_S = 5.0
"""How long the last processes are killed after the end. What survives SIGKILL for longer is stuck in the kernel."""
_DELETED_S = 10.0
"""How long the run directory may be missing before it counts as deleted. A network file system may lose it for a moment."""
_GIVES_UP = "Killing subprocess"
"""What DeepSpeed's launcher logs when a rank has failed and it ends the others."""


def supervise(run: RunDirectory, attempt: int) -> int:
    """Start the attempt, or take over one whose supervisor has died, and watch it to its end. Return the run's exit code.

    Return 0 immediately if the run has another supervisor. Raises OSError if the run directory cannot be written.
    """
    os.umask(umask_of(run.path))
    with locks.supervisor_lock(run) as held:
        if not held:
            return 0
        state = read_state(run)
        if state.attempt == attempt and state.state in FINAL_STATES:
            return state.exit_code or 0
        become_subreaper()
        return Supervisor(run, attempt, state).watch()


class Supervisor:
    """Watches one attempt on this host."""

    def __init__(self, run: RunDirectory, attempt: int, found: RunState) -> None:
        self._run = run
        self._attempt = attempt
        self._host = socket.gethostname()
        self._job = Job(run, attempt, self._host)
        # A state of this attempt with a supervisor: that one has died, and the processes it started may still be alive.
        self._takes_over = found.attempt == attempt and found.supervisor is not None
        self._state = self._first_state(found)
        self._tree = ProcessTree(self._job.marker, os.getpid(), found.processes if self._takes_over else ())
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

    def watch(self) -> int:
        """Run the attempt from its start to its end. Return the run's exit code."""
        self._install_signals()
        heartbeat_at = self._run.state_path.stat().st_mtime
        write_state(self._run, self._state)
        try:
            self._job.take_over() if self._takes_over else self._job.start()
        except (locks.LockTakenError, SoTuiError, OSError) as error:
            return self._finish(_not_started(error))
        self._tree.scan(thorough=self._takes_over)
        self._gone_unseen = self._takes_over and not self._tree.alive
        self._heartbeat_at = heartbeat_at if self._gone_unseen else None
        self._take_lines(self._log.tail(_LOG_LINES))
        self._follow()
        self._sweep()
        return self._finish(conclude(self._evidence()))

    def _follow(self) -> None:
        """Scan, record and act once a second, and whenever a process ends, until none is left."""
        sampler = Sampler(self._job.launch.machine, self._tree, self._attempt)
        samples = SampleWriter(self._run, self._host)
        due = time.monotonic() + TICK_S
        try:
            while self._tree.alive or self._job.running():
                self._tree.wait_for_loss(min(max(0.0, due - time.monotonic()), self._wait_s()))
                self._tick()
                if time.monotonic() >= due:
                    due = time.monotonic() + TICK_S
                    with self._despite_errors_of("samples"):
                        samples.append(sampler.sample())
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
        with self._despite_errors_of("control"):
            self._check_stop_request()
        self._check_directory()
        self._act()
        with self._despite_errors_of("log"):
            self._trim()
        self._state = run_state.observed(self._state, self._reader, self._attempt)
        if self._stop is not None:
            self._state = msgspec.structs.replace(self._state, detail=self._state.detail or "asked to stop")
        self._state = msgspec.structs.replace(self._state, heartbeat=self._state.heartbeat + 1, processes=self._tree.alive)
        self._write_state()

    def _read(self) -> None:
        while self._reader.poll(limit_records=10_000, limit_s=0.2).more:
            continue
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
            request_stop(self._run, reason=f"the supervisor received {self._signal.name}")
            self._signal = None
        asked = stop_request(self._run)
        if asked is not None and asked != self._stop:
            self._stop = asked
            self._shutdown.overdue_at = time.monotonic() + asked.grace_s

    def _check_directory(self) -> None:
        """End a run whose directory was deleted: it can be neither seen nor stopped, and would save into a folder that is no run."""
        now = time.monotonic()
        if not deleted(self._run):
            self._directory_seen_at = now
        elif self._shutdown.broken_at is None and now - self._directory_seen_at > _DELETED_S:
            print(f"{self._run.path} has been deleted: ending its processes", file=sys.stderr)
            self._shutdown.broken_at = now

    def _act(self) -> None:
        action = self._shutdown.next_action(time.monotonic())
        if action == "terminate":
            self._tree.signal(signal.SIGTERM)
        elif action == "kill":
            self._tree.signal(signal.SIGKILL)

    def _trim(self) -> None:
        if time.monotonic() >= self._trim_due:
            trim_log(self._run.log_path(self._attempt, self._host))
            self._trim_due = time.monotonic() + _LOG_TRIM_S

    def _sweep(self) -> None:
        """End marked processes that were missed, and remove the shared memory that killed processes leave behind."""
        deadline = time.monotonic() + _SWEEP_S
        self._tree.scan(thorough=True)
        while self._tree.alive and time.monotonic() < deadline:
            self._tree.signal(signal.SIGKILL)
            time.sleep(0.1)
            self._tree.scan()
        with self._despite_errors_of("shared memory"):
            for leftover in shm_leftovers({process.pid for process in self._tree.gone}):
                leftover.unlink(missing_ok=True)
        with self._despite_errors_of("records"):
            self._read()

    def _evidence(self) -> Evidence:
        overdue = self._stop is not None and self._shutdown.stop_overdue(time.monotonic())
        return Evidence(
            end=run_state.end_record(self._reader, self._attempt),
            failures=_failures(self._run.attempt_dir(self._attempt)),
            runner_status=self._job.status(),
            first_lost=self._first_loss.process,
            first_lost_code=self._first_loss.exit_code,
            unprompted=self._first_loss.unprompted,
            stop_overdue_s=self._stop.grace_s if self._stop is not None and overdue else None,
            gone_unseen=self._gone_unseen,
            oom_kills=oom_kills() - self._oom_kills_before,
            disk_full=any(trouble in FULL for trouble in self._trouble.values()),
            log=tuple(self._last_lines),
        )

    def _finish(self, outcome: Outcome) -> int:
        state = run_state.observed(self._state, self._reader, self._attempt)
        facts = _facts(outcome, self._job.launch.spec, RunFacts(name=self._run.name, saved_step=state.saved_step))
        ended = time.time() if self._heartbeat_at is None else run_state.last_alive(self._reader, self._attempt, self._heartbeat_at)
        self._state = run_state.final_state(state, outcome, outcome_text(outcome, facts), ended)
        if not deleted(self._run):
            with self._despite_errors_of("state"):
                write_last_state(self._run, self._state)
        self._job.release()
        return outcome.run_exit_code

    def _first_state(self, found: RunState) -> RunState:
        supervisor = identify(os.getpid(), "supervisor")
        if self._takes_over:
            return msgspec.structs.replace(found, supervisor=supervisor, host=self._host, heartbeat=found.heartbeat + 1)
        return run_state.first_state(self._run.name, self._attempt, self._host, supervisor, found, forced=self._job.launch.forced)

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
        if not deleted(self._run):
            with self._despite_errors_of("state"):
                write_state(self._run, self._state)

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


def _failures(folder: Path) -> tuple[Failure, ...]:
    """Read what the ranks wrote about their failures, the earliest first."""
    files = sorted(folder.glob("failure.rank*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = []
    for file in files:
        with contextlib.suppress(msgspec.DecodeError):  # incomplete: the rank was killed while it wrote
            found.append(msgspec.json.decode(file.read_bytes(), type=Failure))
    return tuple(found)


def _facts(outcome: Outcome, spec: RunSpec, facts: RunFacts) -> RunFacts:
    """Add the plan's advice where the outcome calls for it. The final state does not depend on it: without it, the advice is general."""
    if outcome.reported:
        return facts  # with the trainer's own advice
    try:
        match outcome.code:
            case OutcomeCode.OUT_OF_GPU_MEMORY:
                return msgspec.structs.replace(facts, less_gpu_memory=less_gpu_memory(spec))
            case OutcomeCode.OUT_OF_HOST_MEMORY | OutcomeCode.KILLED_FOR_MEMORY:
                return msgspec.structs.replace(facts, less_host_memory=less_host_memory(spec))
    except Exception as error:  # noqa: BLE001 - the final state must be written in any case
        print(f"no advice from the plan: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return facts


def _not_started(error: Exception) -> Outcome:
    code = OutcomeCode.NOT_STARTED
    if isinstance(error, locks.LockTakenError):
        code = OutcomeCode.GPU_IN_USE
    elif isinstance(error, HostDiffersError):
        code = OutcomeCode.HOST_DIFFERS
    return Outcome(state="failed", code=code, detail="; ".join(str(error).splitlines()))
