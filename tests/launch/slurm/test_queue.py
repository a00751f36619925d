"""What is shown of a job that waits, and what a run directory written by somebody else can make of
it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from so_tui.launch.launch import JobPhase, JobStatus
from so_tui.launch.lifecycle import _queue_text, current_state, stop
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import Job, SlurmError
from so_tui.launch.slurm.executor import (
    SlurmExecutor,
    Submission,
    _write_submission,
    read_submission,
)
from so_tui.launch.supervisor.run import refuse_start
from so_tui.runs import RunDirectory, create_run, new_attempt, read_state, write_state
from so_tui.runs.listing import delete_run
from so_tui.runs.records import OutcomeCode, RunState
from tests.support.launching import tiny
from tests.support.problems import rejected

SUBMITTED = Submission(
    job_id="7",
    cluster="here",
    partition="gh",
    site="generic",
    poll_s=30,
    submitted=0.0,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that was submitted as job 7 of the cluster ``here``, with a queue file of the test's
    own.
    """
    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    monkeypatch.setattr(client, "accounted", lambda _: None)
    run = create_run(tiny(slurm__partition="gh"), tmp_path / "runs")
    _write_submission(run, new_attempt(run), SUBMITTED)
    write_state(run, msgspec.structs.replace(read_state(run), state="queued"))
    return run


def answer(monkeypatch: pytest.MonkeyPatch, *jobs: Job) -> None:
    monkeypatch.setattr(client, "own_jobs", lambda: jobs)


def away(*_: object) -> NoReturn:
    raise SlurmError("Slurm did not answer within 20 s")


def job_of(run: RunDirectory, state: str, reason: str = "") -> Job:
    return Job(id="7", state=state, reason=reason, folder=folder_of(run))


def trains(run: RunDirectory, **others: object) -> RunState:
    """Record that the run trains on another host."""
    values = {"state": "training", "attempt": 1, "host": "n1", **others}
    state = msgspec.structs.replace(read_state(run), **values)
    write_state(run, state)
    return state


def folder_of(run: RunDirectory) -> str:
    """Return the working folder of the run's job."""
    return str(run.attempt_dir(1))


@pytest.mark.parametrize(
    ("slurm", "state", "code"),
    [
        ("TIMEOUT", "lost", OutcomeCode.OUT_OF_TIME),
        ("NODE_FAIL", "lost", OutcomeCode.NODE_FAILED),
        ("PREEMPTED", "lost", OutcomeCode.PREEMPTED),
        ("CANCELLED", "stopped", OutcomeCode.JOB_CANCELLED),
        ("FAILED", "lost", OutcomeCode.JOB_FAILED),
        ("COMPLETED", "lost", OutcomeCode.JOB_FAILED),
    ],
)
def test_the_ends_of_a_job_are_told_apart_and_recorded(
    slurm: str, state: str, code: OutcomeCode, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, job_of(run, slurm))
    found = current_state(run)
    assert (found.state, found.code, found.attempt) == (state, code, 1)
    answer(monkeypatch)
    assert read_state(run) == found


