"""The Presets screen: what fits where, and for which machine."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Input, Static

from so_tui.machine import Machine, inspect_machine
from so_tui.machine.known import MACHINES
from so_tui.plan.planner import plan_table
from so_tui.runs import RunDirectory, create_run
from so_tui.spec import RunSpec, load_catalog
from so_tui.ui import messages
from so_tui.ui.app import SoTuiApp
from so_tui.ui.configure.form import FieldRow
from so_tui.ui.dialogs import Question
from so_tui.ui.other_machine import _MachineSuggester
from so_tui.ui.presets.screen import PresetsScreen
from so_tui.ui.runs.screen import RunsScreen
from so_tui.units import duration, rate
from tests.support.machines import machine_json, x86
from tests.support.make_run import quad_machine, write_run
from tests.support.planning import CPU_ONLY
from tests.support.screen import opened
from tests.support.waiting import LIMIT_S


def never(*_: object, **__: object) -> RunDirectory:
    """Stand in for the start of a run where none may be started."""
    raise AssertionError("a run was started")


async def test_the_plan_under_the_cursor_says_how_fast_the_run_will_be(runs_dir: Path) -> None:
    async with opened(runs_dir, (140, 40)) as ui:
        table = await ui.presets()
        assert isinstance(ui.screen, PresetsScreen)
        rows = {row.preset: row for row in ui.screen.rows}
        shown = [key.value for key in table.rows]
        for preset in ("qwen3-14b", "llama-3.1-8b"):
            plan = rows[preset].cells[4]
            assert plan.step is not None
            assert plan.step_s
            assert plan.useful_tokens_per_s_total
            table.move_cursor(row=shown.index(preset), column=len(table.columns) - 1)
            await ui.until(lambda: rows[preset].title in ui.shown("#detail-title"))  # noqa: B023 - called at once
            title, detail = ui.shown("#detail-title"), ui.shown("#detail")
            assert f"{rate(plan.useful_tokens_per_s_total)} tokens/s" in title
            assert re.search(rf"step +\S+ +{duration(plan.step_s)}\n", detail)
            assert f"backward {duration(plan.step.backward_s)}" in detail


async def test_the_filter_keeps_the_chosen_model(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        await ui.press("slash")
        await ui.type_text("30b")
        await ui.press("enter")
        assert table.row_count == 1
        assert "Qwen3 30B" in ui.shown("#detail-title")
        await ui.press("escape")
        assert table.row_count > 1
        await ui.until(lambda: "Qwen3 30B" in ui.shown("#detail-title"))
        await ui.press("slash")
        await ui.type_text("zzz")
        await ui.until(lambda: "no match" in ui.shown("#detail-title"))


async def test_a_preset_that_does_not_fit_says_why_and_is_not_started(runs_dir: Path) -> None:
    async with opened(runs_dir, start=never) as ui:
        table = await ui.presets()
        table.move_cursor(row=table.get_row_index("llama-3.3-70b"), column=table.cursor_column)
        await ui.press("l")
        await ui.until(lambda: "does not fit here" in ui.text())
        assert "needs" in ui.text()


async def test_a_users_bad_preset_is_reported(runs_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "so-tui" / "presets"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text('extends = "tiny"\n[offload]\nratoi = 0.5\n')
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        assert table.row_count == len(load_catalog().presets)
        reported = ui.shown("#problems")
        assert "ratoi" in reported
        assert "broken.toml" in reported


async def test_nothing_starts_on_a_described_machine(runs_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "quad.json"
    file.write_bytes(machine_json(quad_machine()))
    async with opened(runs_dir, this_machine=True, start=never) as ui:
        table = await ui.presets()
        here = len(table.columns)
        await ui.press("o")
        await ui.until(lambda: ui.screen.query("#said"))
        await ui.type_text("/nothing/there")
        await ui.press("enter")
        await ui.until(lambda: "cannot be read" in ui.shown("#said"))
        ui.find("Input", Input).value = str(file)
        await ui.press("enter")
        await ui.until(lambda: "quad-gh200  planning for another machine" in ui.text())
        await ui.until(lambda: "4 GPUs" in ui.text())
        for screen in "12":
            await ui.press(screen)
            await ui.until(lambda: "planning for another machine" in ui.text())
            await ui.press("f5")
            await ui.until(lambda: "was not started" in ui.text())
            await ui.press("escape")
        await ui.press("5", "g")
        await ui.until(lambda: "planning for another machine" not in ui.text())
        await ui.press("1")
        await ui.until(lambda: len(ui.find("#table", DataTable).columns) == here)


async def test_a_late_inspection_replaces_no_other_machine(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, late = threading.Event(), threading.Event()
    answers: list[Machine] = []
    answer = messages.answer

    def inspected() -> Machine:
        begun.set()
        late.wait(LIMIT_S)
        return inspect_machine()

    def noted(app: SoTuiApp, take: Callable[..., object], *results: Any) -> None:
        answer(app, take, *results)
        if take == app.take_loaded:
            answers.append(results[1])

    async with opened(runs_dir) as ui:
        monkeypatch.setattr("so_tui.machine.inspect_machine", inspected)
        monkeypatch.setattr(messages, "answer", noted)
        await ui.press("5", "g")
        await ui.until(begun.is_set)
        ui.app.load(quad_machine(), "quad.json")
        await ui.until(lambda: "quad-gh200  planning for another machine" in ui.text())
        late.set()
        await ui.until(lambda: len(answers) == 2)
        assert "quad-gh200  planning for another machine" in ui.text()


async def test_the_first_run_ends_the_first_visit(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.presets()
        spec: RunSpec = load_catalog().presets["tiny"].spec
        create_run(spec, runs_dir)  # as another process would
        ui.app.list_runs()
        await ui.until(lambda: len(ui.app.runs) == 1)
        assert not ui.screen.query_one("#first-visit").display


async def test_no_key_is_offered_before_it_can_do_anything(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes seconds on a busy machine: what is pressed meanwhile is not offered."""
    planned = threading.Event()

    def slowly(*given: Any) -> Any:
        planned.wait(LIMIT_S)
        return plan_table(*given)

    monkeypatch.setattr("so_tui.plan.planner.plan_table", slowly)
    async with opened(runs_dir, machine=CPU_ONLY, start=never) as ui:
        await ui.until(lambda: "no GPU" in ui.shown("#about-machine"))
        for key in ("enter Configure", "l Launch", "d Data"):
            assert key not in ui.key_line
        assert "o Other machine" in ui.key_line
        await ui.press("enter", "l", "d", "t")
        assert ui.app.current_mode == "presets"
        assert len(ui.app.screen_stack) == 1
        planned.set()
        await ui.until(lambda: isinstance(ui.screen, Question))
        assert "Launch tiny" in ui.text()
        await ui.press("escape")
        for key in ("enter Configure", "l Launch", "d Data"):
            assert key in ui.key_line


