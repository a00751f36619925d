"""Starts that Slurm is given, refuses, or answers too late. ``sbatch`` is a function here;
tests/slurm has the real one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from so_tui.launch.launch import prepare, prepare_resume
from so_tui.launch.lifecycle import newest_attempt, resume, start
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError
from so_tui.launch.slurm.executor import SlurmExecutor
from so_tui.machine import inspect_machine
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory, read_spec, read_state, write_state
from so_tui.spec import SoTuiError
from tests.support.launching import tiny


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the folders of the jobs that are submitted; each takes a moment."""
    folders: list[str] = []

    def submit(script: str, folder: str, environment: Mapping[str, str]) -> str:
        time.sleep(0.2)
        folders.append(folder)
        return str(len(folders))

    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    monkeypatch.setattr(client, "submit", submit)
    return folders


@pytest.fixture
def stopped(submitted: list[str], tmp_path: Path) -> RunDirectory:
    """A run whose first job was stopped."""
    run = start(prepare(tiny(slurm__partition="gh"), inspect_machine()), runs_dir=tmp_path / "runs")
    write_state(run, msgspec.structs.replace(read_state(run), state="stopped", attempt=1))
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
    assert len(submitted) == 1
    state = read_state(stopped)
    assert state.state == "queued"
    attempt = newest_attempt(stopped, state)
    assert submitted == [str(stopped.attempt_dir(attempt))]
    assert stopped.attempts() == (1, attempt)
    plan = msgspec.json.decode(stopped.launch_path(attempt).read_bytes())["plan"]
    assert plan["spec"]["train"]["steps"] == read_spec(stopped).train.steps


def test_late_job_keeps_its_run(stopped: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(script: str, folder: str, environment: Mapping[str, str]) -> str:
        write_state(
            stopped,
            msgspec.structs.replace(read_state(stopped), state="starting", attempt=2, host="n1"),
        )
        raise SlurmError("sbatch did not answer within 20 s")

    monkeypatch.setattr(client, "submit", submit)
    with pytest.raises(SlurmError):
        resume(stopped, prepare_resume(stopped, inspect_machine()))
    assert (read_state(stopped).state, stopped.attempts()) == ("starting", (1, 2))


def test_refusal_changes_nothing(stopped: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(script: str, folder: str, environment: Mapping[str, str]) -> str:
        raise SlurmError("sbatch refused: invalid account")

    monkeypatch.setattr(client, "submit", submit)
    before = read_state(stopped)
    with pytest.raises(SlurmError):
        resume(stopped, prepare_resume(stopped, inspect_machine()))
    assert (read_state(stopped), stopped.attempts()) == (before, (1,))


def test_nothing_is_submitted_to_a_cluster_without_a_name(
    stopped: RunDirectory, submitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs could be neither watched nor cancelled from another program."""

    def silent() -> str:
        raise SlurmError("scontrol did not answer within 20 s")

    monkeypatch.setattr(client, "cluster_name", silent)
    launch, before = prepare_resume(stopped, inspect_machine()), read_state(stopped)
    with pytest.raises(SlurmError):
        resume(stopped, launch)
    assert (submitted, read_state(stopped), stopped.attempts()) == ([], before, (1,))


def test_a_script_is_submitted_as_it_was_edited(submitted: list[str], tmp_path: Path) -> None:
    launch = prepare(tiny(slurm__partition="gh"), inspect_machine())
    run = start(
        launch,
        runs_dir=tmp_path / "runs",
        executor=SlurmExecutor(edit=lambda script: script + "# edited\n"),
    )
    assert submitted == [str(run.attempt_dir(1))]
    assert (run.attempt_dir(1) / "job.sh").read_text().endswith("# edited\n")


def test_abandoned_edit_leaves_nothing(submitted: list[str], tmp_path: Path) -> None:
    def given_up(_script: str) -> str:
        raise SoTuiError("the editor ended with code 1")

    launch = prepare(tiny(slurm__partition="gh"), inspect_machine())
    with pytest.raises(SoTuiError, match="editor"):
        start(launch, runs_dir=tmp_path / "runs", executor=SlurmExecutor(edit=given_up))
    assert submitted == []
    assert list((tmp_path / "runs").iterdir()) == []
