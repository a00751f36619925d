"""Runs submitted to a real Slurm: watched, stopped and ended from a host that is not theirs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from so_tui.launch.executors import executor_of_attempt
from so_tui.launch.launch import JobPhase, prepare, read_launch
from so_tui.launch.lifecycle import current_state, start, stop
from so_tui.launch.places import _seen_machine
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import Job, SlurmError, queue
from so_tui.launch.slurm.executor import _write_submission, read_submission
from so_tui.runs import RunDirectory
from so_tui.runs.records import OutcomeCode
from so_tui.spec import InputError
from tests.slurm.cluster import NODES, Cluster
from tests.slurm.submitting import ended, submit, wait_for
from tests.support.launching import tiny
from tests.support.make_run import quad_machine
from tests.support.problems import rejected
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.system


def test_run_trains_on_another_host(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path, train__steps="4")
    assert current_state(run).state == "queued"
    state = wait_for(run, ended)
    assert (state.state, state.step, state.host) == ("finished", 4, "n1")
    assert read_launch(run, 1).machine.hostname == "n1"
    seen = _seen_machine("simulated", "main")
    assert seen is not None
    assert seen.machine.hostname == "n1"
    assert cluster.left() == ("", ())


def test_inspect_in_an_allocation_records_its_node(cluster: Cluster) -> None:
    inspect = [sys.executable, "-P", "-m", "so_tui", "inspect"]
    subprocess.run(
        ["srun", "--partition=strict", "--exclusive", *inspect],
        capture_output=True,
        check=True,
        timeout=120,
    )
    seen = _seen_machine("simulated", "strict")
    assert seen is not None
    assert seen.machine.hostname in NODES


def test_a_queued_run_says_why_it_waits_and_can_be_stopped(busy: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path)
    state = wait_for(run, lambda state: "waits" in state.detail)
    assert state.state == "queued"
    job = executor_of_attempt(run, 1).status(run, 1)
    assert job is not None
    assert (job.phase, job.waits_for) == (JobPhase.QUEUED, "Resources")
    assert stop(run).state == "stopped"
    assert current_state(run).state == "stopped"
    assert job.job_id not in busy.jobs()


def test_somebody_else_cancels_a_queued_job(busy: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path)
    submission = read_submission(run, 1)
    assert submission is not None
    elsewhere = msgspec.structs.replace(submission, cluster="another")
    _write_submission(run, 1, elsewhere)
    assert (
        current_state(run).state == "queued"
    )  # another cluster's Slurm does not know the job, which means nothing
    with pytest.raises(InputError):
        stop(run)
    _write_submission(run, 1, submission)
    busy.run("scancel", submission.job_id)
    state = wait_for(run, ended)
    assert (state.state, state.code) == ("stopped", OutcomeCode.JOB_CANCELLED)


def test_a_running_job_can_be_cancelled_by_somebody_else(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path, train__steps="5000")
    wait_for(run, lambda state: state.state == "training")
    submission = read_submission(run, 1)
    assert submission is not None
    cluster.run("scancel", submission.job_id)
    state = wait_for(run, lambda state: ended(state) and state.code == OutcomeCode.JOB_CANCELLED)
    assert state.state in ("failed", "lost")
    assert run.attempts() == (1,)


def test_foreign_interpreter_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    machine = msgspec.structs.replace(quad_machine(), architecture="riscv64")
    with rejected("foreign-interpreter"):
        start(
            prepare(tiny(slurm__partition="main", slurm__site="generic"), machine, force=True),
            runs_dir=tmp_path,
        )
    assert cluster.jobs() == ""


@pytest.mark.parametrize(
    "name", ['it\'s a "b" $(id); #', "a|b", "\N{LATIN SMALL LETTER U WITH DIAERESIS}"]
)
def test_folder_may_have_any_name(name: str, cluster: Cluster, tmp_path: Path) -> None:
    site = Path(os.environ["XDG_CONFIG_HOME"]) / "so-tui" / "sites" / "generic.toml"
    site.write_text('title = "x"\npython = "/no/such/python"\npoll_s = 1\n')
    state = wait_for(submit(tmp_path / name), ended)
    assert (state.state, state.code) == ("lost", OutcomeCode.JOB_FAILED)
    assert "/no/such/python" in state.reason  # what the job wrote was found


def test_an_interpreter_without_gpus_ends_the_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    state = wait_for(planned_for_gpus(tmp_path), ended)
    assert (state.state, state.code) == ("lost", OutcomeCode.JOB_FAILED)
    assert "site profile" in state.reason


def test_node_without_gpus_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    python = tmp_path / "python"  # says that torch can use GPUs, though that of these tests cannot
    python.write_text(
        '#!/bin/sh\ncase "$*" in *so_tui.machine.interpreter*) exit 0;; esac\nexec '
        f'{sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    site = Path(os.environ["XDG_CONFIG_HOME"]) / "so-tui" / "sites" / "generic.toml"
    site.write_text(site.read_text() + f'python = "{python}"\n')
    state = wait_for(planned_for_gpus(tmp_path / "runs"), ended)
    assert (state.state, state.code, state.attempt, state.host) == (
        "failed",
        OutcomeCode.NOT_STARTED,
        1,
        "n1",
    )


def planned_for_gpus(folder: Path) -> RunDirectory:
    """Submit a run that was planned for GPUs, which the simulated nodes do not have."""
    spec = tiny(slurm__partition="main", slurm__site="generic", gpus="[1, 3]")
    machine = msgspec.structs.replace(quad_machine(), architecture=platform.machine())
    return start(prepare(spec, machine, force=True), runs_dir=folder)


def test_what_slurm_refuses_leaves_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="not allowed here"):  # the site's own rule, in its words
        submit(tmp_path, slurm__partition="strict", slurm__options='["--gres=gpu:1"]')
    refused = {}
    for changes in (
        {"slurm__partition": "strct"},
        {"slurm__time_limit": "2-00:00:00"},
        {"slurm__constraint": "absent"},
        {"slurm__options": '["--mem=900T"]'},
    ):
        with pytest.raises(InputError) as caught:
            submit(tmp_path, **changes)
        (problem,) = caught.value.problems
        refused[problem.code] = problem.field
    assert refused == {
        "slurm-partition": "slurm.partition",
        "slurm-time-limit": "slurm.time_limit",
        "slurm-constraint": "slurm.constraint",
        "slurm-nodes": "gpus",
    }
    assert list(tmp_path.glob("*/spec.json")) == []


def test_many_screens_ask_slurm_once_in_an_interval(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Job, ...]] = []
    own_jobs = client.own_jobs

    def counted() -> tuple[Job, ...]:
        asked.append(own_jobs())
        return asked[-1]

    monkeypatch.setattr(client, "own_jobs", counted)
    monkeypatch.setattr(client, "TIMEOUT_S", LIMIT_S)  # however long squeue takes
    answers = [queue("simulated", 30) for _ in range(20)]
    assert len(asked) == 1
    assert len({msgspec.json.encode(answer) for answer in answers}) == 1


def test_the_command_follows_a_job_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "so_tui", "run", "tiny", "--partition", "main", "--plain"]
    argv += ["--set", "train.steps=2", "--runs-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
