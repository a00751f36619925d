"""What is shown of a job that waits, and what another user's run directory can make of it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.launch import Job
from so_tui.launch.lifecycle import _queue_text, current_state, stop
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError
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
from tests.support.problems import raising, rejected
from tests.support.records import change_state

pytestmark = pytest.mark.usefixtures("_cluster")
AWAY = raising(SlurmError("Slurm did not answer within 20 s"))
SUBMITTED = Submission(
    job_id="7", cluster="here", partition="gh", site="generic", poll_s=30, submitted=0.0
)


class Queue:
    """A run that was submitted as job 7, and what Slurm says of that."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.run = create_run(tiny(slurm__partition="gh"), folder)
        self.cancelled: list[str] = []
        self._patch = patch
        self.submit()
        change_state(self.run, state="queued")
        patch.setattr(client, "cancel", self.cancelled.append)

    def submit(self, **changes: object) -> None:
        number = 1 if self.run.attempts() else new_attempt(self.run)
        _write_submission(self.run, number, replace(SUBMITTED, **changes))

    def trains(self, **others: object) -> RunState:
        """Record that the run trains on another host."""
        change_state(self.run, **({"state": "training", "attempt": 1, "host": "n1"} | others))
        return read_state(self.run)

    def job(self, state: str, reason: str = "", number: str = "7", folder: str = "") -> Job:
        folder = folder or str(self.run.attempt_dir(1))
        return Job(id=number, state=state, reason=reason, folder=folder)

    def says(self, *states: str | Job) -> None:
        """Have Slurm list jobs, the run's own if only a state is given."""
        jobs = tuple(self.job(job) if isinstance(job, str) else job for job in states)
        self._patch.setattr(client, "own_jobs", lambda: jobs)

    def state(self) -> RunState:
        return current_state(self.run)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(tmp_path / "runs", monkeypatch)


@pytest.mark.parametrize(
    ("ended", "state", "code"),
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
    ended: str, state: str, code: OutcomeCode, slurm: Queue
) -> None:
    slurm.says(ended)
    found = slurm.state()
    assert (found.state, found.code, found.attempt) == (state, code, 1)
    assert read_state(slurm.run) == found


def test_why_a_job_failed_is_said(slurm: Queue) -> None:
    """``setup`` may write anything, and a job that starts again appends to its log."""
    written = b"loading modules\n" * 10_000 + b"10 %\r100 %\n\x1b[31mpython: no\x1b[0m\nended"
    (slurm.run.attempt_dir(1) / "slurm.7.log").write_bytes(written)
    slurm.says("FAILED")
    status = SlurmExecutor().status(slurm.run, 1)
    assert status is not None
    assert status.output == "loading modules / 100 % / python: no / ended"


@pytest.mark.parametrize(
    "state",
    [
        *("REVOKED", "EXPEDITING", "POWER_UP_NODE", "", "RUNNING", "SUSPENDED"),
        *("PENDING", "CONFIGURING", "REQUEUED", "STOPPED"),
    ],
)
@pytest.mark.parametrize("recorded", ["queued", "training"])
def test_a_job_that_may_still_run_ends_nothing(state: str, recorded: str, slurm: Queue) -> None:
    """A newer Slurm may have further states, and a revoked job runs on another cluster of the
    federation. The supervisor of a suspended one is stopped with it, and its heartbeat stands
    still.
    """
    before = slurm.trains() if recorded == "training" else read_state(slurm.run)
    if state == "SUSPENDED":
        os.utime(slurm.run.state_path, (0, 0))
    slurm.says(state)
    assert slurm.state().state == recorded
    assert read_state(slurm.run) == before


