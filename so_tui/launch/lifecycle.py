"""Start, resume and stop runs, and make sure that each live run has a supervisor. Commands and
screens call these functions.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from so_tui.launch import DEFAULT_GRACE_S
from so_tui.launch.checks import (
    checks_elsewhere,
    keeping_what_fits,
    quick_checks,
    saved_checkpoints,
)
from so_tui.launch.executors import (
    ensure_supervised,
    executor_of,
    executor_of_attempt,
)
from so_tui.launch.launch import (
    Executor,
    Job,
    another_start,
    supervisor_log,
    write_launch,
)
from so_tui.launch.supervisor.ending import (
    Outcome,
    final_state,
    left_queue,
    request_stop,
)
from so_tui.plan.plan import Launch
from so_tui.runs import state as run_state
from so_tui.runs.directory import (
    RunDirectory,
    new_attempt,
    own_run,
)
from so_tui.runs.listing import create_run
from so_tui.runs.liveness import (
    HeartbeatWatch,
    alive,
    concluded,
    sighting,
    state_with_truth,
    suspended,
)
from so_tui.runs.lock import ended_state, record_end, run_lock
from so_tui.runs.reader import last_lines
from so_tui.runs.records import FINAL_STATES, OutcomeCode, RunState
from so_tui.runs.state import read_state, write_spec, write_state_even_if_full
from so_tui.spec import InputError, Refused, SoTuiError
from so_tui.spec.errors import reject
from so_tui.trust.text import printable_line

# The state of a run with what its executor knows: why it waits, on which node it starts, and how
# its job ended.


def current_state(run: RunDirectory, watch: HeartbeatWatch | None = None) -> RunState:
    """Return the state of a run, as ``state_with_truth`` does, corrected by what the executor of
    its newest attempt knows.

    The end of a job that its supervisor could not record is recorded here, if the run is this
    user's own: schedulers soon forget jobs.

    Raises:
        InputError: If the state cannot be read.
    """
    recorded = read_state(run)
    if recorded.state in FINAL_STATES:
        return _explained(run, recorded)
    attempt = newest_attempt(run, recorded)
    job = executor_of_attempt(run, attempt).status(run, attempt)
    if job is None:
        return state_with_truth(run, watch, recorded)
    forgotten = job.end is OutcomeCode.JOB_FORGOTTEN and recorded.state != "queued"
    if job.phase == "ended" and not forgotten:
        return _ended(run, attempt, job)
    # What the scheduler said may be older than the run's state.
    if recorded.state != "queued" and (
        job.phase != "queued" or sighting(run, recorded, watch).alive is True
    ):
        # The heartbeat of a suspended job stands still.
        return recorded if job.phase == "running" else state_with_truth(run, watch, recorded)
    return replace(recorded, state="queued", detail=_queue_text(job))


def newest_attempt(run: RunDirectory, state: RunState) -> int:
    """Return the attempt that a state is about: a queued one has no supervisor yet that would have
    written its number.
    """
    if state.state != "queued":
        return state.attempt
    return next((n for n in reversed(run.attempts()) if os.path.lexists(run.submission_path(n))), 0)


def _queue_text(job: Job) -> str:
    """Return what a job waits for, in words."""
    number = f"job {job.id}"
    match job.phase:
        case "queued":
            reason = job.reason.partition(",")[0]  # a list of nodes may follow
            why = f"for {_WAITS.get(reason, printable_line(reason))}" if reason else "in the queue"
            start = "" if job.start is None else f", expected to start {_clock(job.start)}"
            return f"{number} waits {why}{start}"
        case "running" | "completing":
            return f"{number} starts on {printable_line(job.nodes)}"
    return f"{number} was submitted" if job.id else "is being submitted"


_WAITS = {
    "Resources": "free nodes",
    "Priority": "jobs with a higher priority",
    "Dependency": "another job",
    "BeginTime": "its begin time",
    "ReqNodeNotAvail": "a node that is not available",
    "Reservation": "its reservation",
    "QOSMaxJobsPerUserLimit": "your other jobs: the quality of service limits how many run",
    "AssocGrpCPUMinutesLimit": "more hours on the account",
    "PartitionTimeLimit": "nothing that will come: its time limit is above the partition's",
    "PartitionDown": "the partition, which is down",
    "JobHeldUser": "you: it is held",
    "JobHeldAdmin": "an administrator: it is held",
}
"""Slurm's reasons in words. Others are shown as Slurm names them."""