async def test_without_a_gpu_one_key_trains_tiny(runs_dir: Path) -> None:
    async with opened(runs_dir, machine=CPU_ONLY, start=never) as ui:
        await ui.presets()
        assert "no GPU" in ui.shown("#about-machine")
        assert "tiny" in ui.shown("#detail-title"), "what else fits would take hours a step"
        assert not ui.find("#first-visit", Static).display
        await ui.press("t")
        await ui.until(lambda: isinstance(ui.screen, Question))
        assert "tiny" in ui.text()
        await ui.press("escape")
        line = ui.shown("#about-machine").splitlines()[2]
        await ui.pilot.click("#about-machine", offset=(line.index("another"), 2))
        await ui.until(lambda: ui.screen.query("#said"))
        entry = ui.find("Input", Input)
        await ui.press("down")
        assert entry.value == "gh200-480"
        row = next(row for row, line in enumerate(ui.lines()) if "gh200-120 " in line)
        await ui.pilot.click(offset=(ui.lines()[row].index("gh200-120"), row))
        assert entry.value == "gh200-120"
        listed = ui.text()
        assert all(
            word in listed
            for word in (MACHINES["gh200-120"].title, MACHINES["gh200-120"].source, "not measured")
        )
        await ui.type_text("gh200-q", replace=True)
        await ui.until(lambda: entry._suggestion == "gh200-quad-120")
        await ui.press("right", "enter")
        await ui.until(lambda: ui.app.machine_file == "gh200-quad-120")
        await ui.until(lambda: "4 GPUs" in ui.text())
        told = ui.shown("#about-machine")
        assert all(
            word in told
            for word in ("gh200-quad-120", "not measured", MACHINES["gh200-quad-120"].source)
        )
        await ui.resize(80, 24)
        await ui.until(lambda: ui.find("#about-machine", Static).size.height == 1)
        assert all(
            word in ui.shown("#about-machine") for word in ("gh200-quad-120", "not measured")
        )


