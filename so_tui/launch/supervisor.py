"""The supervisor: one light process per run and host that starts the training processes, watches them, and ends what they leave.

It is in nobody's way: the trainer's log and metrics do not pass through it, so training goes on when it is killed, and another one takes
over by the record in ``state.json``. It writes the state and the samples, alone.
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

from so_tui.launch import locks, progress
from so_tui.launch.alone import become_subreaper, only_one
from so_tui.launch.closing import Closing
from so_tui.launch.job import Job
from so_tui.launch.losses import Losses
from so_tui.launch.processes import ProcessTree
from so_tui.launch.sampler import Sampler, oom_kills, shm_leftovers
from so_tui.launch.stopping import StopRequest, request_stop, stop_request
from so_tui.launch.verdict import End, Evidence, Failure, conclude
from so_tui.plan.alternatives import less_gpu_memory, less_host_memory
from so_tui.runs.directory import RunDirectory, deleted
from so_tui.runs.liveness import identify
from so_tui.runs.log import LogReader, trim_log
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import FULL, read_state, write_last_state, write_state

TICK_S = 1.0
_START_TICK_S = 0.2
_LOG_TRIM_S = 5.0
_LOG_LINES = 400
_SWEEP_S = 5.0
"""How long the last processes are hunted after the end; what survives KILL for so long sits in the kernel."""
_DELETED_S = 10.0
"""How long the run's folder may be missing before it counts as deleted: a network file system may lose sight of it for a moment."""
_GIVES_UP = "Killing subprocess"
"""What DeepSpeed's launcher logs when a rank has failed and it takes down the others."""


