"""From a preset to a run, and what may happen meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from textual.drivers.headless_driver import HeadlessDriver
from textual.widgets import DataTable, Static

from so_tui.folders import state_home
from so_tui.launch.checks import Check
from so_tui.launch.launch import prepare
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError
from so_tui.machine import inspect_machine
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory
from so_tui.runs.state import pending
from so_tui.spec import Refusal, Refused, find_preset
from so_tui.ui.app import SoTuiApp
from so_tui.ui.charts.chart import Chart
from so_tui.ui.dialogs import JobQuestion, Notice, Question
from so_tui.ui.preset_actions import ask_to_launch
from tests.support.launching import tiny
from tests.support.make_run import write_run
from tests.support.planning import CPU_ONLY
from tests.support.records import change_state
from tests.support.screen import Driver, opened
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("_short_form")
IN_USE = Refused([Refusal("gpu-in-use", "GPU 0 is used by another run")], forceable=True)


class Starter:
    """Stands in for the start of a run: writes one when ``ready`` is set, unless there is an error
    and it is not forced.
    """

    def __init__(self, runs_dir: Path, error: Exception | None = None) -> None:
        self.runs_dir, self.error = runs_dir, error
        self.asked: list[Launch] = []
        self.ready = threading.Event()

    def __call__(self, launch: Launch, **_: object) -> RunDirectory:
        self.asked.append(launch)
        if self.error is not None and not launch.forced:
            raise self.error
        self.ready.wait(LIMIT_S)
        return write_run(self.runs_dir, steps=3)


@pytest.fixture
def start(runs_dir: Path) -> Starter:
    return Starter(runs_dir)


def at_loss(ui: Driver) -> object:
    return ui.app.current_mode == "dashboard" and ui.find("#loss", Chart).lines


async def test_a_run_is_launched_stopped_and_resumed_from_the_screen(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[tuple[RunDirectory, str]] = []

    def resume(run: RunDirectory, prepared: str) -> None:
        resumed.append((run, prepared))
        change_state(run, state="training", attempt=2)

    prepare = "so_tui.launch.launch.prepare_resume"
    monkeypatch.setattr(prepare, lambda run, *_, **__: f"attempt 2 of {run.name}")
    monkeypatch.setattr("so_tui.launch.lifecycle.resume", resume)
    start.ready.set()
    async with opened(start.runs_dir, start=start) as ui:
        await ui.presets()
        await ui.press("l", "y")
        await ui.until(lambda: ui.app.current_mode == "dashboard")
        await ui.state_shown("training")
        (run,) = (RunDirectory(path) for path in start.runs_dir.iterdir())
        await ui.press("s", "enter")
        assert not pending(run), "no is the default"
        await ui.press("s", "y")
        await ui.until(lambda: "stop" in pending(run))
        change_state(run, state="stopped")
        await ui.state_shown("stopped")
        await ui.until(lambda: "r Resume" in ui.key_line)
        await ui.press("r", "y")
        await ui.until(lambda: resumed == [(run, f"attempt 2 of {run.name}")])
        await ui.state_shown("training")


async def test_a_run_is_named_where_it_is_confirmed(start: Starter) -> None:
    async with opened(start.runs_dir, (80, 24), start=start) as ui:
        await ui.presets()
        await ui.press("l")
        await ui.until(lambda: isinstance(ui.screen, Question))
        assert "Launch  y" in ui.text()
        await ui.press("r")
        await ui.type_text("../any way")
        await ui.press("enter")
        await ui.until(lambda: "not a name" in ui.shown("#said"))
        assert not start.asked
        await ui.type_text("any-way", replace=True)
        await ui.until(lambda: not ui.find("#said", Static).display)
        await ui.press("enter")
        await ui.until(lambda: start.asked)
        assert (start.asked[0].called, start.asked[0].spec.name) == ("any-way", "llama-3.1-8b")
        start.ready.set()


@pytest.mark.parametrize("meanwhile", ["", "slash q", "question_mark"])
async def test_one_run_is_started_at_a_time(start: Starter, meanwhile: str) -> None:
    """It covers neither a text that is typed nor a dialog."""
    async with opened(start.runs_dir, start=start) as ui:
        await ui.presets()
        await ui.press("l", "y")
        await ui.until(lambda: "starting Llama 3.1 8B …" in ui.lines()[0])
        await ui.press("4", "1", "l")
        await ui.until(lambda: any("still being started" in note for note in ui.notes()))
        assert "Launch Llama" not in ui.text()
        await ui.press(*meanwhile.split())
        start.ready.set()
        await ui.until(lambda: not ui.app.starting)
        await ui.until(lambda: meanwhile or ui.app.current_mode == "dashboard")
        assert any("4 lists the run" in note for note in ui.notes()) == bool(meanwhile)
        assert ui.app.current_mode == ("presets" if meanwhile else "dashboard")
    assert len(start.asked) == 1


async def test_checks_are_shown_until_the_run_exists(start: Starter) -> None:
    before = write_run(start.runs_dir, steps=3, name="before")
    async with opened(start.runs_dir, start=start, open_run=before, shows="before") as ui:
        await ui.press("1")
        await ui.presets()
        await ui.press("l", "y")
        await ui.until(lambda: "▸ checks" in ui.text())
        assert ui.app.current_mode == "dashboard"
        assert "before" not in ui.text()
        assert "s Stop" not in ui.key_line, "the run that was shown cannot be meant"
        await ui.press("question_mark")
        start.ready.set()
        await ui.until(lambda: not ui.app.starting)
        await ui.press("escape")
        await ui.until(lambda: ui.find("#loss", Chart).lines and "▸ checks" not in ui.text())
        assert ui.app.opened != before


async def test_a_refused_launch_leads_back_and_is_started_anyway(runs_dir: Path) -> None:
    start = Starter(runs_dir, IN_USE)
    async with opened(runs_dir, start=start) as ui:
        await ui.configure()
        await ui.pilot.click("#launch")
        await ui.pilot.click("#yes")
        await ui.until(lambda: isinstance(ui.screen, Notice))
        assert "GPU 0 is used by another run" in ui.text()
        assert ui.app.current_mode == "configure"
        await ui.press("escape", "3")
        assert "No run yet" in ui.text()
        await ui.press("1")
        await ui.presets()
        await ui.press("l", "y")
        await ui.until(lambda: isinstance(ui.screen, Notice))
        await ui.pilot.click("#offer")
        await ui.until(lambda: len(start.asked) == 3)
        assert "▸ checks" in ui.text()
        start.ready.set()
        await ui.until(lambda: not ui.app.starting and at_loss(ui))


async def test_quitting_says_that_a_start_goes_on(start: Starter) -> None:
    async with opened(start.runs_dir, start=start) as ui:
        await ui.presets()
        await ui.press("l", "y", "q")
        await ui.until(lambda: not ui.app.is_running)
        start.ready.set()
        assert "Llama 3.1 8B is still being started" in str(ui.app._exit_renderables)


async def test_quitting_asks_before_it_loses_what_was_typed(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.configure()
        await ui.edit("train.learning_rate", "2e-4")
        await ui.press("escape", "1")
        for keys in (["q", "ctrl+q"], ["ctrl+q"]):
            await ui.press(*keys)
            assert "1 change to preset" in ui.text()
            await ui.press("enter")  # no is the default, and the question came once
            assert isinstance(ui.screen.query_one("#table"), DataTable)
        await ui.press("2", "u", "y")
        await ui.until(lambda: "no changes" in ui.shown("#form-title"))
        await ui.press("q")
        await ui.until(lambda: not ui.app.is_running)


async def test_a_worker_that_fails_is_reported(runs_dir: Path) -> None:
    async with opened(runs_dir, start=Starter(runs_dir, ZeroDivisionError())) as ui:
        await ui.presets()
        await ui.press("l", "y")
        await ui.until(lambda: any("ZeroDivisionError" in note for note in ui.notes()))
        await ui.until(lambda: ui.app.current_mode == "presets")


@pytest.mark.parametrize("refused", [False, True])
async def test_a_command_shows_the_checks_at_once_and_then_the_run(
    start: Starter, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or ends the screen if the start is refused."""

    def check(
        launch: Launch, *, begins: Callable[[Check], object], **_: object
    ) -> tuple[Launch, tuple[str, ...]]:
        begins("files")
        begins("inputs")
        start.ready.wait(LIMIT_S)
        if refused:
            raise IN_USE
        return launch, ()

    monkeypatch.setattr("so_tui.launch.checks.preflight", check)
    monkeypatch.setattr("so_tui.launch.lifecycle.start", start)
    tiny = prepare(find_preset("tiny").spec, CPU_ONLY)
    app = SoTuiApp(runs_dir=start.runs_dir, launch=tiny)
    assert app.checking is not None, "the first paint shows it"
    async with app.run_test(size=(80, 24)) as pilot:
        ui = Driver(app, pilot)
        await ui.until(lambda: "✓ checks: files" in ui.text() and "▸ checks: model" in ui.text())
        start.ready.set()
        await ui.until(lambda: not app.is_running if refused else at_loss(ui))
    assert (app.refused, app.launched is None) == (IN_USE if refused else None, refused)
    assert app.opened == app.launched


# The batch script of a job, changed in an editor from the question before a launch.


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
        submitted.append(script)
        if len(submitted) == 1:
            raise SlurmError("sbatch refused: the queue is closed")
        return "7"

    monkeypatch.setattr(client, "submit", submit)
    monkeypatch.setattr(client, "own_jobs", lambda: ())
    monkeypatch.setenv("EDITOR", "sed -i '$ a # mine'")
    async with opened(runs_dir) as ui:
        await question(ui, launch)
        await ui.press("e", "y")
        await ui.until(lambda: isinstance(ui.screen, Notice))
        assert "the queue is closed" in ui.text()
        (kept,) = kept_scripts()
        assert kept.read_text().endswith("# mine\n")
        await ui.pilot.click("#offer")
        await ui.until(lambda: isinstance(ui.screen, JobQuestion))
        assert "You have changed the batch script" in ui.text()
        await ui.press("e", "y")
        await ui.until(lambda: len(submitted) == 2 and ui.app.opened)
    assert submitted[1].endswith("# mine\n# mine\n")
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
