"""The supervisor inside a scheduler's job: it plans for the node that the job got, supervises, and
continues in another job if need be.

A plan's binding means nothing on other hardware, and the submitting host knows its nodes only by a
description. So the job inspects its node and plans the same settings again; what was submitted
stays as it was confirmed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from so_tui.launch.command import log_line
from so_tui.launch.launch import prepare, read_launch, write_launch
from so_tui.launch.places import keep_network, remember, with_measured_network
from so_tui.launch.slurm import client
from so_tui.launch.slurm.executor import Restarted, SlurmExecutor, Submission, read_submission
from so_tui.launch.slurm.script import load_site, requeues
from so_tui.launch.supervisor import ending
from so_tui.launch.supervisor import run as admission
from so_tui.launch.supervisor.ending import (
    left_queue,
    not_started,
    queued_state,
    stop_request,
)
from so_tui.launch.supervisor.host import Nodes, nodes_of_job, numbered
from so_tui.launch.supervisor.node import FIRST_SIGN_S, NodeState, NodeSupervisor, write_node_state
from so_tui.launch.supervisor.processes import become_subreaper
from so_tui.launch.supervisor.run import supervise
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.plan.plan import Launch
from so_tui.runs.directory import RunDirectory, write_run_json
from so_tui.runs.liveness import identify, this_host
from so_tui.runs.lock import run_lock
from so_tui.runs.records import FINAL_STATES, OutcomeCode, RunState
from so_tui.runs.samples import read_network_rate
from so_tui.runs.state import read_state, write_state, write_state_even_if_full
from so_tui.spec import SoTuiError
from so_tui.spec.errors import reject
from so_tui.trust.decoding import decode_json
from so_tui.trust.files import read_own, umask_of

# A job that Slurm starts again: after its node has failed, when it has given way to another job,
# or because it asked for that.
#
# Its attempt has ended with the processes of the first start, so the same job makes the next one.
# The first node's supervisor makes it, and tells those of the other nodes its number in
# ``restart.<N>.json``.
#
# Problem codes: not-continued: What ended the run is no reason to go on: it has finished, it
# failed by itself, or a person stopped it. first-node-silent: The first node has not said which
# attempt the job makes.


_ENDED_FROM_OUTSIDE = frozenset(
    {
        OutcomeCode.RANK_LOST,
        OutcomeCode.LAUNCHER_LOST,
        OutcomeCode.RUNNER_LOST,
        OutcomeCode.STOPPED,
        OutcomeCode.UNOBSERVED,
        OutcomeCode.NODE_FAILED,
        OutcomeCode.NODE_LOST,
        OutcomeCode.PREEMPTED,
        OutcomeCode.OUT_OF_TIME,
    }
)
_POLL_S = 0.5


class Restart(Struct, frozen=True, kw_only=True):
    """``restart.<N>.json``: what a job does that was started for the N-th time again."""

    v: int = 1
    attempt: int | None
    """The attempt that it makes; None if the run does not continue."""


def _restarts(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has started this job before."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def _attempt_of_restart(run: RunDirectory, submitted: int, machine: Machine, count: int) -> int:
    """Return the attempt that a job makes when it starts again: the next one, or its own if that
    was never begun.

    Called on the first node, which tells the others.

    Args:
        run: The run.
        submitted: The attempt that the job was submitted for.
        machine: The node that the job has now.
        count: How often Slurm has started the job before.

    Raises:
        InputError, Refused: The run is not continued (code ``not-continued``), or cannot be resumed
            here.
    """
    attempt = None
    try:
        attempt = _made_attempt(run, submitted, machine)
    finally:
        write_run_json(run, run.restart_path(submitted, count), Restart(attempt=attempt))
    return attempt


def _told_attempt(
    run: RunDirectory, submitted: int, count: int, clock: Callable[[], float] = time.monotonic
) -> int:
    """Return the attempt that the job makes, as the first node says. Called on another one. Raises
    InputError.
    """
    path, deadline = run.restart_path(submitted, count), clock() + FIRST_SIGN_S
    while True:
        try:
            told = decode_json(read_own(path), Restart)
        except (
            OSError,
            msgspec.DecodeError,
        ):  # not yet, or a network file system is away or has half of it
            if clock() > deadline:
                raise reject(
                    "first-node-silent",
                    "run",
                    run.name,
                    "the first node of its job does not say which attempt the job makes",
                    "`so-tui resume` continues the run.",
                ) from None
            time.sleep(_POLL_S)
            continue
        if told.attempt is None:
            raise reject(
                "not-continued",
                "run",
                run.name,
                "does not continue, as the first node of its job says",
                "`so-tui resume` continues it.",
            )
        return told.attempt


def _made_attempt(run: RunDirectory, submitted: int, machine: Machine) -> int:
    from so_tui.launch.launch import prepare_resume
    from so_tui.launch.lifecycle import resume

    state = read_state(run)
    if state.attempt < submitted:
        return submitted
    if not _may_continue(run, state):
        raise reject(
            "not-continued",
            "run",
            run.name,
            f"is {state.state} ({state.code or 'by a person'})",
            "`so-tui resume` continues it.",
        )
    _leave_queue(run)
    executor = SlurmExecutor(restarted=Restarted(job_id=_this_job(), works_in=submitted))
    return resume(run, prepare_resume(run, machine, assume_dead=True), executor=executor)


def _put_back(run: RunDirectory) -> None:
    """Put this job back into the queue, and record that. If Slurm refuses, the run stays stopped,
    and can be resumed.
    """
    with run_lock(run) as lock:
        if lock is None:
            return
        stopped = read_state(run)
        write_state(run, queued_state(stopped))
    try:
        client.requeue(_this_job())
    except SoTuiError as error:
        log_line(f"so-tui: the job of {run.name} is not started again: {error}")
        write_state(run, stopped)


def _may_continue(run: RunDirectory, state: RunState) -> bool:
    """Return whether something else than the run itself or a person ended it."""
    asked = stop_request(run)
    return (asked is None or not asked.by_a_person) and (
        state.state not in FINAL_STATES or state.code in _ENDED_FROM_OUTSIDE
    )


def _this_job() -> str:
    """Return the number of the job that this process belongs to, which may not have been
    recorded.
    """
    return os.environ["SLURM_JOB_ID"]


def _leave_queue(run: RunDirectory) -> None:
    """Record that a run which waited for this job has an attempt behind it that was stopped."""
    with run_lock(run) as lock:
        state = read_state(run)
        if lock is not None and state.state == "queued":
            write_state_even_if_full(run, left_queue(state, state.attempt))


def supervise_in_job(run: RunDirectory, attempt: int) -> int:
    """Plan the attempt for this node, supervise it to its end, and submit its successor if the time
    limit ended it.

    Of a job on several nodes, the first one's supervisor does what concerns the whole run.

    Args:
        run: A run of this user.
        attempt: An attempt that was submitted.

    Returns:
        The run's exit code.

    Raises:
        InputError, Refused: This may not be done here (see ``admission``).
        OSError: The run directory cannot be written.
    """
    admission.refuse_unknown_attempt(run, attempt)
    submission = read_submission(run, attempt)
    if submission is None:
        raise reject(
            "not-submitted",
            "--attempt",
            str(attempt),
            "was not submitted with this job",
            "Start runs with `so-tui run`.",
        )
    os.umask(umask_of(run.path))
    nodes = nodes_of_job(os.environ)
    machine = with_measured_network(submission.cluster, submission.partition, inspect_machine())
    if again := _restarts(os.environ):
        attempt = (
            _attempt_of_restart(run, attempt, machine, again)
            if nodes.first
            else _told_attempt(run, attempt, again)
        )
        submission = read_submission(run, attempt) or submission
    if nodes.first:
        return _supervise_run(run, attempt, submission, machine, nodes)
    return _supervise_node(run, attempt, machine, nodes)


def _supervise_run(
    run: RunDirectory,
    attempt: int,
    submission: Submission,
    machine: Machine,
    nodes: Nodes,
) -> int:
    """Plan the attempt for the first node, supervise the run, and have it continued. Return the
    run's exit code.
    """
    before = read_state(run)
    admission.refuse_start(run, attempt, before)
    remember(submission.cluster, submission.partition, machine)
    submitted = read_launch(run, attempt)
    try:
        launch = _planned_here(submitted, machine)
        write_launch(run, attempt, launch)
    except SoTuiError as error:
        return _refused_here(run, attempt, submitted, error)
    spec, start_over = submitted.spec, submitted.start_over

    def requeued() -> bool:
        return requeues(spec, load_site(submission.site))

    def ended() -> None:
        if (rate := read_network_rate(run, attempt)) is not None:
            keep_network(
                submission.cluster, submission.partition, machine, rate, len(launch.plan.binding)
            )
        warned = spec.slurm.continues and _needs_successor(run, before, start_over=start_over)
        if warned and not requeued():
            _submit_successor(run, machine)

    code = supervise(run, attempt, nodes, ended)
    if (
        spec.slurm.continues
        and (
            _needs_successor(run, before, start_over=start_over)
            or _lost_a_node(run, before, start_over=start_over)
        )
        and requeued()
    ):
        _put_back(run)  # last, for it ends what this job still does
    return code


def _planned_here(submitted: Launch, machine: Machine, node: int = 0) -> Launch:
    """Return a submitted launch planned again for this host, a node of the job. Raises InputError
    or Refused, as ``prepare``.
    """
    here = prepare(submitted.spec, machine, force=submitted.forced)
    return msgspec.structs.replace(
        submitted,
        plan=msgspec.structs.replace(here.plan, binding=numbered(here.plan.binding, node)),
        machine=here.machine,
        ds_config=here.ds_config,
        argv=here.argv,
        environment=here.environment,
        checks_s=None,  # the checks were made before the job waited
    )


def _needs_successor(run: RunDirectory, before: RunState, *, start_over: bool) -> bool:
    """Return whether a scheduler's warning ended a run, and no person did, with more saved than
    before.

    A job that saved nothing new would be followed by others like it, without end.

    Args:
        run: A run whose job is about to end.
        before: The state that the job found.
        start_over: The job trained from step 0, whatever was saved.
    """
    state, asked = read_state(run), stop_request(run)
    return (
        state.state == "stopped"
        and asked is not None
        and asked.warned
        and _saved_more(state, before, start_over=start_over)
    )


def _saved_more(state: RunState, before: RunState, *, start_over: bool) -> bool:
    return (state.saved_step or 0) > (0 if start_over else before.saved_step or 0)


def _lost_a_node(run: RunDirectory, before: RunState, *, start_over: bool) -> bool:
    """Return whether a node that gave no sign of life ended a run, with more saved than before;
    otherwise as ``_needs_successor``.

    Slurm itself may notice that minutes later. It starts a job again only whose node it has seen
    fail.
    """
    state = read_state(run)
    return (
        state.code == OutcomeCode.NODE_LOST
        and _saved_more(state, before, start_over=start_over)
        and _may_continue(run, state)
    )


def _supervise_node(run: RunDirectory, attempt: int, machine: Machine, nodes: Nodes) -> int:
    """Plan the attempt for another node than the first, and supervise it there. Return 0 if it did
    not fail here.
    """
    submitted = read_launch(run, attempt)
    try:
        launch = _planned_here(submitted, machine, nodes.node)
    except SoTuiError as error:
        print(error, file=sys.stderr, flush=True)
        outcome = not_started(error)
        write_node_state(
            run, attempt, nodes.node, NodeState(host=machine.hostname, ended=True, outcome=outcome)
        )
        return outcome.run_exit_code
    write_launch(run, attempt, launch, nodes.node)
    become_subreaper()
    return NodeSupervisor(run, attempt, launch, nodes).watch()


def _refused_here(run: RunDirectory, attempt: int, submitted: Launch, error: SoTuiError) -> int:
    """Record that the attempt cannot run on this node."""
    print(error, file=sys.stderr, flush=True)
    outcome = not_started(error)
    with run_lock(run, assume_dead=submitted.assume_dead) as lock:
        if lock is not None:
            before = read_state(run)
            first = ending.first_state(
                run.name,
                attempt,
                this_host(),
                identify(os.getpid(), "supervisor"),
                before,
                submitted,
            )
            write_state_even_if_full(
                run, ending.final_state(first, outcome, first.attempt_started or 0.0)
            )
    return outcome.run_exit_code


def _submit_successor(run: RunDirectory, machine: Machine) -> None:
    """Submit the job that continues. What goes wrong is written to the job's output; the run stays
    stopped, and can be resumed.
    """
    from so_tui.launch.launch import prepare_resume
    from so_tui.launch.lifecycle import resume

    try:
        resume(run, prepare_resume(run, machine))
    except (SoTuiError, OSError) as error:
        log_line(f"so-tui: no job continues {run.name}: {error}")
