"""The supervisor inside a scheduler's job: it plans for the node that the job got, supervises, and continues in another job if need be.

A plan's binding means nothing on other hardware, and the submitting host knows its nodes only by a description. So the job inspects its
node and plans the same settings again; what was submitted stays as it was confirmed.
"""

from __future__ import annotations

import os
import sys

import msgspec

from so_tui.launch import admission, run_state
from so_tui.launch.attempt_files import read_launch, write_launch, write_node_launch
from so_tui.launch.evidence import not_started
from so_tui.launch.executors.slurm.executor import Submission, read_submission
from so_tui.launch.executors.slurm.script import requeues
from so_tui.launch.executors.slurm.site import load_site
from so_tui.launch.node_states import NodeState, write_node_state
from so_tui.launch.node_supervisor import NodeSupervisor
from so_tui.launch.nodes import Nodes, nodes_of_job, numbered
from so_tui.launch.outcome_text import RunFacts, outcome_text
from so_tui.launch.partition_machines import keep_network, remember, with_measured_network
from so_tui.launch.preparation import Launch, prepare
from so_tui.launch.processes import become_subreaper
from so_tui.launch.restarts import (
    attempt_of_restart,
    may_continue,
    put_back,
    restarts,
    told_attempt,
)
from so_tui.launch.shutdown import stop_request
from so_tui.launch.supervision import supervise
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.runs.directory import RunDirectory
from so_tui.runs.host import this_host
from so_tui.runs.liveness import identify
from so_tui.runs.network_rate import read_network_rate
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import RunState
from so_tui.runs.run_lock import run_lock
from so_tui.runs.state import read_state, write_state_even_if_full
from so_tui.spec import InputError, Problem, SoTuiError
from so_tui.trust.sharing import umask_of


