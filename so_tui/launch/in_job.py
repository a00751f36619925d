"""The supervisor inside a scheduler's job: it plans for the node that the job got, supervises, and
continues in another job if need be.

A plan's binding means nothing on other hardware, and the submitting host knows its nodes only by a
description. So the job inspects its node and plans the same settings again; what was submitted
stays as it was confirmed, where it fits. Only if it was chosen for the submitting host, which stood
for nodes that nobody had described, is it chosen anew for the node.
"""

from __future__ import annotations

import os
import sys
import time

from msgspec import Struct
from msgspec.structs import replace

from so_tui.launch.checks import keeping_what_fits, refuse_full_disk, saved_checkpoints
from so_tui.launch.command import log_line
from so_tui.launch.launch import prepare, prepare_again, prepare_resume, read_launch, write_launch
from so_tui.launch.places import keep_network, remember, with_measured_network
from so_tui.launch.slurm import client
from so_tui.launch.slurm.executor import SlurmExecutor, Submission, read_submission
from so_tui.launch.slurm.script import load_site
from so_tui.launch.supervisor import ending
from so_tui.launch.supervisor import run as admission
from so_tui.launch.supervisor.ending import (
    Outcome,
    left_queue,
    not_started,
    queued_state,
    stop_request,
)
from so_tui.launch.supervisor.host import Nodes, nodes_of_job, numbered
from so_tui.launch.supervisor.node import FIRST_SIGN_S, NodeState, NodeSupervisor
from so_tui.launch.supervisor.processes import become_subreaper
from so_tui.launch.supervisor.run import supervise
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.plan.plan import Launch
from so_tui.runs.directory import RunDirectory, own_run, write_run_json
from so_tui.runs.lock import run_lock
from so_tui.runs.records import FINAL_STATES, OutcomeCode, RunState
from so_tui.runs.samples import read_network_rate
from so_tui.runs.state import read_state, write_spec, write_state, write_state_even_if_full
from so_tui.spec import SoTuiError
from so_tui.spec.errors import reject
from so_tui.trust.decoding import readable_json
from so_tui.trust.folders import umask_of

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


class _Restart(Struct, frozen=True, kw_only=True):
    """``restart.<N>.json``: what a job does that was started for the N-th time again."""

    v: int = 1
    attempt: int | None
    """The attempt that it makes; None if the run does not continue."""
    launch: str | None = None
    """The hash of its launch, if the job has prepared it."""


def _told_attempt(run: RunDirectory, submitted: int, count: int) -> tuple[int, str | None]:
    """Return the attempt that the job makes, and the hash of its launch, as the first node says.
    Called on another one. Raises InputError.
    """
    path, deadline = run.restart_path(submitted, count), time.monotonic() + FIRST_SIGN_S
    # Not yet there, or a network file system is away or has half of it.
    while (told := readable_json(path, _Restart, own=True)) is None:
        if time.monotonic() > deadline:
            raise reject(
                "first-node-silent",
                "run",
                run.name,
                "the first node of its job does not say which attempt the job makes",
                "`so-tui resume` continues the run.",
            )
        time.sleep(_POLL_S)
    if told.attempt is None:
        raise reject(
            "not-continued",
            "run",
            run.name,
            "does not continue, as the first node of its job says",
            "`so-tui resume` continues it.",
        )
    return told.attempt, told.launch