def _clock(when: float) -> str:
    local, today = time.localtime(when), time.localtime()
    return time.strftime("%H:%M" if local[:3] == today[:3] else "%Y-%m-%d %H:%M", local)


def _explained(run: RunDirectory, recorded: RunState) -> RunState:
    """Return a final state with the scheduler's reason where the supervisor saw only that something
    ended the processes.
    """
    recent = (
        recorded.ended is not None and abs(time.time() - recorded.ended) < _EXPLAINED_S
    )  # by its node's clock, which may be ahead
    if recorded.code not in _UNEXPLAINED or not recent:
        return recorded
    job = executor_of_attempt(run, recorded.attempt).status(run, recorded.attempt)
    if job is None or job.end not in _SCHEDULERS_ENDS:
        return recorded
    return _record(
        run,
        recorded,
        replace(
            _with_end(recorded, job, unstarted=False),
            state=recorded.state,
            exit_code=recorded.exit_code,
        ),
    )


_UNEXPLAINED = frozenset(
    (
        OutcomeCode.RANK_LOST,
        OutcomeCode.LAUNCHER_LOST,
        OutcomeCode.RUNNER_LOST,
        OutcomeCode.NODE_LOST,
    )
)
_SCHEDULERS_ENDS = frozenset(
    (
        OutcomeCode.OUT_OF_TIME,
        OutcomeCode.PREEMPTED,
        OutcomeCode.JOB_CANCELLED,
        OutcomeCode.NODE_FAILED,
    )
)
_EXPLAINED_S = 900.0
"""For how long after its end a run's job is asked about."""


def _ended(run: RunDirectory, attempt: int, job: Job) -> RunState:
    """Return the final state of a run whose job has ended: its own, or one that says how the
    scheduler ended it.
    """
    recorded = read_state(
        run
    )  # the supervisor may have written the final state just before the job ended
    if recorded.state in FINAL_STATES:
        return recorded
    unstarted = recorded.state == "queued"
    state = replace(recorded, attempt=attempt) if unstarted else concluded(run, recorded)
    says_why = job.end not in (None, OutcomeCode.JOB_FAILED)
    if unstarted or (says_why and state.code == OutcomeCode.UNOBSERVED):
        state = _with_end(state, job, unstarted=unstarted)
    return _record(run, recorded, state)


def _record(run: RunDirectory, recorded: RunState, state: RunState) -> RunState:
    """Write a final state in place of the one that was read, if the run is this user's own, and
    return it.
    """
    with contextlib.suppress(OSError, Refused), own_run(run) as own, run_lock(own) as lock:
        if lock is not None and read_state(own) == recorded:
            write_state_even_if_full(own, state)
    return state


def _with_end(state: RunState, job: Job, *, unstarted: bool) -> RunState:
    code = job.end or OutcomeCode.JOB_FAILED
    return final_state(
        state,
        Outcome(
            state="stopped" if unstarted and code is OutcomeCode.JOB_CANCELLED else "lost",
            code=code,
            detail=job.output,
            job=job.id,
            node=job.nodes,
        ),
        state.ended or time.time(),
    )


_LOG = logging.getLogger(__name__)
_READY_S = 30.0
_POLL_S = 0.05
_AFTER_KILL_S = 60.0
"""How long a stop waits for the final state after its grace time: for the kill, and until the
kernel has freed much memory.
"""


