"""Jobs that Slurm starts again, and jobs that continue a run whose job has ended."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.in_job import _attempt_of_restart, _goes_on, _put_back, _told_attempt
from so_tui.launch.launch import Job, prepare, read_launch
from so_tui.launch.lifecycle import current_state, start, stop
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError
from so_tui.launch.slurm.executor import _write_submission, read_submission
from so_tui.launch.supervisor.ending import queued_state, request_stop
from so_tui.launch.supervisor.run import refuse_start
from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, read_spec, read_state, write_state
from so_tui.runs.records import OutcomeCode, RunState
from tests.support.launching import tiny
from tests.support.problems import raising, rejected
from tests.support.records import change_state

pytestmark = pytest.mark.usefixtures("_cluster")
MACHINE = inspect_machine()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that trains in job 7, which Slurm has started again since."""
    monkeypatch.setattr(client, "submit", lambda *_: "7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = start(prepare(tiny(slurm__partition="gh"), MACHINE), runs_dir=tmp_path / "runs")
    trains(run, 1)
    return run


def trains(run: RunDirectory, attempt: int) -> None:
    change_state(run, state="training", attempt=attempt, host="n1", boot_id="another")


def says_pending(monkeypatch: pytest.MonkeyPatch, run: RunDirectory) -> None:
    jobs = (Job(id="7", state="PENDING", folder=str(run.attempt_dir(1))),)
    monkeypatch.setattr(client, "own_jobs", lambda: jobs)


def told_soon(run: RunDirectory, number: int) -> Future[tuple[int, str | None]]:
    """Wait in a thread for what another node is told."""
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(_told_attempt, run, 1, number)
    pool.shutdown(wait=False)
    return waiting


def is_not_continued(run: RunDirectory) -> None:
    with rejected("not-continued"):
        _attempt_of_restart(run, 1, MACHINE, 1)
    assert run.attempts() == (1,)


def test_the_job_makes_the_next_attempt(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(run.state_path, (1.0, 1.0))
    attempt, digest = _attempt_of_restart(run, 1, MACHINE, 1)
    assert attempt == 2
    assert read_launch(run, 2, digest).spec == read_spec(run)
    state = read_state(run)
    assert state.state == "queued"
    refuse_start(run, 2, state)
    submission = read_submission(run, 2)
    assert submission is not None
    assert (submission.job_id, submission.works_in) == ("7", 1)
    says_pending(monkeypatch, run)
    # It is found although it works in the first attempt's folder.
    assert "7" in current_state(run).detail


def test_the_other_nodes_are_told_which_attempt_their_job_makes(run: RunDirectory) -> None:
    made = []
    for start_number in (1, 2):
        waiting = told_soon(run, start_number)
        os.utime(run.state_path, (1.0, 1.0))
        made.append(_attempt_of_restart(run, 1, MACHINE, start_number))
        assert waiting.result(10) == made[-1]
        trains(run, made[-1][0])
    assert [attempt for attempt, _ in made] == [2, 3]
    assert all(digest for _, digest in made)
    change_state(run, state="finished", code=OutcomeCode.FINISHED)
    waiting = told_soon(run, 3)
    for end in (partial(_attempt_of_restart, run, 1, MACHINE, 3), partial(waiting.result, 10)):
        with rejected("not-continued"):
            end()


def test_silent_first_node_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    now = count(step=1e6)
    monkeypatch.setattr("so_tui.launch.in_job.time.monotonic", lambda: next(now))
    with rejected("first-node-silent"):
        _told_attempt(run, 1, 1)


def test_an_attempt_that_was_never_begun_is_begun(run: RunDirectory) -> None:
    change_state(run, state="queued", attempt=0, host="")
    assert _attempt_of_restart(run, 1, MACHINE, 1) == (1, None)
    assert run.attempts() == (1,)


@pytest.mark.parametrize(
    ("asked", "state", "code", "continues"),
    [
        ([{}], "stopped", OutcomeCode.STOPPED, False),
        ([{"signalled": True}], "stopped", OutcomeCode.STOPPED, True),
        ([{"warned": True}], "stopped", OutcomeCode.STOPPED, True),
        ([{}, {"signalled": True}, {"warned": True}], "stopped", OutcomeCode.STOPPED, False),
        ([], "finished", OutcomeCode.FINISHED, False),
        ([], "failed", OutcomeCode.NON_FINITE, False),
        ([], "failed", OutcomeCode.JOB_CANCELLED, False),
    ],
)
def test_a_run_that_a_person_stopped_does_not_continue(
    asked: list[dict[str, bool]], state: str, code: str, continues: bool, run: RunDirectory
) -> None:
    """Nor one that ended by itself. A scheduler's signals do not replace what a person wants."""
    for how in asked:
        request_stop(run, **how)
    change_state(run, state=state, code=code)
    if continues:
        assert _attempt_of_restart(run, 1, MACHINE, 1)[0] == 2
    else:
        is_not_continued(run)


def test_a_job_that_waits_again_is_shown_and_can_be_cancelled(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[str] = []
    monkeypatch.setattr(client, "cancel", cancelled.append)
    says_pending(monkeypatch, run)
    assert current_state(run).state == "training"  # its heartbeat is newer than what Slurm said
    os.utime(run.state_path, (1.0, 1.0))
    assert current_state(run).state == "queued"
    assert stop(run).state == "stopped"
    assert (cancelled, read_state(run).state) == (["7"], "stopped")


def test_dequeued_run_is_not_continued(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm was away when the person stopped the run, and starts its job again all the same."""
    monkeypatch.setattr(client, "own_jobs", raising(SlurmError("no answer")))
    change_state(run, state="stopped", code=OutcomeCode.STOPPED)
    write_state(run, queued_state(read_state(run)))
    assert stop(run, assume_dead=True).state == "stopped"
    is_not_continued(run)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("recorded", ["7", ""])
def test_a_job_near_its_time_limit_is_put_back(
    refused: bool, recorded: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its number could not be recorded."""
    put: list[str] = []

    def requeue(job_id: str) -> None:
        put.append(job_id)
        if refused:
            raise SlurmError("scontrol refused")

    monkeypatch.setattr(client, "requeue", requeue)
    submission = read_submission(run, 1)
    assert submission is not None
    _write_submission(run, 1, replace(submission, job_id=recorded))
    change_state(run, state="stopped", code=OutcomeCode.STOPPED, saved_step=4)
    _put_back(run)
    assert put == ["7"]
    assert read_state(run).state == ("stopped" if refused else "queued")
    assert read_state(run).saved_step == 4


# Whether another job continues a run whose job has ended.

WARNED = {"warned": True}
PERSON: dict[str, bool] = {}


@pytest.mark.parametrize(
    ("state", "saved_before", "saved", "asked", "start_over", "continues"),
    [
        ("stopped", 100, 20, [WARNED], True, True),  # what was saved before was discarded
        ("stopped", None, 10, [WARNED], False, True),
        ("stopped", 10, 20, [WARNED], False, True),
        ("stopped", 10, 10, [WARNED], False, False),
        ("stopped", 10, None, [WARNED], False, False),
        ("stopped", None, 0, [WARNED], False, False),
        ("finished", None, 20, [WARNED], False, False),
        ("failed", None, 20, [WARNED], False, False),
        # Whether the person or the warning came first.
        ("stopped", None, 20, [WARNED, PERSON], False, False),
        ("stopped", None, 20, [PERSON, WARNED], False, False),
    ],
)
def test_only_a_warned_run_that_saved_anew_has_a_successor(
    state: str,
    saved_before: int | None,
    saved: int | None,
    asked: list[dict[str, bool]],
    start_over: bool,
    continues: bool,
    run: RunDirectory,
) -> None:
    for how in asked:
        request_stop(run, **how)
    change_state(run, state=state, saved_step=saved)
    before = RunState(name=run.name, state="queued", saved_step=saved_before)
    for requeue in (False, True):
        assert _goes_on(run, before, start_over=start_over, requeue=requeue) is continues


@pytest.mark.parametrize(
    ("code", "saved_step", "by_a_person", "lost"),
    [
        (OutcomeCode.NODE_LOST, 20, False, True),
        (OutcomeCode.NODE_LOST, 10, False, False),
        (OutcomeCode.NODE_LOST, 20, True, False),
        (OutcomeCode.NON_FINITE, 20, False, False),
    ],
)
def test_a_run_that_lost_a_node_continues_if_it_saved_something(
    code: OutcomeCode, saved_step: int, by_a_person: bool, lost: bool, run: RunDirectory
) -> None:
    if by_a_person:
        request_stop(run)
    change_state(run, state="failed", code=code, saved_step=saved_step)
    before = RunState(name=run.name, state="queued", saved_step=10)
    assert _goes_on(run, before, start_over=False, requeue=True) is lost
    assert not _goes_on(run, before, start_over=False, requeue=False)
