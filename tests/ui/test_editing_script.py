"""The batch script of a job, changed in an editor from the question before a launch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from textual.drivers.headless_driver import HeadlessDriver

from so_tui.folders import state_home
from so_tui.launch.launch import prepare
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError
from so_tui.machine import inspect_machine
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory
from so_tui.ui.dialogs import JobQuestion, Notice
from so_tui.ui.preset_actions import ask_to_launch
from tests.support.launching import tiny
from tests.support.screen import Driver, opened


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """A launch for a partition, from a terminal that can be lent to an editor."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    monkeypatch.setattr(HeadlessDriver, "can_suspend", True)
    monkeypatch.delenv("VISUAL", raising=False)
    return prepare(tiny(slurm__partition="gh"), inspect_machine())


def kept_scripts() -> list[Path]:
    return list((state_home() / "scripts").glob("*"))


async def question(ui: Driver, launch: Launch) -> JobQuestion:
    ask_to_launch(ui.app, launch)
    await ui.until(lambda: isinstance(ui.screen, JobQuestion))
    assert isinstance(ui.screen, JobQuestion)
    return ui.screen


async def test_an_edited_script_is_submitted_and_kept_if_refused(
    launch: Launch, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[str] = []

    def submit(script: str, folder: str, environment: Mapping[str, str]) -> str:
        submitted.append(Path(script).read_text())
        if len(submitted) == 1:
            raise SlurmError("sbatch refused: the queue is closed")
        return "7"

    monkeypatch.setattr(client, "submit", submit)
    monkeypatch.setattr(client, "own_jobs", lambda: ())
    async with opened(runs_dir) as ui:
        await question(ui, launch)
        monkeypatch.setenv("EDITOR", "sed -i '$ a # first'")
        await ui.press("e")
        await ui.until(lambda: "You have changed the batch script" in ui.text())
        await ui.press("y")
        await ui.until(lambda: isinstance(ui.screen, Notice))
        assert "the queue is closed" in ui.text()
        (kept,) = kept_scripts()
        assert kept.read_text().endswith("# first\n")
        await ui.pilot.click("#offer")
        await ui.until(lambda: isinstance(ui.screen, JobQuestion))
        assert "You have changed the batch script" in ui.text()
        monkeypatch.setenv("EDITOR", "sed -i '$ a # second'")
        await ui.press("e", "y")
        await ui.until(lambda: len(submitted) == 2 and ui.app.opened)
        assert ui.app.opened is not None
        run = RunDirectory(ui.app.opened.path)
    first, second = submitted
    assert first.endswith("# first\n")
    assert second.endswith("# first\n# second\n")
    for own in (f"#SBATCH --job-name={run.name}", f"so_tui_run={shlex.quote(str(run.path))}"):
        assert f"{own}\n" in second
    assert run.job_script_path(1).read_text() == second
    assert kept_scripts() == []


async def test_a_changed_script_outlives_a_no_and_an_editor_that_fails(
    launch: Launch, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(runs_dir) as ui:
        asked = await question(ui, launch)
        with monkeypatch.context() as patch:
            patch.setattr(HeadlessDriver, "can_suspend", False)
            await ui.press("e")
        assert any("run --edit" in note for note in ui.notes()), "what to do in such a terminal"
        monkeypatch.setenv("EDITOR", "true")
        await ui.press("e")
        assert asked.draft is None, "nothing was changed"
        monkeypatch.setenv("EDITOR", "sed -i '$ a # mine'")
        await ui.pilot.click("#edit")
        await ui.until(lambda: asked.draft)
        monkeypatch.setenv("EDITOR", "/nowhere/editor")
        await ui.press("e")
        assert any("/nowhere/editor" in note for note in ui.notes())
        assert asked.draft is not None
        assert asked.draft.script.endswith("# mine\n")
        await ui.pilot.click("#no")
        assert any(str(asked.draft.path) in note for note in ui.notes())
    assert kept_scripts() == [asked.draft.path]
    assert list(runs_dir.glob("*")) == []