async def test_models_that_need_gpus_are_one_line_on_a_machine_without(runs_dir: Path) -> None:
    every = len(load_catalog().presets)
    async with opened(runs_dir, machine=CPU_ONLY, start=never) as ui:
        table = await ui.presets()
        assert [row.key.value for row in table.ordered_rows] == ["tiny"]
        assert "too big" not in ui.text()
        assert f"{every - 1} models need GPUs" in ui.shown("#folded")
        await ui.press("slash")
        await ui.type_text("30b")
        await ui.press("enter")
        assert [row.key.value for row in table.ordered_rows] == ["qwen3-30b-a3b"]
        assert not ui.find("#folded", Static).display
        await ui.until(lambda: "Qwen3 30B" in ui.shown("#detail-title"))
        await ui.press("escape")
        await ui.until(lambda: "tiny" in ui.shown("#detail-title"))
        assert table.row_count == 1
        assert table.cursor_coordinate == (0, 2)
        await ui.pilot.click("#folded", offset=(ui.shown("#folded").index("plans"), 0))
        await ui.until(lambda: ui.screen.query("#said"))
        await ui.type_text("gh200-quad-120", replace=True)
        await ui.press("enter")
        await ui.until(lambda: table.row_count == every)
        assert not ui.find("#folded", Static).display


async def test_what_would_take_hours_a_step_needs_gpus_too(runs_dir: Path) -> None:
    async with opened(runs_dir, machine=x86(cores=64, memory_mib=512 * 1024)) as ui:
        table = await ui.presets()
        assert [row.key.value for row in table.ordered_rows] == ["tiny"]


@pytest.mark.parametrize("slurm", [True, False])
async def test_a_login_node_leads_to_the_field_for_the_partition(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, slurm: bool
) -> None:
    monkeypatch.setattr("so_tui.ui.preset_actions.has_slurm", lambda: slurm)
    async with opened(runs_dir, machine=CPU_ONLY) as ui:
        await ui.presets()
        assert ("partition" in ui.shown("#about-machine")) is slurm
        await ui.press("slash")
        await ui.type_text("phi-4")
        await ui.press("enter", "P")
        if slurm:
            await ui.until(
                lambda: [row for row in ui.screen.query(FieldRow) if row.has_focus_within]
            )
            assert ui.find("#field-slurm-partition", FieldRow).has_focus_within
            assert "phi-4" in ui.shown("#form-title")
        assert ui.app.current_mode == ("configure" if slurm else "presets")


async def test_plans_are_shown_under_their_machines_name(runs_dir: Path) -> None:
    async with opened(runs_dir, machine=CPU_ONLY) as ui:
        table = await ui.presets()
        rows: list[int] = []
        ui.app.watch(ui.app, "machine", lambda: rows.append(table.row_count), init=False)
        ui.app.load(quad_machine(), "quad.json")
        await ui.until(lambda: "4 GPUs" in ui.text())
        assert rows == [0]


@pytest.mark.parametrize("page", ["1", "4"])
async def test_tables_drawn_before_measured_are_whole(runs_dir: Path, page: str) -> None:
    run = write_run(runs_dir, steps=2, seconds_of_samples=2, name="a-run-with-a-name")
    async with opened(runs_dir, open_run=run) as ui:
        await ui.press(page)
        screen = ui.screen
        assert isinstance(screen, PresetsScreen | RunsScreen)
        await ui.until(lambda: screen.table.row_count and ui.app.runs)
        screen.filtered()
        ui.text()
        await ui.pilot.pause()
        row, text = (3, "Qwen3 14B") if page == "1" else (1, "a-run-with-a-name")
        assert text in ui.lines()[screen.table.content_region.y + row]


async def test_the_cursor_keeps_its_plan_in_a_wider_terminal(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        columns, before = len(table.columns), ui.shown("#detail-title")
        await ui.press("right")
        await ui.until(lambda: ui.shown("#detail-title") != before)
        chosen = ui.shown("#detail-title").split()
        await ui.resize(200, 50)
        await ui.until(lambda: len(table.columns) > columns)
        assert ui.shown("#detail-title").split() == chosen


async def test_paths_are_completed_too(tmp_path: Path) -> None:
    (tmp_path / "node.json").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "with\x1b[31m").touch()
    suggester = _MachineSuggester()
    assert await suggester.get_suggestion("gh200-4") == "gh200-480"
    assert await suggester.get_suggestion(f"{tmp_path}/") == f"{tmp_path}/node.json"
    assert await suggester.get_suggestion(f"{tmp_path}/with") is None
    assert await suggester.get_suggestion(f"{tmp_path}/none/x") is None
    assert await suggester.get_suggestion("zzz") is None
    assert await suggester.get_suggestion("~nobody-is-called-so/x") is None