def _attempt_of_restart(
    run: RunDirectory, submitted: int, machine: Machine, count: int
) -> tuple[int, str | None]:
    """Return the attempt that a job makes when it starts again, and the hash of its launch: the
    next one, or its own if that was never begun. Then the hash is unknown, because the first start
    may have planned the attempt again.

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
    attempt = digest = None
    try:
        state = read_state(run)
        if state.attempt < submitted:
            attempt = submitted
        elif _may_continue(run, state):
            with run_lock(run) as lock:
                state = read_state(run)
                if lock is not None and state.state == "queued":
                    # The attempt before this job's was stopped.
                    write_state_even_if_full(run, left_queue(state, state.attempt))
            this_job = SlurmExecutor(job_id=os.environ["SLURM_JOB_ID"], works_in=submitted)
            attempt = _make_attempt(run, machine, this_job, assume_dead=True)
            digest = this_job.digest
        else:
            raise reject(
                "not-continued",
                "run",
                run.name,
                f"is {state.state} ({state.code or 'by a person'})",
                "`so-tui resume` continues it.",
            )
        return attempt, digest
    finally:
        write_run_json(
            run, run.restart_path(submitted, count), _Restart(attempt=attempt, launch=digest)
        )


def _make_attempt(
    run: RunDirectory, machine: Machine, executor: SlurmExecutor, *, assume_dead: bool
) -> int:
    """Make the next attempt of a run, which continues from the newest checkpoint, and return its
    number: in a job that is submitted for it, or in this one, which Slurm has started again.
    """
    from so_tui.launch.lifecycle import resume

    return resume(run, prepare_resume(run, machine, assume_dead=assume_dead), executor=executor)


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
        client.requeue(os.environ["SLURM_JOB_ID"])  # which may not have been recorded
    except SoTuiError as error:
        log_line(f"so-tui: the job of {run.name} is not started again: {error}")
        write_state(run, stopped)


def _may_continue(run: RunDirectory, state: RunState) -> bool:
    """Return whether something else than the run itself or a person ended it."""
    asked = stop_request(run)
    return (asked is None or not asked.by_a_person) and (
        state.state not in FINAL_STATES or state.code in _ENDED_FROM_OUTSIDE
    )


def supervise_in_job(run: RunDirectory, attempt: int, digest: str | None = None) -> int:
    """Plan the attempt for this node, supervise it to its end, and submit its successor if the time
    limit ended it.

    Of a job on several nodes, the first one's supervisor does what concerns the whole run.

    Args:
        run: A run of this user.
        attempt: An attempt that was submitted.
        digest: The hash of its launch; None in the script of an earlier version, where nothing is
            compared.

    Returns:
        The run's exit code.

    Raises:
        InputError, Refused: This may not be done here (see ``admission``).
        OSError: The run directory cannot be written.
    """
    with own_run(run) as run:
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
        os.umask(umask_of(run.at))
        nodes = nodes_of_job(os.environ)
        machine = with_measured_network(submission.cluster, submission.partition, inspect_machine())
        if again := int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            attempt, digest = (
                _attempt_of_restart(run, attempt, machine, again)
                if nodes.first
                else _told_attempt(run, attempt, again)
            )
            submission = read_submission(run, attempt) or submission
        if nodes.first:
            admission.refuse_start(run, attempt, read_state(run))
            remember(submission.cluster, submission.partition, machine)
        # Jobs of earlier versions have one launch for all nodes until each has written its own.
        written = nodes.node if run.launch_path(attempt, nodes.node).exists() else 0
        submitted = read_launch(run, attempt, digest, node=written)
        try:
            here = _planned_here(submitted, machine, nodes.node, anew=submission.stands_in)
            launch = _fitting_the_disk(run, here)
            made = write_launch(run, attempt, launch, nodes.node)
        except SoTuiError as error:
            print(error, file=sys.stderr, flush=True)
            return _not_started(run, attempt, submitted, nodes, machine, not_started(error))
        if nodes.first:
            if submission.stands_in and launch.spec.nodes == 1:
                write_spec(run, launch.spec)  # what later attempts keep
            return _supervise_run(run, attempt, submission, launch, made, nodes)
        become_subreaper()
        return NodeSupervisor(run, attempt, launch, made, nodes).watch()


def _supervise_run(
    run: RunDirectory,
    attempt: int,
    submission: Submission,
    launch: Launch,
    digest: str,
    nodes: Nodes,
) -> int:
    """Supervise the run from its first node, and have it continued. Return the run's exit code."""
    before = read_state(run)

    def goes_on(*, requeue: bool) -> bool:
        return (
            launch.spec.slurm.continues
            and _goes_on(run, before, start_over=launch.start_over, requeue=requeue)
            and load_site(submission.site).requeue is requeue
        )

    def ended() -> None:
        if (rate := read_network_rate(run, attempt)) is not None:
            keep_network(
                submission.cluster,
                submission.partition,
                launch.machine,
                rate,
                len(launch.plan.binding),
            )
        if goes_on(requeue=False):
            try:
                _make_attempt(run, launch.machine, SlurmExecutor(), assume_dead=False)
            except (SoTuiError, OSError) as error:  # the run stays stopped, and can be resumed
                log_line(f"so-tui: no job continues {run.name}: {error}")

    code = supervise(run, attempt, digest, nodes, ended)
    if goes_on(requeue=True):
        _put_back(run)  # last, for it ends what this job still does
    return code


