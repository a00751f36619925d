"""Starts that Slurm is given, refuses, or answers too late. ``sbatch`` is a function here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from so_tui.launch.launch import prepare, prepare_resume
from so_tui.launch.lifecycle import newest_attempt, resume, start
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError
from so_tui.launch.slurm.executor import SlurmExecutor
from so_tui.machine import inspect_machine
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory, read_spec, read_state
from so_tui.spec import SoTuiError
from tests.support.launching import tiny
from tests.support.problems import raising
from tests.support.records import change_state

pytestmark = pytest.mark.usefixtures("_cluster")


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the folders of the jobs that are submitted; each takes a moment."""
    folders: list[str] = []

    def submit(script: str, folder: str, environment: Mapping[str, str]) -> str:
        time.sleep(0.2)
        folders.append(folder)
        return str(len(folders))

    monkeypatch.setattr(client, "submit", submit)
    return folders


@pytest.fixture
def launch() -> Launch:
    return prepare(tiny(slurm__partition="gh"), inspect_machine())


@pytest.fixture
def stopped(submitted: list[str], launch: Launch, tmp_path: Path) -> RunDirectory:
    """A run whose first job was stopped."""
    run = start(launch, runs_dir=tmp_path / "runs")
    change_state(run, state="stopped", attempt=1)
    submitted.clear()
    return run


def test_of_two_resumes_one_submits(stopped: RunDirectory, submitted: list[str]) -> None:
    launches = [
        prepare_resume(stopped, inspect_machine(), values={"train.steps": steps})
        for steps in ("30", "40")
    ]

    def refused(launch: Launch) -> bool:
        try:
            resume(stopped, launch)
        except SoTuiError:
            return True
        return False

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(refused, launches)) == [False, True]
    state = read_state(stopped)
    assert state.state == "queued"
    attempt = newest_attempt(stopped, state)
    assert submitted == [str(stopped.attempt_dir(attempt))]
    assert stopped.attempts() == (1, attempt)
    plan = msgspec.json.decode(stopped.launch_path(attempt).read_bytes())["plan"]
    assert plan["spec"]["train"]["steps"] == read_spec(stopped).train.steps


def test_late_job_keeps_its_run(stopped: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> NoReturn:
        change_state(stopped, state="starting", attempt=2, host="n1")
        raise SlurmError("sbatch did not answer within 20 s")

    monkeypatch.setattr(client, "submit", submit)
    with pytest.raises(SlurmError):
        resume(stopped, prepare_resume(stopped, inspect_machine()))
    assert (read_state(stopped).state, stopped.attempts()) == ("starting", (1, 2))


@pytest.mark.parametrize("fails", ["submit", "cluster_name"])
def test_refusal_changes_nothing(
    fails: str, stopped: RunDirectory, submitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of a cluster without a name could be neither watched nor cancelled."""
    launch, before = prepare_resume(stopped, inspect_machine()), read_state(stopped)
    monkeypatch.setattr(client, fails, raising(SlurmError("no answer")))
    with pytest.raises(SlurmError):
        resume(stopped, launch)
    assert (submitted, read_state(stopped), stopped.attempts()) == ([], before, (1,))


def test_edited_script_is_submitted(submitted: list[str], launch: Launch, tmp_path: Path) -> None:
    edit = SlurmExecutor(edit=lambda script: script + "# edited\n")
    run = start(launch, runs_dir=tmp_path / "runs", executor=edit)
    assert submitted == [str(run.attempt_dir(1))]
    assert (run.attempt_dir(1) / "job.sh").read_text().endswith("# edited\n")