def start(
    launch: Launch, *, runs_dir: Path | None = None, executor: Executor | None = None
) -> RunDirectory:
    """Start a new run and return once its supervisor has taken over, or its job is queued. Training
    continues by itself from there.

    Args:
        launch: From ``prepare``.
        runs_dir: Where to make the run directory; by default the user's folder of runs.
        executor: Where to start the supervisor; by default where the spec says.

    Raises:
        InputError, Refused: A check failed; nothing was written.
        SoTuiError: The supervisor did not start; nothing is left behind.
    """
    executor = executor or executor_of(launch.spec)
    _check(launch, executor, runs_dir=runs_dir)
    if executor.here:
        launch = keeping_what_fits(launch, runs_dir=runs_dir)
    run = create_run(launch.spec, runs_dir, called=launch.called)
    with own_run(run) as own:
        try:
            _start_attempt(own, new_attempt(own), launch, executor)
        except BaseException:
            # Without a supervisor nothing runs and nothing is worth keeping. Its file system may be
            # away for a moment.
            with contextlib.suppress(InputError, OSError):
                if read_state(own).supervisor is None:
                    shutil.rmtree(f"{own.at}/.", ignore_errors=True)
                    run.path.rmdir()
            raise
    return run


def resume(run: RunDirectory, launch: Launch, *, executor: Executor | None = None) -> int:
    """Start another attempt of a run, which continues from the last checkpoint, and return the
    attempt's number.

    Args:
        run: A run that has ended.
        launch: From ``prepare_resume``.
        executor: Where to start the supervisor; by default where the spec says.

    Raises:
        InputError: The run is live again; otherwise as for ``start``.
        Refused: The run is not this user's own (see ``so_tui.runs.directory``); otherwise as for
            ``start``.
    """
    with own_run(run) as own:
        ended_state(own, assume_dead=launch.assume_dead)
        executor = executor or executor_of(launch.spec)
        saved = saved_checkpoints(own, launch)
        _check(launch, executor, saved=saved, runs_dir=run.path)
        if executor.here:
            launch = keeping_what_fits(launch, saved=saved, runs_dir=run.path)
        for action in run_state.ACTIONS:
            run_state.clear(own, action)
        attempt = new_attempt(own)
        try:
            _start_attempt(own, attempt, launch, executor)
        finally:
            if newest_attempt(own, read_state(own)) != attempt:
                shutil.rmtree(own.attempt_dir(attempt), ignore_errors=True)
            elif (
                launch.changes
            ):  # only now: if two resumes compete, the settings of the one that trains count
                write_spec(own, launch.spec)
    return attempt


def stop(
    run: RunDirectory,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    assume_dead: bool = False,
    waiting: Callable[[RunState, float], object] = lambda *_: None,
) -> RunState:
    """Ask the run to stop with a checkpoint, and wait for its end. After ``grace_s`` seconds the
    supervisor kills it.

    Returns the final state, or the current one if the run has not ended in time, or has ended while
    its supervisor is suspended and cannot record that. The request remains if the wait is
    interrupted.

    Args:
        run: The run.
        grace_s: After how many seconds it is killed.
        assume_dead: Take the user's word that it has ended, or that its job will never start, where
            nobody can be asked.
        waiting: Called several times a second with the state that is waited on, and the seconds
            that are left.

    Raises:
        Refused: It is another user's run (code ``not-your-run``).
        InputError: The request may not be written (code ``control-not-writable``), or the scheduler
            that has its job cannot be asked (code ``run-may-be-live``); with the user's word as for
            ``record_end``.
        OSError: It cannot be written for another reason, such as a full disk.
    """
    state = current_state(run)
    if state.state in FINAL_STATES:
        return state
    if state.state == "queued":
        with own_run(run) as own:
            return _leave_queue(own, state, assume_dead=assume_dead)
    if assume_dead:
        return record_end(run)
    try:
        request_stop(run, grace_s=grace_s)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise reject(
            "control-not-writable",
            "run",
            str(run.control_dir),
            f"the request to stop cannot be written: {error.strerror}",
            "Check the rights of this folder.",
        ) from error
    ensure_supervised(run)
    deadline = time.monotonic() + grace_s + _AFTER_KILL_S
    watch = HeartbeatWatch()  # a run on another host may die while it is waited for
    while (state := current_state(run, watch)).state not in FINAL_STATES:
        left_s = deadline - time.monotonic()
        still = suspended(state)
        ended = still is not None and not any(map(alive, state.processes))
        if left_s <= 0 or ended:
            break
        waiting(state, left_s)
        time.sleep(4 * _POLL_S)
    recorded = read_state(run)
    # A host that was silent for all this time is gone. Others need not wait for that again.
    return (
        _record(run, recorded, state)
        if state.state in FINAL_STATES and recorded.state not in FINAL_STATES
        else state
    )


