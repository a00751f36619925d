"""A job that Slurm starts again: after its node has failed, when it has given way to another job, or because it asked for that.

Its attempt has ended with the processes of the first start, so the same job makes the next one. The first node's supervisor makes it, and
tells those of the other nodes its number in ``restart.<N>.json``.

Problem codes:
    not-continued: What ended the run is no reason to go on: it has finished, it failed by itself, or a person stopped it.
    first-node-silent: The first node has not said which attempt the job makes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from so_tui.launch.executors.slurm import commands
from so_tui.launch.executors.slurm.executor import Restarted, SlurmExecutor
from so_tui.launch.node_states import FIRST_SIGN_S
from so_tui.launch.run_state import left_queue, queued_state
from so_tui.launch.shutdown import stop_request
from so_tui.machine.types import Machine
from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.run_lock import run_lock
from so_tui.runs.state import read_state, write_state, write_state_even_if_full
from so_tui.spec import InputError, Problem, SoTuiError
from so_tui.trust.decoding import decode_json
from so_tui.trust.ownership import read_own

_ENDED_FROM_OUTSIDE = frozenset(
    (
        *(
            OutcomeCode.RANK_LOST,
            OutcomeCode.LAUNCHER_LOST,
            OutcomeCode.RUNNER_LOST,
            OutcomeCode.STOPPED,
            OutcomeCode.UNOBSERVED,
        ),
        *(
            OutcomeCode.NODE_FAILED,
            OutcomeCode.NODE_LOST,
            OutcomeCode.PREEMPTED,
            OutcomeCode.OUT_OF_TIME,
        ),
    )
)
_POLL_S = 0.5


class Restart(Struct, frozen=True, kw_only=True):
    """``restart.<N>.json``: what a job does that was started for the N-th time again."""

    v: int = 1
    attempt: int | None
    """The attempt that it makes; None if the run does not continue."""


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has started this job before."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def attempt_of_restart(
    run: RunDirectory, submitted: int, token: str, machine: Machine, count: int
) -> int:
    """Return the attempt that a job makes when it starts again: the next one, or its own if that was never begun.

    Called on the first node, which tells the others.

    Args:
        run: The run.
        submitted: The attempt that the job was submitted for.
        token: The starter's token that the job was given.
        machine: The node that the job has now.
        count: How often Slurm has started the job before.

    Raises:
        InputError, Refused: The run is not continued (code ``not-continued``), or cannot be resumed here.
    """
    attempt = None
    try:
        attempt = _made_attempt(run, submitted, token, machine)
    finally:
        write_run_file(
            run, run.restart_path(submitted, count), msgspec.json.encode(Restart(attempt=attempt))
        )
    return attempt


def told_attempt(
    run: RunDirectory, submitted: int, count: int, clock: Callable[[], float] = time.monotonic
) -> int:
    """Return the attempt that the job makes, as the first node says. Called on another one. Raises InputError."""
    path, deadline = run.restart_path(submitted, count), clock() + FIRST_SIGN_S
    while True:
        try:
            told = decode_json(read_own(path), Restart)
        except (
            OSError,
            msgspec.DecodeError,
        ):  # not yet, or a network file system is away or has half of it
            if clock() > deadline:
                message, remedy = (
                    "the first node of its job does not say which attempt the job makes",
                    "`so-tui resume` continues the run.",
                )
                problem = Problem(
                    code="first-node-silent",
                    field="run",
                    value=run.name,
                    message=message,
                    remedy=remedy,
                )
                raise InputError([problem]) from None
            time.sleep(_POLL_S)
            continue
        if told.attempt is None:
            message, remedy = (
                "does not continue, as the first node of its job says",
                "`so-tui resume` continues it.",
            )
            raise InputError(
                [
                    Problem(
                        code="not-continued",
                        field="run",
                        value=run.name,
                        message=message,
                        remedy=remedy,
                    )
                ]
            )
        return told.attempt


def _made_attempt(run: RunDirectory, submitted: int, token: str, machine: Machine) -> int:
    from so_tui.launch.lifecycle import resume
    from so_tui.launch.preparation import prepare_resume

    state = read_state(run)
    if state.attempt < submitted:
        return submitted
    if not may_continue(run, state):
        message, remedy = (
            f"is {state.state} ({state.code or 'by a person'})",
            "`so-tui resume` continues it.",
        )
        raise InputError(
            [
                Problem(
                    code="not-continued",
                    field="run",
                    value=run.name,
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    _leave_queue(run)
    executor = SlurmExecutor(
        restarted=Restarted(job_id=_this_job(), works_in=submitted, token=token)
    )
    return resume(run, prepare_resume(run, machine, assume_dead=True), executor=executor)


def put_back(run: RunDirectory) -> None:
    """Put this job back into the queue, and record that. If Slurm refuses, the run stays stopped, and can be resumed."""
    with run_lock(run) as lock:
        if lock is None:
            return
        stopped = read_state(run)
        write_state(run, queued_state(stopped))
    try:
        commands.requeue(_this_job())
    except SoTuiError as error:
        print(
            f"so-tui: the job of {run.name} is not started again: {error}",
            file=sys.stderr,
            flush=True,
        )
        write_state(run, stopped)


def may_continue(run: RunDirectory, state: RunState) -> bool:
    """Return whether something else than the run itself or a person ended it."""
    asked = stop_request(run)
    by_a_person = asked is not None and not asked.warned and not asked.signalled
    return not by_a_person and (
        state.state not in FINAL_STATES or state.code in _ENDED_FROM_OUTSIDE
    )


def _this_job() -> str:
    """Return the number of the job that this process belongs to, which may not have been recorded."""
    return os.environ["SLURM_JOB_ID"]


def _leave_queue(run: RunDirectory) -> None:
    """Record that a run which waited for this job has an attempt behind it that was stopped."""
    with run_lock(run) as lock:
        state = read_state(run)
        if lock is not None and state.state == "queued":
            write_state_even_if_full(run, left_queue(state))