def supervise(run: RunDirectory, attempt: int) -> int:
    """Start the attempt, or take over one whose supervisor has died, and watch it to its end. Returns the run's exit code.

    Returns 0 at once when another supervisor watches already. Raises OSError when the run directory cannot be written.
    """
    with only_one(run) as alone:
        if not alone:
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
        # A state of this attempt with a supervisor in it: that one has died, and what it started may still live.
        self._takes_over = found.attempt == attempt and found.supervisor is not None
        self._state = self._first_state(found)
        self._tree = ProcessTree(self._job.marker, os.getpid(), found.processes if self._takes_over else ())
        self._losses = Losses(self._tree)
        self._reader = MetricsReader(run)
        self._log = LogReader(run.log_path(attempt, self._host))
        self._last_lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._closing = Closing()
        self._stop: StopRequest | None = None
        self._gone_unseen = False
        self._beaten_at: float | None = None
        self._oom_kills_before = oom_kills()
        self._signal: signal.Signals | None = None
        self._trim_due = 0.0
        self._there_at = time.monotonic()
        self._trouble: dict[str, int | None] = {}

    def watch(self) -> int:
        """The whole life of the attempt. Returns the run's exit code."""
        self._install_signals()
        beaten_at = self._run.state_path.stat().st_mtime
        write_state(self._run, self._state)
        try:
            self._job.take_over() if self._takes_over else self._job.start()
        except (locks.LockTakenError, OSError) as error:
            return self._finish(End(state="failed", reason=f"could not be started: {error}", suggestion=_start_advice(error)))
        self._tree.look(thorough=self._takes_over)
        self._gone_unseen = self._takes_over and not self._tree.alive
        self._beaten_at = beaten_at if self._gone_unseen else None
        self._take_lines(self._log.tail(_LOG_LINES))
        self._follow()
        self._sweep()
        return self._finish(conclude(self._evidence()))

    def _follow(self) -> None:
        """Look, record and act once a second, and at once when a process ends, until none is left."""
        sampler, samples = Sampler(self._job.machine, self._tree, self._attempt), SampleWriter(self._run, self._host)
        due = time.monotonic() + TICK_S
        try:
            while self._tree.alive or self._job.running():
                self._tree.wait_for_loss(min(max(0.0, due - time.monotonic()), self._patience_s()))
                self._tick()
                if time.monotonic() >= due:
                    due = time.monotonic() + TICK_S
                    with self._despite_trouble_with("samples"):
                        samples.append(sampler.sample())
        finally:
            sampler.close()
            with self._despite_trouble_with("samples"):
                samples.close()

    def _patience_s(self) -> float:
        """A rank that dies right after its start must have been seen, or no one cleans up behind it."""
        seen = any(process.role == "rank" for process in (*self._tree.alive, *self._tree.gone))
        return TICK_S if seen else _START_TICK_S

    def _tick(self) -> None:
        before = {process.pid for process in self._tree.alive}
        # In this order: when a process is seen to be gone, everything it had written is read after it.
        self._tree.look()
        with self._despite_trouble_with("records"):
            self._read()
        self._notice_losses(before)
        with self._despite_trouble_with("control"):
            self._notice_stop()
        self._notice_deletion()
        self._act()
        with self._despite_trouble_with("log"):
            self._trim()
        self._state = progress.observed(self._state, self._reader, self._attempt)
        if self._stop is not None:
            self._state = msgspec.structs.replace(self._state, detail=self._state.detail or "asked to stop")
        self._state = msgspec.structs.replace(self._state, heartbeat=self._state.heartbeat + 1, processes=self._tree.alive)
        self._write_state()

    def _read(self) -> None:
        while self._reader.poll(limit_records=10_000, limit_s=0.2).more:
            continue
        self._take_lines(self._log.poll())
        if self._closing.ended_at is None and progress.trainers_end(self._reader, self._attempt) is not None:
            self._closing.ended_at = time.monotonic()

    def _take_lines(self, lines: tuple[str, ...]) -> None:
        self._last_lines.extend(lines)
        if self._closing.terminated_at is None and any(_GIVES_UP in line for line in lines):
            # The launcher has just told the ranks to end. A second TERM would interrupt what they do about the first.
            self._closing.terminated_at = time.monotonic()

    def _notice_losses(self, before: set[int]) -> None:
        lost = self._losses.notice(before, told=self._closing.terminated_at is not None)
        if self._closing.broken_at is None and any(process.role != "rank" for process in lost):
            self._closing.broken_at = time.monotonic()

    def _notice_stop(self) -> None:
        if self._signal:
            request_stop(self._run, reason=f"the supervisor received {self._signal.name}")
            self._signal = None
        asked = stop_request(self._run)
        if asked is not None and asked != self._stop:
            self._stop = asked
            self._closing.overdue_at = time.monotonic() + asked.grace_s

    def _notice_deletion(self) -> None:
        """Without its folder a run can neither be seen nor stopped, and what it saves would make a folder anew that is no run."""
        now = time.monotonic()
        if not deleted(self._run):
            self._there_at = now
        elif self._closing.broken_at is None and now - self._there_at > _DELETED_S:
            print(f"{self._run.path} has been deleted: ending its processes", file=sys.stderr)
            self._closing.broken_at = now

    def _act(self) -> None:
        step = self._closing.step(time.monotonic())
        if step == "terminate":
            self._tree.signal(signal.SIGTERM)
        elif step == "kill":
            self._tree.signal(signal.SIGKILL)

    def _trim(self) -> None:
        if time.monotonic() >= self._trim_due:
            trim_log(self._run.log_path(self._attempt, self._host))
            self._trim_due = time.monotonic() + _LOG_TRIM_S

    def _sweep(self) -> None:
        """End whatever carries the run's mark and was missed, and remove the shared memory that killed processes leave."""
        deadline = time.monotonic() + _SWEEP_S
        self._tree.look(thorough=True)
        while self._tree.alive and time.monotonic() < deadline:
            self._tree.signal(signal.SIGKILL)
            time.sleep(0.1)
            self._tree.look()
        with self._despite_trouble_with("shared memory"):
            for leftover in shm_leftovers({process.pid for process in self._tree.gone}):
                leftover.unlink(missing_ok=True)
        with self._despite_trouble_with("records"):
            self._read()

    def _evidence(self) -> Evidence:
        return Evidence(
            name=self._run.name,
            saved_step=progress.observed(self._state, self._reader, self._attempt).saved_step,
            end=progress.trainers_end(self._reader, self._attempt),
            failures=_failures(self._run.attempt_dir(self._attempt)),
            runner_status=self._job.status(),
            first_gone=self._losses.first,
            first_gone_code=self._losses.first_code,
            unprompted=self._losses.unprompted,
            stop_overdue_s=self._stop.grace_s if self._stop and self._closing.stop_overdue(time.monotonic()) else None,
            gone_unseen=self._gone_unseen,
            less_gpu_memory=less_gpu_memory(self._job.plan.spec),
            less_host_memory=less_host_memory(self._job.plan.spec),
            oom_kills=oom_kills() - self._oom_kills_before,
            disk_full=any(trouble in FULL for trouble in self._trouble.values()),
            log=tuple(self._last_lines),
        )

    def _finish(self, end: End) -> int:
        state = progress.observed(self._state, self._reader, self._attempt)
        self._state = msgspec.structs.replace(
            state,
            state=end.state,
            detail="",
            reason=end.reason,
            suggestion=end.suggestion,
            ended=time.time() if self._beaten_at is None else progress.last_sign(self._reader, self._attempt, self._beaten_at),
            heartbeat=state.heartbeat + 1,
            exit_code=end.exit_code,
            processes=(),
        )
        if not deleted(self._run):
            with self._despite_trouble_with("state"):
                write_last_state(self._run, self._state)
        self._job.release()
        return end.exit_code

    def _first_state(self, found: RunState) -> RunState:
        mine, now = identify(os.getpid(), "supervisor"), time.time()
        if self._takes_over:
            return msgspec.structs.replace(found, supervisor=mine, host=self._host, heartbeat=found.heartbeat + 1)
        return RunState(
            name=self._run.name,
            state="starting",
            detail="DeepSpeed's launcher starts the ranks",
            attempt=self._attempt,
            host=self._host,
            step=found.step,
            loss=found.loss,
            total_steps=found.total_steps,
            saved_step=found.saved_step,
            saved_at=found.saved_at,
            started=found.started or now,
            attempt_started=now,
            earlier_s=found.took_s or 0.0,
            heartbeat=found.heartbeat + 1,
            forced=not self._job.plan.fits,
            supervisor=mine,
        )

    def _install_signals(self) -> None:
        """A signal to us is a wish to stop the run: the next look writes it down, and the trainer saves and ends."""

        def ask(signum: int, _frame: FrameType | None) -> None:
            self._signal = signal.Signals(signum)

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, ask)
        # Not SIG_IGN, which the training processes would inherit.
        signal.signal(signal.SIGHUP, lambda *_: None)

    def _write_state(self) -> None:
        """A folder without a run gets no state: it would look like one that can be resumed, or stand in the way of its deletion."""
        if not deleted(self._run):
            with self._despite_trouble_with("state"):
                write_state(self._run, self._state)

    @contextlib.contextmanager
    def _despite_trouble_with(self, what: str) -> Iterator[None]:
        """A full disk or a file system that hangs is said once and outlived: to give up would leave the processes to themselves."""
        try:
            yield
        except OSError as error:
            if self._trouble.get(what) != error.errno:
                with contextlib.suppress(OSError):  # our log may lie on the same full disk
                    print(f"{what} of {self._run.path}: {error}", file=sys.stderr, flush=True)
            self._trouble[what] = error.errno
        else:
            self._trouble.pop(what, None)


def _failures(folder: Path) -> tuple[Failure, ...]:
    """What the ranks left about their failures, the earliest first."""
    files = sorted(folder.glob("failure.rank*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = []
    for file in files:
        with contextlib.suppress(msgspec.DecodeError):  # torn: the rank was killed while it wrote
            found.append(msgspec.json.decode(file.read_bytes(), type=Failure))
    return tuple(found)


def _start_advice(error: Exception) -> str:
    if isinstance(error, locks.LockTakenError):
        return "Wait for that run, stop it, or choose other GPUs with gpus = [...]"
    return "Mend that and start again with `so-tui resume`"
