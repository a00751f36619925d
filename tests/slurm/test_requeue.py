"""Jobs that Slurm starts again where the site profile allows it: one run, one history, the same
losses.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from so_tui.launch.lifecycle import stop
from so_tui.launch.slurm.executor import read_submission
from so_tui.runs import RunDirectory
from so_tui.runs.records import ResumedRecord
from tests.slurm.cluster import Cluster
from tests.slurm.submitting import ended, losses, submit, trains, wait_for
from tests.support.launching import records, tiny, train

pytestmark = pytest.mark.system

STEPS = 10


@pytest.fixture(autouse=True)
def _requeues(_polled_quickly: None) -> None:
    site = Path(os.environ["XDG_CONFIG_HOME"]) / "so-tui" / "sites" / "generic.toml"
    site.write_text(site.read_text() + "requeue = true\n")


def job_of(run: RunDirectory, attempt: int) -> str:
    submission = read_submission(run, attempt)
    assert submission is not None
    return submission.job_id


def do_not_wait(cluster: Cluster, job: str) -> None:
    """Let a job that Slurm has put back into the queue start as soon as it can.

    Slurm gives it a start time two minutes later. Within the second in which the job ended, nodes
    refuse its credential.
    """
    deadline = time.monotonic() + 180
    while (
        cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip() != "PENDING"
        or cluster.has_steps()
    ):
        assert time.monotonic() < deadline, cluster.run("squeue")
        time.sleep(0.2)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")


def test_a_warned_job_of_two_nodes_continues_exactly(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path / "again", train__steps=str(STEPS), nodes="2", gpus="1")
    wait_for(run, trains)
    cluster.run("scancel", "--signal=USR1", job_of(run, 1))
    do_not_wait(cluster, job_of(run, 1))
    state = wait_for(run, lambda state: ended(state) and state.attempt == 2)
    assert (state.state, state.step, run.attempts()) == ("finished", STEPS, (1, 2))
    assert job_of(run, 2) == job_of(run, 1)
    whole, code = train(tiny(train__steps=str(STEPS), gpus="2"), tmp_path / "whole")
    assert code == 0
    assert losses(run, STEPS) == pytest.approx(losses(whole, STEPS), rel=1e-6)


def test_a_run_whose_node_fails_continues_on_another(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path, train__steps="50000", checkpoint__every_steps="2")
    saved = wait_for(run, lambda state: (state.saved_step or 0) >= 2)
    cluster.stop_node(saved.host)
    do_not_wait(cluster, job_of(run, 1))
    state = wait_for(run, lambda state: state.attempt == 2 and trains(state))
    assert state.host != saved.host
    assert (job_of(run, 2), run.attempts()) == (job_of(run, 1), (1, 2))
    resumed = next(record.step for record in records(run) if isinstance(record, ResumedRecord))
    assert resumed >= (saved.saved_step or 0)
    assert stop(run).state == "stopped"


def test_a_run_on_two_nodes_waits_for_one_that_failed(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path, train__steps="50000", checkpoint__every_steps="2", nodes="2", gpus="1")
    saved = wait_for(run, lambda state: (state.saved_step or 0) >= 2)
    cluster.stop_node("n2")
    do_not_wait(cluster, job_of(run, 1))
    assert wait_for(run, lambda state: state.state == "queued").attempt == 1
    cluster.start_node("n2")
    wait_for(run, lambda state: state.attempt == 2 and trains(state))
    assert (job_of(run, 2), run.attempts(), run.node_path(2, 1).exists()) == (
        job_of(run, 1),
        (1, 2),
        True,
    )
    resumed = next(record.step for record in records(run) if isinstance(record, ResumedRecord))
    assert resumed >= (saved.saved_step or 0)
    assert stop(run).state == "stopped"
