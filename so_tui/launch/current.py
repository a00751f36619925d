"""The state of a run with what its executor knows: why it waits, on which node it starts, and how its job ended."""

from __future__ import annotations

import contextlib
import os
import time

from msgspec.structs import replace

from so_tui.launch.executor_types import JobPhase, JobStatus
from so_tui.launch.executors import executor_of_attempt
from so_tui.launch.outcome import Outcome
from so_tui.launch.outcome_text import RunFacts, outcome_text
from so_tui.runs.directory import RunDirectory
from so_tui.runs.liveness import HeartbeatWatch, Liveness, sighting, state_with_truth
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.own import not_own
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.run_lock import run_lock
from so_tui.runs.state import read_state, write_state_even_if_full
from so_tui.runs.unobserved import EXIT_CODES, concluded
from so_tui.trust.printable import printable_line


def current_state(run: RunDirectory, watch: HeartbeatWatch | None = None) -> RunState:
    """Return the state of a run, as ``state_with_truth`` does, corrected by what the executor of its newest attempt knows.

    The end of a job that its supervisor could not record is recorded here, if the run is this user's own: schedulers soon forget jobs.

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
    if job.phase is JobPhase.ENDED and not forgotten:
        return _ended(run, attempt, job)
    if recorded.state != "queued" and not starts_again(run, recorded, job, watch):
        # The heartbeat of a suspended job stands still.
        return recorded if job.phase is JobPhase.RUNNING else state_with_truth(run, watch, recorded)
    return replace(recorded, state="queued", detail=queue_text(job))


def starts_again(
    run: RunDirectory, recorded: RunState, job: JobStatus, watch: HeartbeatWatch | None = None
) -> bool:
    """Return whether Slurm has put a run's job back into the queue. What the scheduler said may be older than the run's state."""
    return (
        job.phase is JobPhase.QUEUED
        and sighting(run, recorded, watch).liveness is not Liveness.ALIVE
    )


def newest_attempt(run: RunDirectory, state: RunState) -> int:
    """Return the attempt that a state is about: a queued one has no supervisor yet that would have written its number."""
    if state.state != "queued":
        return state.attempt
    return next(
        (
            attempt
            for attempt in reversed(run.attempts())
            if os.path.lexists(run.submission_path(attempt))
        ),
        0,
    )


def queue_text(job: JobStatus) -> str:
    """Return what a job waits for, in words."""
    number = f"job {printable_line(job.job_id)}"
    match job.phase:
        case JobPhase.QUEUED:
            reason = job.waits_for.partition(",")[0]  # a list of nodes may follow
            why = (
                f" waits for {_WAITS.get(reason, printable_line(reason))}"
                if reason
                else " waits in the queue"
            )
            start = (
                f", expected to start {_clock(job.expected_start)}"
                if job.expected_start is not None
                else ""
            )
            return f"{number}{why}{start}"
        case JobPhase.RUNNING | JobPhase.COMPLETING:
            return f"{number} starts on {printable_line(job.nodes)}"
    return f"{number} was submitted" if job.job_id else "is being submitted"


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
    """Return a final state with the scheduler's reason where the supervisor saw only that something ended the processes."""
    recent = (
        recorded.ended is not None and abs(time.time() - recorded.ended) < _EXPLAINED_S
    )  # by its node's clock, which may be ahead
    if recorded.code not in _UNEXPLAINED or not recent:
        return recorded
    job = executor_of_attempt(run, recorded.attempt).status(run, recorded.attempt)
    if job is None or job.end not in _SCHEDULERS_ENDS:
        return recorded
    state = replace(
        _with_end(recorded, job, unstarted=False),
        state=recorded.state,
        exit_code=recorded.exit_code,
    )
    return record(run, recorded, state)


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


def _ended(run: RunDirectory, attempt: int, job: JobStatus) -> RunState:
    """Return the final state of a run whose job has ended: its own, or one that says how the scheduler ended it."""
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
    return record(run, recorded, state)


def record(run: RunDirectory, recorded: RunState, state: RunState) -> RunState:
    """Write a final state in place of the one that was read, if the run is this user's own, and return it."""
    if not_own(run) is None:
        with contextlib.suppress(OSError), run_lock(run) as lock:
            if lock is not None and read_state(run) == recorded:
                write_state_even_if_full(run, state)
    return state


def _with_end(state: RunState, job: JobStatus, *, unstarted: bool) -> RunState:
    code = job.end or OutcomeCode.JOB_FAILED
    cancelled = unstarted and code is OutcomeCode.JOB_CANCELLED
    outcome = Outcome(
        state="stopped" if cancelled else "lost",
        code=code,
        detail=job.output,
        job=job.job_id,
        node=job.nodes,
    )
    text = outcome_text(outcome, RunFacts(name=state.name, saved_step=state.saved_step))
    return replace(
        state,
        state=outcome.state,
        detail="",
        code=str(code),
        reason=text.reason,
        suggestion=text.suggestion,
        ended=state.ended or time.time(),
        exit_code=EXIT_CODES[outcome.state],
        processes=(),
    )