def test_heartbeat_decides_in_silence(slurm: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.submit(poll_s=1)
    slurm.says("RUNNING")
    assert slurm.state().state == "queued"
    monkeypatch.setattr(client, "own_jobs", AWAY)
    time.sleep(1.1)
    assert slurm.state().state == "queued"  # silence ends nothing
    slurm.trains()
    os.utime(slurm.run.state_path, (0, 0))
    assert slurm.state().state == "lost"


def test_forgotten_job_ends_queued_runs(slurm: Queue) -> None:
    slurm.says()
    queued = read_state(slurm.run)
    slurm.trains()
    assert slurm.state().state == "training"  # its heartbeat decides
    write_state(slurm.run, queued)
    assert slurm.state().code == OutcomeCode.JOB_FORGOTTEN


@pytest.mark.parametrize(
    "change", [{"job_id": "7 --signal=KILL"}, {"job_id": "-a"}, {"poll_s": 0.0}]
)
def test_foreign_submission_is_none(change: dict[str, object], slurm: Queue) -> None:
    changed = msgspec.to_builtins(SUBMITTED) | change
    slurm.run.submission_path(1).write_bytes(msgspec.json.encode(changed))
    assert read_submission(slurm.run, 1) is None
    SlurmExecutor().cancel(slurm.run, 1)


def test_nothing_is_asked_for_others(slurm: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colleague's job is not among one's own, and a forged ``poll_s`` decides nothing."""
    asked: list[object] = []
    monkeypatch.undo()
    monkeypatch.setattr(client, "_call", lambda *call: asked.append(call))
    slurm.run.submission_path(1).chmod(0o666)
    assert slurm.state() == read_state(slurm.run)
    SlurmExecutor().cancel(slurm.run, 1)
    assert asked == []


def test_job_of_another_run_is_neither_believed_nor_cancelled(slurm: Queue, tmp_path: Path) -> None:
    """A copied folder carries the number of the original's job, and perhaps its name."""
    copied = RunDirectory(shutil.copytree(slurm.run.path, tmp_path / "backup" / slurm.run.name))
    slurm.says("CANCELLED")
    assert current_state(copied).state == "queued"
    SlurmExecutor().cancel(copied, 1)
    assert slurm.cancelled == []
    assert slurm.state().state == "stopped"


@pytest.mark.parametrize("linked", [False, True])
def test_job_without_number_is_found_by_folder(linked: bool, slurm: Queue, tmp_path: Path) -> None:
    """The program that submitted it was killed before Slurm's answer was written."""
    slurm.submit(job_id="")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    run = RunDirectory(tmp_path / "link" / slurm.run.name) if linked else slurm.run
    own = slurm.job("PENDING", "Priority", "9", str(run.attempt_dir(1)))
    slurm.says(slurm.job("RUNNING", "", "6", "/"), own)
    assert "9" in slurm.state().detail
    assert stop(slurm.run).state == "stopped"
    assert slurm.cancelled == ["9"]


def test_unsubmitted_run_is_lost(slurm: Queue) -> None:
    slurm.says()
    slurm.submit(job_id="", submitted=time.time())
    assert slurm.state().state == "queued"  # sbatch may still be at work
    slurm.submit(job_id="", submitted=time.time() - 120)
    assert slurm.state().state == "lost"
    assert read_state(slurm.run).code == OutcomeCode.JOB_FORGOTTEN


def test_run_without_scheduler_ends(slurm: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should its job start all the same, it is refused."""
    monkeypatch.setattr(client, "cluster_name", AWAY)
    with rejected("run-may-be-live"):
        stop(slurm.run)
    assert read_state(slurm.run).state == "queued"
    assert stop(slurm.run, assume_dead=True).state == "stopped"
    with rejected("attempt-already-started"):
        refuse_start(slurm.run, 1, read_state(slurm.run))
    delete_run(slurm.run)
    assert not slurm.run.path.exists()


@pytest.mark.parametrize("ahead_s", [-5.0, 5.0])
def test_a_node_whose_clock_is_off_gets_the_schedulers_reason(ahead_s: float, slurm: Queue) -> None:
    slurm.trains(state="failed", code=OutcomeCode.RANK_LOST, ended=time.time() + ahead_s)
    slurm.says("PREEMPTED")
    assert slurm.state().code == OutcomeCode.PREEMPTED


def test_words_of_slurm_are_shown_harmless() -> None:
    waits = Job(id="7", state="PENDING", reason="\x1b[2J", start=1e6)
    assert _queue_text(waits).isprintable()
    assert "1970" in _queue_text(waits)
    long = "ReqNodeNotAvail, UnavailableNodes:nid[001000-002000]"
    assert _queue_text(replace(waits, reason=long)) == _queue_text(
        replace(waits, reason="ReqNodeNotAvail")
    ), "what Slurm adds to a reason is left out"