def supervise_in_job(run: RunDirectory, attempt: int, token: str | None) -> int:
    """Plan the attempt for this node, supervise it to its end, and submit its successor if the time limit ended it.

    Of a job on several nodes, the first one's supervisor does what concerns the whole run.

    Args:
        run: A run of this user.
        attempt: An attempt that was submitted.
        token: The starter's token, from the job's environment.

    Returns:
        The run's exit code.

    Raises:
        InputError, Refused: This may not be done here (see ``admission``).
        OSError: The run directory cannot be written.
    """
    admission.refuse_unknown_attempt(run, attempt)
    submission = read_submission(run, attempt)
    if submission is None or token is None:
        message, remedy = "was not submitted with this job", "Start runs with `so-tui run`."
        raise InputError(
            [
                Problem(
                    code="not-submitted",
                    field="--attempt",
                    value=str(attempt),
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    admission.refuse_wrong_token(run, attempt, token)
    os.umask(umask_of(run.path))
    nodes = nodes_of_job(os.environ)
    machine = with_measured_network(submission.cluster, submission.partition, inspect_machine())
    if again := restarts(os.environ):
        attempt = (
            attempt_of_restart(run, attempt, token, machine, again)
            if nodes.first
            else told_attempt(run, attempt, again)
        )
        submission = read_submission(run, attempt) or submission
    if nodes.first:
        return _supervise_run(run, attempt, token, submission, machine, nodes)
    return _supervise_node(run, attempt, submission, machine, nodes)


def _supervise_run(
    run: RunDirectory,
    attempt: int,
    token: str,
    submission: Submission,
    machine: Machine,
    nodes: Nodes,
) -> int:
    """Plan the attempt for the first node, supervise the run, and have it continued. Return the run's exit code."""
    before = read_state(run)
    admission.refuse_start(run, attempt, before, token)
    remember(submission.cluster, submission.partition, machine)
    submitted = read_launch(run, attempt, submission.planned_for)
    try:
        launch = planned_here(submitted, machine)
        write_launch(run, attempt, launch)
    except SoTuiError as error:
        return _refused_here(run, attempt, submitted, error)
    continues = submitted.spec.slurm.continues

    def warned() -> bool:
        return needs_successor(run, before, start_over=submitted.start_over)

    def requeued() -> bool:
        return requeues(submitted.spec, load_site(submission.site))

    def ended() -> None:
        if (rate := read_network_rate(run, attempt)) is not None:
            keep_network(
                submission.cluster, submission.partition, machine, rate, len(launch.plan.binding)
            )
        if continues and warned() and not requeued():
            _submit_successor(run, machine)

    code = supervise(run, attempt, token, nodes, ended)
    if (
        continues
        and (warned() or lost_a_node(run, before, start_over=submitted.start_over))
        and requeued()
    ):
        put_back(run)  # last, for it ends what this job still does
    return code


def planned_here(submitted: Launch, machine: Machine, node: int = 0) -> Launch:
    """Return a submitted launch planned again for this host, a node of the job. Raises InputError or Refused, as ``prepare``."""
    here = prepare(submitted.spec, machine, force=submitted.forced)
    argv = (*here.argv, "--start-over") if submitted.start_over else here.argv
    return msgspec.structs.replace(
        here,
        plan=msgspec.structs.replace(here.plan, binding=numbered(here.plan.binding, node)),
        argv=argv,
        changes=submitted.changes,
        start_over=submitted.start_over,
        assume_dead=submitted.assume_dead,
    )


def needs_successor(run: RunDirectory, before: RunState, *, start_over: bool) -> bool:
    """Return whether a scheduler's warning ended a run, and no person did, with more saved than before.

    A job that saved nothing new would be followed by others like it, without end.

    Args:
        run: A run whose job is about to end.
        before: The state that the job found.
        start_over: The job trained from step 0, whatever was saved.
    """
    state, asked = read_state(run), stop_request(run)
    return (
        state.state == "stopped"
        and _saved_more(state, before, start_over=start_over)
        and asked is not None
        and asked.warned
    )


def lost_a_node(run: RunDirectory, before: RunState, *, start_over: bool) -> bool:
    """Return whether a node that gave no sign of life ended a run, with more saved than before; otherwise as ``needs_successor``.

    Slurm itself may notice that minutes later. It starts a job again only whose node it has seen fail.
    """
    state = read_state(run)
    return (
        state.code == OutcomeCode.NODE_LOST
        and _saved_more(state, before, start_over=start_over)
        and may_continue(run, state)
    )


def _saved_more(state: RunState, before: RunState, *, start_over: bool) -> bool:
    return (state.saved_step or 0) > (0 if start_over else before.saved_step or 0)


def _supervise_node(
    run: RunDirectory, attempt: int, submission: Submission, machine: Machine, nodes: Nodes
) -> int:
    """Plan the attempt for another node than the first, and supervise it there. Return 0 if it did not fail here."""
    submitted = read_launch(run, attempt, submission.planned_for)
    try:
        launch = planned_here(submitted, machine, nodes.node)
    except SoTuiError as error:
        print(error, file=sys.stderr, flush=True)
        outcome = not_started(error)
        write_node_state(
            run, attempt, nodes.node, NodeState(host=machine.hostname, ended=True, outcome=outcome)
        )
        return outcome.run_exit_code
    write_node_launch(run, attempt, nodes.node, launch)
    become_subreaper()
    return NodeSupervisor(run, attempt, launch, nodes).watch()


def _refused_here(run: RunDirectory, attempt: int, submitted: Launch, error: SoTuiError) -> int:
    """Record that the attempt cannot run on this node."""
    print(error, file=sys.stderr, flush=True)
    outcome = not_started(error)
    with run_lock(run, assume_dead=submitted.assume_dead) as lock:
        if lock is not None:
            before = read_state(run)
            first = run_state.first_state(
                run.name,
                attempt,
                this_host(),
                identify(os.getpid(), "supervisor"),
                before,
                forced=submitted.forced,
            )
            text = outcome_text(outcome, RunFacts(name=run.name, saved_step=before.saved_step))
            write_state_even_if_full(
                run, run_state.final_state(first, outcome, text, first.attempt_started or 0.0)
            )
    return outcome.run_exit_code


def _submit_successor(run: RunDirectory, machine: Machine) -> None:
    """Submit the job that continues. What goes wrong is written to the job's output; the run stays stopped, and can be resumed."""
    from so_tui.launch.lifecycle import resume
    from so_tui.launch.preparation import prepare_resume

    try:
        resume(run, prepare_resume(run, machine))
    except (SoTuiError, OSError) as error:
        print(f"so-tui: no job continues {run.name}: {error}", file=sys.stderr, flush=True)