def test_why_a_job_failed_is_said(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of ``setup`` may write anything, and a job that Slurm starts again appends to what it
    wrote before.
    """
    written = (
        b"loading modules\n" * 10_000 + b"10 %\r100 %\n\x1b[31mpython: not found\x1b[0m\nended"
    )
    (run.attempt_dir(1) / "slurm.7.log").write_bytes(written)
    answer(monkeypatch, Job(id="7", state="FAILED", folder=folder_of(run)))
    status = SlurmExecutor().status(run, 1)
    assert status is not None
    assert status.output == "loading modules / 100 % / python: not found / ended"


@pytest.mark.parametrize(
    "slurm",
    [
        *("REVOKED", "EXPEDITING", "POWER_UP_NODE", "", "RUNNING", "SUSPENDED"),
        *("CONFIGURING", "REQUEUED", "STOPPED"),
    ],
)
@pytest.mark.parametrize("recorded", ["queued", "training"])
def test_a_job_that_may_still_run_ends_nothing(
    slurm: str, recorded: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer Slurm may have further states, and a revoked job runs on another cluster of the
    federation.
    """
    before = trains(run) if recorded == "training" else read_state(run)
    answer(monkeypatch, job_of(run, slurm))
    assert current_state(run).state == recorded
    assert read_state(run) == before


def test_suspended_run_is_not_lost(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor is stopped with it, so its heartbeat stands still."""
    before = trains(run)
    os.utime(run.state_path, (0, 0))
    answer(monkeypatch, job_of(run, "SUSPENDED"))
    assert current_state(run) == before


def test_heartbeat_decides_in_silence(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_submission(run, 1, msgspec.structs.replace(SUBMITTED, poll_s=1))
    answer(monkeypatch, job_of(run, "RUNNING"))
    assert current_state(run).state == "queued"
    monkeypatch.setattr(client, "own_jobs", away)
    time.sleep(1.1)
    assert current_state(run).state == "queued"  # silence ends nothing
    trains(run)
    os.utime(run.state_path, (0, 0))
    assert current_state(run).state == "lost"


def test_waiting_job_changes_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_state(run)
    answer(monkeypatch, job_of(run, "PENDING", "Priority"))
    assert current_state(run) == msgspec.structs.replace(before, detail=current_state(run).detail)
    assert read_state(run) == before


def test_forgotten_job_ends_queued_runs(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch)
    queued = read_state(run)
    trains(run)
    assert current_state(run).state == "training"  # its heartbeat decides
    write_state(run, queued)
    assert current_state(run).code == OutcomeCode.JOB_FORGOTTEN


@pytest.mark.parametrize(
    "change", [{"job_id": "7 --signal=KILL"}, {"job_id": "-a"}, {"poll_s": 0.0}]
)
def test_foreign_submission_is_none(change: dict[str, object], run: RunDirectory) -> None:
    run.submission_path(1).write_bytes(
        msgspec.json.encode({**msgspec.to_builtins(SUBMITTED), **change})
    )
    assert read_submission(run, 1) is None
    SlurmExecutor().cancel(run, 1)


def test_nothing_is_asked_for_others(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colleague's job is not among one's own, which says nothing; and a forged ``poll_s`` must
    not decide how often Slurm is asked.
    """
    asked: list[str] = []

    def call(argv: tuple[str, ...], _environment: object = None) -> str:
        asked.append(argv[0])
        return ""

    monkeypatch.undo()
    monkeypatch.setattr(client, "_call", call)
    run.submission_path(1).chmod(0o666)
    assert current_state(run) == read_state(run)
    SlurmExecutor().cancel(run, 1)
    assert asked == []


def test_job_of_another_run_is_neither_believed_nor_cancelled(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied folder carries the number of the original's job, and may have the original's
    name.
    """
    copied = RunDirectory(shutil.copytree(run.path, tmp_path / "backup" / run.name))
    cancelled: list[str] = []
    monkeypatch.setattr(client, "cancel", cancelled.append)
    answer(monkeypatch, Job(id="7", state="CANCELLED", folder=folder_of(run)))
    assert current_state(copied).state == "queued"
    SlurmExecutor().cancel(copied, 1)
    assert cancelled == []
    assert current_state(run).state == "stopped"


@pytest.mark.parametrize("linked", [False, True])
def test_job_without_number_is_found_by_its_folder(
    linked: bool, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that submitted it was killed before Slurm's answer was written."""
    _write_submission(run, 1, msgspec.structs.replace(SUBMITTED, job_id=""))
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    folder = folder_of(RunDirectory(tmp_path / "link" / run.name) if linked else run)
    cancelled: list[str] = []
    monkeypatch.setattr(client, "cancel", cancelled.append)
    answer(
        monkeypatch,
        Job(id="6", state="RUNNING", folder="/"),
        Job(id="9", state="PENDING", reason="Priority", folder=folder),
    )
    assert "9" in current_state(run).detail
    assert stop(run).state == "stopped"
    assert cancelled == ["9"]


def test_unsubmitted_run_is_lost(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    now = msgspec.structs.replace(SUBMITTED, job_id="", submitted=time.time())
    _write_submission(run, 1, now)
    answer(monkeypatch)
    assert current_state(run).state == "queued"  # sbatch may still be at work
    _write_submission(run, 1, msgspec.structs.replace(now, submitted=now.submitted - 120))
    assert (current_state(run).state, read_state(run).code) == ("lost", OutcomeCode.JOB_FORGOTTEN)


def test_run_without_scheduler_ends(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should its job start all the same, it is refused."""
    monkeypatch.setattr(client, "cluster_name", away)
    with rejected("run-may-be-live"):
        stop(run)
    assert read_state(run).state == "queued"
    assert stop(run, assume_dead=True).state == "stopped"
    with rejected("attempt-already-started"):
        refuse_start(run, 1, read_state(run))
    delete_run(run)
    assert not run.path.exists()


@pytest.mark.parametrize("ahead_s", [-5.0, 5.0])
def test_a_node_whose_clock_is_off_gets_the_schedulers_reason(
    ahead_s: float, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains(run, state="failed", code=OutcomeCode.RANK_LOST, ended=time.time() + ahead_s)
    answer(monkeypatch, job_of(run, "PREEMPTED"))
    assert current_state(run).code == OutcomeCode.PREEMPTED


def test_words_of_slurm_are_shown_harmless() -> None:
    waits = JobStatus(job_id="7", phase=JobPhase.QUEUED, waits_for="\x1b[2J", expected_start=1e6)
    assert _queue_text(waits).isprintable()
    assert "1970" in _queue_text(waits)
    long, short = (
        _queue_text(msgspec.structs.replace(waits, waits_for=words))
        for words in ("ReqNodeNotAvail, UnavailableNodes:nid[001000-002000]", "ReqNodeNotAvail")
    )
    assert long == short, "what Slurm adds to a reason is left out"
    assert "nid" not in long
