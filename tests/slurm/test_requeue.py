"""Jobs that Slurm starts again, if the profile allows it: one run, the same losses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from so_tui.launch.lifecycle import stop
from so_tui.runs import RunDirectory
from so_tui.runs.records import ResumedRecord
from tests.slurm.cluster import Cluster
from tests.slurm.submitting import (
    ended_again,
    has_saved,
    losses,
    submission_of,
    submit,
    trains,
    wait_for,
)
from tests.support.launching import of_kind, tiny, train

pytestmark = pytest.mark.system

STEPS = 10


@pytest.fixture(autouse=True)
def _requeues(site: Path) -> None:
    site.write_text(site.read_text() + "requeue = true\n")


def put_back(cluster: Cluster, run: RunDirectory) -> None:
    """Let a run's job that Slurm has put back into the queue start as soon as it can.

    Slurm gives it a start time two minutes later. Within the second in which the job ended, nodes
    refuse its credential.
    """
    job, deadline = submission_of(run).job_id, time.monotonic() + 180
    asked = ("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    while cluster.run(*asked).strip() != "PENDING" or cluster.has_steps():
        assert time.monotonic() < deadline, cluster.run("squeue")
        time.sleep(0.2)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")


def test_a_warned_job_of_two_nodes_continues_exactly(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path / "again", train__steps=str(STEPS), nodes="2", gpus="1")
    wait_for(run, trains)
    cluster.run("scancel", "--signal=USR1", submission_of(run).job_id)
    put_back(cluster, run)
    state = wait_for(run, ended_again)
    assert (state.state, state.step, run.attempts()) == ("finished", STEPS, (1, 2))
    assert submission_of(run, 2).job_id == submission_of(run).job_id
    whole, code = train(tiny(train__steps=str(STEPS), gpus="2"), tmp_path / "whole")
    assert code == 0
    assert losses(run, STEPS) == pytest.approx(losses(whole, STEPS), rel=1e-6)


def test_a_run_whose_node_fails_continues_on_another(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path, train__steps="50000", checkpoint__every_steps="2")
    saved = wait_for(run, has_saved)
    cluster.stop_node(saved.host)
    put_back(cluster, run)
    state = wait_for(run, lambda state: state.attempt == 2 and trains(state))
    assert state.host != saved.host
    assert submission_of(run, 2).job_id == submission_of(run).job_id
    assert run.attempts() == (1, 2)
    assert of_kind(run, ResumedRecord)[0].step >= (saved.saved_step or 0)
    assert stop(run).state == "stopped"