def _leave_queue(run: RunDirectory, state: RunState, *, assume_dead: bool) -> RunState:
    """Take an own run out of its scheduler's queue and record that. Should its job start all the
    same, it is refused.

    Raises:
        InputError: The scheduler cannot be asked (code ``run-may-be-live``), and the user does not
            say that the job will never start.
        OSError: The run directory cannot be written.
    """
    attempt = newest_attempt(run, state)
    try:
        executor_of_attempt(run, attempt).cancel(run, attempt)
    except SoTuiError as error:
        if not assume_dead:
            raise reject(
                "run-may-be-live",
                "run",
                run.name,
                f"is in a queue: {error}",
                "If you know that its job is gone, add --assume-dead. Should it start all the "
                "same, it ends at once.",
            ) from error
    with run_lock(run) as lock:
        recorded = read_state(run)
        alive = recorded.state != "queued" and sighting(run, recorded).alive is True
        if (
            lock is None or recorded.state in FINAL_STATES or alive
        ):  # it has started a moment ago, and the scheduler ends it
            return current_state(run)
        request_stop(run)  # tells a job that Slurm starts again who ended the run
        state = left_queue(state, attempt)
        write_state_even_if_full(run, state)
    return state


def _start_attempt(run: RunDirectory, attempt: int, launch: Launch, executor: Executor) -> None:
    try:
        digest = write_launch(run, attempt, launch)
        _LOG.info("%s starts attempt %d of %s", type(executor).__name__, attempt, run.path)
        handle = executor.start(run, attempt, digest)
    except OSError as error:
        raise reject(
            "not-writable",
            "--runs-dir",
            str(run.path.parent),
            f"cannot be written: {error.strerror}",
            "Free some space there, or choose another folder with --runs-dir.",
        ) from error
    if handle is None:
        return
    try:
        _wait_for_supervisor(run, attempt, handle)
    except (
        KeyboardInterrupt
    ):  # the supervisor may be alive by now and would train a run that the user has cancelled
        run_state.request(run, "stop", reason="interrupted while it was started")
        raise


def _wait_for_supervisor(run: RunDirectory, attempt: int, handle: subprocess.Popen[bytes]) -> None:
    """Return when the supervisor has written its first state. Raise SoTuiError if it ends first or
    takes too long.
    """
    deadline = time.monotonic() + _READY_S
    while True:
        code = handle.poll()  # before the state: it may have written that and ended
        if read_state(run).attempt == attempt:
            return
        if code == 0:  # another supervisor holds the run's lock
            raise another_start(run)
        if code is not None or time.monotonic() > deadline:
            failed = (
                f"did not take over within {_READY_S:.0f} s"
                if code is None
                else f"ended immediately (exit code {code})"
            )
            said = last_lines(supervisor_log(run, attempt)) or "it wrote nothing"
            raise SoTuiError(f"the supervisor {failed}: {said}")
        time.sleep(_POLL_S)


def _check(
    launch: Launch, executor: Executor, *, saved: int = 0, runs_dir: Path | None = None
) -> None:
    """Refuse what cannot start. What this host lacks says nothing about another one."""
    hostname = launch.machine.hostname
    if executor.here and hostname != socket.gethostname():
        raise reject(
            "not-this-machine",
            "--machine",
            hostname,
            "is not this machine, and runs start here",
            "Start it on that machine, or only show it with --dry-run.",
        )
    check = quick_checks if executor.here else checks_elsewhere
    check(launch, saved=saved, runs_dir=runs_dir)