def _planned_here(submitted: Launch, machine: Machine, node: int, *, anew: bool = False) -> Launch:
    """Return a submitted launch planned again for this host, a node of the job. Raises InputError
    or Refused, as ``prepare``.

    Nodes of one job plan by themselves, and must train with the same settings: where there are
    several, the submitted ones stay.

    Args:
        submitted: What was submitted.
        machine: This host.
        node: Its number in the job.
        anew: Whether what nobody set was chosen for a host that stood for unknown nodes.
    """
    spec = submitted.spec
    if anew and spec.nodes == 1:
        here = prepare(spec, machine, force=submitted.forced)
    else:
        here = prepare_again(spec, machine, force=submitted.forced, as_they_are=spec.nodes > 1)
    for text in here.plan.replaced_texts:
        log_line(f"so-tui: {text}")
    return replace(
        submitted,
        plan=replace(here.plan, binding=numbered(here.plan.binding, node)),
        machine=here.machine,
        ds_config=here.ds_config,
        argv=here.argv,
        environment=here.environment,
        checks_s=None,  # the checks were made before the job waited
    )


def _fitting_the_disk(run: RunDirectory, launch: Launch) -> Launch:
    """Return the launch with as many checkpoints kept as fit now. Raises Refused if too few do."""
    saved = saved_checkpoints(run, launch)
    refuse_full_disk(launch, saved=saved, runs_dir=run.path)
    return keeping_what_fits(launch, saved=saved, runs_dir=run.path)


def _goes_on(run: RunDirectory, before: RunState, *, start_over: bool, requeue: bool) -> bool:
    """Return whether a run shall go on after its job: a scheduler's warning ended it, and no person
    did, or a node that gave no sign of life.

    Slurm itself may notice such a node minutes later, and starts a job again only whose node it has
    seen fail. A job that saved nothing new would be followed by others like it, without end.

    Args:
        run: A run whose job is about to end.
        before: The state that the job found.
        start_over: The job trained from step 0, whatever was saved.
        requeue: Its job is put back into the queue, which a lost node is a reason for, too.
    """
    state, asked = read_state(run), stop_request(run)
    warned = state.state == "stopped" and asked is not None and asked.warned
    lost = requeue and state.code == OutcomeCode.NODE_LOST and _may_continue(run, state)
    saved_before = 0 if start_over else before.saved_step or 0
    return (warned or lost) and (state.saved_step or 0) > saved_before


def _not_started(
    run: RunDirectory,
    attempt: int,
    submitted: Launch,
    nodes: Nodes,
    machine: Machine,
    outcome: Outcome,
) -> int:
    """Record that the attempt cannot run on this node, and return the exit code."""
    if not nodes.first:
        write_run_json(
            run,
            run.node_path(attempt, nodes.node),
            NodeState(host=machine.hostname, ended=True, outcome=outcome),
        )
        return outcome.run_exit_code
    with run_lock(run, assume_dead=submitted.assume_dead) as lock:
        if lock is not None:
            first = ending.first_state(run.name, attempt, read_state(run), submitted)
            write_state_even_if_full(
                run, ending.final_state(first, outcome, first.attempt_started or 0.0)
            )
    return outcome.run_exit_code
