"""Jobs that Slurm starts again; tests/slurm has the real one."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch import in_job
from so_tui.launch.in_job import _attempt_of_restart, _put_back, _told_attempt
from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import current_state, start, stop
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import Job, SlurmError
from so_tui.launch.slurm.executor import _write_submission, read_submission
from so_tui.launch.slurm.script import Site, batch_script
from so_tui.launch.supervisor.ending import queued_state, request_stop
from so_tui.launch.supervisor.run import refuse_start
from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, read_state, write_state
from so_tui.runs.records import OutcomeCode
from so_tui.spec import InputError
from tests.support.launching import tiny
from tests.support.plans import plan_of
from tests.support.problems import rejected

MACHINE = inspect_machine()


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(client, "cancel", found.append)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that trains in job 7, which Slurm has started again since."""
    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    monkeypatch.setattr(client, "submit", lambda *_: "7")
    monkeypatch.setattr(client, "accounted", lambda _: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = start(prepare(tiny(slurm__partition="gh"), MACHINE), runs_dir=tmp_path / "runs")
    write_state(
        run, replace(read_state(run), state="training", attempt=1, host="n1", boot_id="another")
    )
    return run


def answer(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, state: str) -> None:
    jobs = (Job(id="7", state=state, folder=str(run.attempt_dir(1))),)
    monkeypatch.setattr(client, "own_jobs", lambda: jobs)


def recorded(run: RunDirectory, state: str, code: str = "", **others: object) -> None:
    write_state(run, replace(read_state(run), state=state, code=code, **others))


def told_soon(run: RunDirectory, number: int) -> Future[int]:
    """Wait in a thread for what another node is told."""
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(_told_attempt, run, 1, number)
    pool.shutdown(wait=False)
    return waiting


@pytest.mark.parametrize(
    ("allowed", "nodes", "option"),
    [(True, 1, "--requeue"), (True, 2, "--requeue"), (False, 2, "--no-requeue")],
)
def test_jobs_restart_where_the_profile_allows(allowed: bool, nodes: int, option: str) -> None:
    spec = tiny(slurm__partition="gh", nodes=str(nodes))
    script = batch_script(plan_of(spec), Site(title="Ours", requeue=allowed), Path("/runs/x"), 1)
    assert f"#SBATCH {option}\n" in script


def test_the_job_makes_the_next_attempt(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(run.state_path, (1.0, 1.0))
    assert _attempt_of_restart(run, 1, MACHINE, 1) == 2
    state = read_state(run)
    assert state.state == "queued"
    refuse_start(run, 2, state)
    submission = read_submission(run, 2)
    assert submission is not None
    assert (submission.job_id, submission.works_in) == ("7", 1)
    answer(monkeypatch, run, "PENDING")
    assert (
        "7" in current_state(run).detail
    )  # it is found although it works in the first attempt's folder


def test_the_other_nodes_are_told_which_attempt_their_job_makes(run: RunDirectory) -> None:
    made = []
    for start_number in (1, 2):
        waiting = told_soon(run, start_number)
        os.utime(run.state_path, (1.0, 1.0))
        made.append(_attempt_of_restart(run, 1, MACHINE, start_number))
        assert waiting.result(10) == made[-1]
        write_state(
            run,
            replace(
                read_state(run), state="training", attempt=made[-1], host="n1", boot_id="another"
            ),
        )
    assert made == [2, 3]


def test_other_nodes_are_told_of_the_end(run: RunDirectory) -> None:
    write_state(run, replace(read_state(run), state="finished", code=OutcomeCode.FINISHED))
    waiting = told_soon(run, 1)
    with pytest.raises(InputError):
        _attempt_of_restart(run, 1, MACHINE, 1)
    with rejected("not-continued"):
        waiting.result(10)


def test_silent_first_node_is_not_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = count(step=1e6)
    monkeypatch.setattr("so_tui.launch.in_job.time.monotonic", lambda: next(now))
    with rejected("first-node-silent"):
        _told_attempt(run, 1, 1)


def test_an_attempt_that_was_never_begun_is_begun(run: RunDirectory) -> None:
    write_state(run, replace(read_state(run), state="queued", attempt=0, host=""))
    assert _attempt_of_restart(run, 1, MACHINE, 1) == 1
    assert run.attempts() == (1,)


@pytest.mark.parametrize(
    "code",
    [
        OutcomeCode.FINISHED,
        OutcomeCode.OUT_OF_GPU_MEMORY,
        OutcomeCode.NON_FINITE,
        OutcomeCode.JOB_CANCELLED,
    ],
)
def test_a_run_that_ended_by_itself_does_not_continue(code: str, run: RunDirectory) -> None:
    recorded(run, "finished" if code == OutcomeCode.FINISHED else "failed", code)
    with rejected("not-continued"):
        _attempt_of_restart(run, 1, MACHINE, 1)
    assert run.attempts() == (1,)


@pytest.mark.parametrize(
    ("asked", "continues"),
    [
        ([{}], False),
        ([{"signalled": True}], True),
        ([{"warned": True}], True),
        ([{}, {"signalled": True}, {"warned": True}], False),
    ],
)
def test_a_run_that_a_person_stopped_does_not_continue(
    asked: list[dict[str, bool]], continues: bool, run: RunDirectory
) -> None:
    """A scheduler that ends a job sends signals; neither they nor its warning replace what a person
    wants.
    """
    for how in asked:
        request_stop(run, **how)
    recorded(run, "stopped", OutcomeCode.STOPPED)
    if continues:
        assert _attempt_of_restart(run, 1, MACHINE, 1) == 2
        return
    with pytest.raises(InputError):
        _attempt_of_restart(run, 1, MACHINE, 1)


def test_a_job_that_waits_again_is_shown_and_can_be_cancelled(
    run: RunDirectory, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, run, "PENDING")
    assert current_state(run).state == "training"  # its heartbeat is newer than what Slurm said
    os.utime(run.state_path, (1.0, 1.0))
    assert current_state(run).state == "queued"
    assert stop(run).state == "stopped"
    assert (cancelled, read_state(run).state) == (["7"], "stopped")


def test_dequeued_run_is_not_continued(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm was away when the person stopped the run, and starts its job again all the same."""

    def away() -> tuple[Job, ...]:
        raise SlurmError("no answer")

    monkeypatch.setattr(client, "own_jobs", away)
    recorded(run, "stopped", OutcomeCode.STOPPED)
    write_state(run, queued_state(read_state(run)))
    assert stop(run, assume_dead=True).state == "stopped"
    with rejected("not-continued"):
        _attempt_of_restart(run, 1, MACHINE, 1)
    assert run.attempts() == (1,)


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_near_its_time_limit_is_put_back(
    refused: bool, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[str] = []

    def requeue(job_id: str) -> None:
        put.append(job_id)
        if refused:
            raise SlurmError("scontrol refused")

    monkeypatch.setattr(client, "requeue", requeue)
    stopped = replace(read_state(run), state="stopped", code=OutcomeCode.STOPPED, saved_step=4)
    write_state(run, stopped)
    _put_back(run)
    assert put == ["7"]
    assert read_state(run).state == ("stopped" if refused else "queued")
    assert read_state(run).saved_step == 4


def test_job_without_number_is_put_back(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its number could not be recorded."""
    put: list[str] = []
    monkeypatch.setattr(client, "requeue", put.append)
    submission = read_submission(run, 1)
    assert submission is not None
    _write_submission(run, 1, replace(submission, job_id=""))
    recorded(run, "stopped", OutcomeCode.STOPPED, saved_step=4)
    _put_back(run)
    assert put == ["7"]


def test_run_without_successor_may_be_deleted_at_its_end(
    tmp_path: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleted_meanwhile(of: RunDirectory, *_: object) -> int:
        shutil.rmtree(of.path)
        return 7

    monkeypatch.setattr(in_job, "supervise", deleted_meanwhile)
    once = start(
        prepare(tiny(slurm__partition="gh", slurm__continues="false"), MACHINE),
        runs_dir=tmp_path / "once",
    )
    mask = os.umask(0o022)
    try:
        assert in_job.supervise_in_job(once, 1) == 7
    finally:
        os.umask(mask)
