"""Runs submitted to a real Slurm: watched, stopped and ended from a host that is not theirs."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.executors import executor_of_attempt
from so_tui.launch.launch import prepare, read_launch
from so_tui.launch.lifecycle import current_state, start, stop
from so_tui.launch.places import _seen_machine
from so_tui.launch.slurm.client import SlurmError
from so_tui.launch.slurm.executor import _write_submission
from so_tui.launch.slurm.script import _builtin_sites, batch_script, load_site
from so_tui.runs import RunDirectory
from so_tui.runs.records import OutcomeCode
from so_tui.spec import InputError
from tests.slurm.cluster import Cluster
from tests.slurm.submitting import ended, submission_of, submit, wait_for
from tests.support.launching import tiny
from tests.support.make_run import quad_machine
from tests.support.plans import plan_of
from tests.support.problems import rejected
from tests.support.screen import opened

pytestmark = pytest.mark.system
SO_TUI = (sys.executable, "-P", "-m", "so_tui")


async def test_run_trains_on_another_host(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path, train__steps="4")
    assert current_state(run).state == "queued"
    async with opened(tmp_path, open_run=run) as ui:
        await ui.until(lambda: "step 4 / 4" in ui.text(), 240)
        await ui.until(lambda: current_state(run).state == "finished", 120)
        await ui.state_shown("finished")
    state = current_state(run)
    assert (state.state, state.step, state.host) == ("finished", 4, "n1")
    seen = _seen_machine("simulated", "main")
    assert seen is not None
    assert read_launch(run, 1).machine.hostname == seen.machine.hostname == "n1"
    assert cluster.left() == ("", ())


async def test_a_screen_shows_why_a_run_waits_and_cancels_it(busy: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path)
    state = wait_for(run, lambda state: "waits" in state.detail)
    job = executor_of_attempt(run, 1).status(run, 1)
    assert job is not None
    assert (state.state, job.phase, job.reason) == ("queued", "queued", "Resources")
    async with opened(tmp_path, open_run=run) as ui:
        await ui.until(lambda: "free nodes" in ui.text())
        await ui.press("s")
        await ui.until(lambda: "Cancel" in ui.text())
        await ui.press("y")
        await ui.until(lambda: current_state(run).state == "stopped")
        await ui.state_shown("stopped")
        await ui.press("2")
        await ui.until(lambda: "main, strict" in ui.text())
    assert job.id not in busy.jobs()


def test_somebody_else_cancels_a_queued_job(busy: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path)
    submission = submission_of(run)
    _write_submission(run, 1, replace(submission, cluster="another"))
    # Another cluster's Slurm does not know the job, which means nothing.
    assert current_state(run).state == "queued"
    with pytest.raises(InputError):
        stop(run)
    _write_submission(run, 1, submission)
    busy.run("scancel", submission.job_id)
    state = wait_for(run, ended)
    assert (state.state, state.code) == ("stopped", OutcomeCode.JOB_CANCELLED)


def planned_for(folder: Path, architecture: str) -> RunDirectory:
    """Submit a run that was planned for GPUs, which the simulated nodes do not have."""
    spec = tiny(slurm__partition="main", slurm__site="generic", gpus="[1, 3]")
    machine = replace(quad_machine(), architecture=architecture)
    return start(prepare(spec, machine, force=True), runs_dir=folder)


def test_foreign_interpreter_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with rejected("foreign-interpreter"):
        planned_for(tmp_path, "riscv64")
    assert cluster.jobs() == ""


@pytest.mark.parametrize(
    "name", ['it\'s a "b" $(id); #', "a|b", "\N{LATIN SMALL LETTER U WITH DIAERESIS}"]
)
def test_folder_may_have_any_name(name: str, cluster: Cluster, site: Path, tmp_path: Path) -> None:
    site.write_text('title = "x"\npython = "/no/such/python"\npoll_s = 1\n')
    state = wait_for(submit(tmp_path / name), ended)
    assert (state.state, state.code) == ("lost", OutcomeCode.JOB_FAILED)
    assert "/no/such/python" in state.reason  # what the job wrote was found


def test_an_interpreter_without_gpus_ends_the_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    state = wait_for(planned_for(tmp_path, platform.machine()), ended)
    assert (state.state, state.code) == ("lost", OutcomeCode.JOB_FAILED)
    assert "site profile" in state.reason


def test_what_slurm_refuses_leaves_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="not allowed here"):  # the site's own rule, in its words
        submit(tmp_path, slurm__partition="strict", slurm__options='["--gres=gpu:1"]')
    for change, value, code, field in (
        ("slurm__partition", "strct", "slurm-partition", "slurm.partition"),
        ("slurm__time_limit", "2-00:00:00", "slurm-time-limit", "slurm.time_limit"),
        ("slurm__constraint", "absent", "slurm-constraint", "slurm.constraint"),
        ("slurm__options", '["--mem=900T"]', "slurm-nodes", "gpus"),
    ):
        with rejected(code, field=field):
            submit(tmp_path, **{change: value})
    assert list(tmp_path.glob("*/spec.json")) == []


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("name", sorted(path.stem for path in _builtin_sites().glob("*.toml")))
def test_slurm_accepts_profiles(name: str, nodes: str, cluster: Cluster, tmp_path: Path) -> None:
    """With the site's partitions under another name."""
    profile = load_site(name)
    partition = "strict" if profile.refused_options else "main"
    spec = tiny(slurm__partition=partition, slurm__account="project", nodes=nodes)
    script = batch_script(plan_of(spec, cpus=((0,),), gpus=True), profile, tmp_path, 1)
    # A core for a core: the simulated nodes have two.
    (tmp_path / "job.sh").write_text(script.replace("--cpus-per-task=72", "--cpus-per-task=2"))
    cluster.run("sbatch", "--test-only", str(tmp_path / "job.sh"))


def test_the_command_follows_a_job_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    options = ["--partition", "main", "--plain", "--set", "train.steps=2"]
    argv = [*SO_TUI, "run", "tiny", *options, "--runs-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr


def test_node_without_gpus_is_refused(cluster: Cluster, site: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"  # says that torch can use GPUs, though that of these tests cannot
    python.write_text(
        '#!/bin/sh\ncase "$*" in *so_tui.machine.interpreter*) exit 0;; esac\nexec '
        f'{sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    site.write_text(site.read_text() + f'python = "{python}"\n')
    state = wait_for(planned_for(tmp_path / "runs", platform.machine()), ended)
    found = (state.state, state.code, state.attempt, state.host)
    assert found == ("failed", OutcomeCode.NOT_STARTED, 1, "n1")
