"""The Presets screen: what fits where, for which machine, and models that are added."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.containers import Vertical
from textual.widgets import DataTable, Input, Label, Static

from so_tui.launch.slurm.client import Partition
from so_tui.machine import Machine, inspect_machine
from so_tui.machine.known import MACHINES, named_machine
from so_tui.machine.types import Software
from so_tui.plan.gist import compact_moments
from so_tui.plan.planner import plan_table
from so_tui.plan.show import shortfall
from so_tui.runs import RunDirectory
from so_tui.spec import find_preset, load_catalog, save_preset
from so_tui.ui import messages
from so_tui.ui.app import SoTuiApp
from so_tui.ui.configure.form import FieldRow
from so_tui.ui.dialogs import AskText, Question
from so_tui.ui.machine.host import HostPanel
from so_tui.ui.other_machine import _MachineSuggester
from so_tui.ui.presets.screen import PresetsScreen
from so_tui.ui.presets.table import PresetTable
from so_tui.ui.runs.screen import RunsScreen
from so_tui.units import duration, rate
from tests.support.machines import machine_json, x86
from tests.support.make_run import quad_machine, write_run
from tests.support.planning import CPU_ONLY
from tests.support.screen import Driver, opened
from tests.support.waiting import LIMIT_S


def never(*_: object, **__: object) -> RunDirectory:
    """Stand in for the start of a run where none may be started."""
    raise AssertionError("a run was started")


async def test_the_plan_under_the_cursor_says_how_fast_the_run_will_be(runs_dir: Path) -> None:
    async with opened(runs_dir, (140, 40)) as ui:
        table = await ui.presets()
        assert isinstance(ui.screen, PresetsScreen)
        (row,) = (row for row in ui.screen.rows if row.preset == "qwen3-14b")
        plan = row.cells[4]
        table.move_cursor(row=table.get_row_index(row.preset), column=len(table.columns) - 1)
        await ui.until(lambda: row.title in ui.shown("#detail-title"))
        speed = f"{rate(plan.useful_tokens_per_s_total or 0)} tokens/s"
        assert speed in ui.shown("#detail-title")
        assert re.search(rf"step +\S+ +{duration(plan.step_s or 0)}\n", ui.shown("#detail"))


@pytest.mark.parametrize("name", MACHINES)
async def test_no_figure_is_cut_at_any_width(runs_dir: Path, name: str) -> None:
    async with opened(runs_dir, (80, 24), machine=named_machine(name), machine_file=name) as ui:
        table = await ui.presets()
        assert isinstance(ui.screen, PresetsScreen)
        assert isinstance(table, PresetTable)
        rows, counts = ui.screen.rows, ui.screen.counts
        speeds = {
            (row.preset, gpus): rate(plan.useful_tokens_per_s_total or 0)
            if plan.fits
            else shortfall(plan).replace(" ", "")
            for row in rows
            for gpus, plan in row.cells.items()
        }
        for width in (80, 120, 139, 140, 160):
            await ui.resize(width, 40)
            await ui.until(lambda: table.region.width >= table.cells, 10)
            assert table.cells == table.virtual_size.width, width
        for room in range(36, 220):
            table.room = room
            table.show(rows, counts, "GPU")
            widths = [column.get_render_width(table) for column in table.ordered_columns]
            assert sum(widths) <= room, room
            if room >= 78:
                assert len(table._counts) == len(counts), room
            for row in rows:
                cells = table.get_row(row.preset)[-len(table._counts) :]
                for gpus, cell, width in zip(
                    table._counts, cells, widths[-len(cells) :], strict=True
                ):
                    assert cell.cell_len <= width - 2 * table.cell_padding
                    assert speeds[row.preset, gpus] in cell.plain.replace(" ", ""), room


async def test_every_number_of_gpus_is_reached_where_few_fit(runs_dir: Path) -> None:
    async with opened(runs_dir, (40, 24)) as ui:
        table = await ui.presets()
        assert isinstance(table, PresetTable)
        seen = []
        for key in ("home", "right", "right", "right", "left", "left"):
            await ui.press(key)
            if (chosen := table.chosen()) is not None:
                seen.append(chosen[1].gpus)
        assert seen[1:] == [1, 2, 4, 2, 1]


async def test_a_cell_says_what_is_short_and_a_line_what_marks_mean(runs_dir: Path) -> None:
    async with opened(runs_dir, (160, 45)) as ui:
        table = await ui.presets()
        assert isinstance(ui.screen, PresetsScreen)
        (row,) = (row for row in ui.screen.rows if row.preset == "llama-3.3-70b")
        cell = table.get_row(row.preset)[-1].plain
        assert cell.strip() == f"✗ {shortfall(row.cells[4])}"
        signs = (
            "★ so-tui run starts this",
            "⇡ fastest",
            "* compact moments",
            "✗ needs > has (GiB)",
        )
        for plans in (row.cells for row in ui.screen.rows):
            compact = [each.fits and each.spec.offload.states != "fp32" for each in plans.values()]
            cells = table.get_row(next(iter(plans.values())).spec.name)[-len(plans) :]
            assert ["*" in cell.plain for cell in cells] == compact
        for meaning in signs:
            assert meaning in ui.shown("#legend")
        fitting, chosen = (ui.find(name, Vertical) for name in ("#fitting", "#chosen"))
        assert fitting.region.y == chosen.region.y, "beside each other"
        await ui.resize(139, 45)
        await ui.until(lambda: fitting.region.y < chosen.region.y)
        assert "full-parameter" in ui.text().lower()


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (140, 36), (160, 45)])
async def test_compact_moments_are_marked_and_the_legend_stands(
    runs_dir: Path, size: tuple[int, int]
) -> None:
    name = "gh200-quad-120"
    async with opened(runs_dir, size, machine=named_machine(name), machine_file=name) as ui:
        table = await ui.presets()
        assert isinstance(table, PresetTable)
        assert isinstance(ui.screen, PresetsScreen)
        marked = {
            (row.preset, gpus): "*" in cell.plain
            for row in ui.screen.rows
            for gpus, cell in zip(table._counts, table.get_row(row.preset)[-3:], strict=True)
        }
        compact = {
            (row.preset, gpus): plan.fits and bool(compact_moments(plan))
            for row in ui.screen.rows
            for gpus, plan in row.cells.items()
        }
        assert marked == compact
        assert set(marked.values()) == {True, False}
        legend, lines = ui.find("#legend", Static), ui.shown("#legend").splitlines()
        text = " ".join(lines)
        for meaning in ("0.90 offload ratio", "* compact moments", "tokens/s"):
            assert meaning in text
        short = "none" in table.get_row("tiny")[-1].plain
        assert ("none: no offload" in text) is short
        await ui.until(lambda: legend.region.height == len(lines))
        assert ui.find("#fitting", Vertical).content_region.contains_region(legend.region)


@pytest.mark.parametrize("width", [140, 160, 189])
async def test_beside_the_table_names_of_terms_are_whole(runs_dir: Path, width: int) -> None:
    async with opened(runs_dir, (width, 60)) as ui:
        table = await ui.presets()
        assert isinstance(table, PresetTable)
        table.select("qwen3-14b")
        chosen = table.chosen()
        assert chosen is not None
        await ui.until(lambda: chosen[0].title in ui.shown("#detail-title"))
        assert all(term.name in ui.shown("#detail") for term in chosen[1].largest_terms("gpu"))
        fitting = ui.find("#fitting", Vertical)
        assert fitting.content_size.width == max(78, table.cells)


async def test_the_number_of_gpus_that_is_faster_is_named(runs_dir: Path) -> None:
    async with opened(runs_dir, (140, 40)) as ui:
        table = await ui.presets()
        assert isinstance(table, PresetTable)
        table.select("qwen3-14b")
        chosen = table.chosen()
        assert chosen is not None
        row, plan = chosen
        fastest = row.cells[4].useful_tokens_per_s_total or 0
        times = fastest / (plan.useful_tokens_per_s_total or 0)
        line = f"faster  4 GPUs: {rate(fastest)} tokens/s, {times:.1f}x"
        await ui.until(lambda: line in ui.shown("#detail"))
        await ui.press("end")
        await ui.until(lambda: "on 4 GPUs" in ui.shown("#detail-title"))
        assert not re.search("4 GPUs:|nothing known", ui.shown("#detail"))


async def test_the_cell_of_a_plan_that_is_shown_for_a_model_is_underlined(runs_dir: Path) -> None:
    async with opened(runs_dir, (140, 40)) as ui:
        table = await ui.presets()
        assert isinstance(table, PresetTable)
        assert isinstance(ui.screen, PresetsScreen)

        def underlined() -> list[tuple[str, int]]:
            return [
                (row.preset, gpus)
                for row in rows
                for gpus, cell in zip(table._counts, table.get_row(row.preset)[-3:], strict=True)
                if any("underline" in str(span.style) for span in cell.spans)
            ]

        rows = ui.screen.rows
        for key, shown in (("home", [0]), ("down", [1]), ("right", [])):
            await ui.press(key)
            marks = [
                (rows[line].preset, gpus)
                for line in shown
                for gpus, plan in rows[line].cells.items()
                if plan.recommended
            ]
            await ui.until(lambda: underlined() == marks)  # noqa: B023 - called at once
        await ui.press("left")
        await ui.resize(150, 40)
        await ui.until(lambda: [preset for preset, _ in underlined()] == [rows[1].preset])


async def test_all_reasons_of_the_plan_under_the_cursor_are_a_key_away(runs_dir: Path) -> None:
    async with opened(runs_dir, (80, 24)) as ui:
        table = await ui.presets()
        assert isinstance(table, PresetTable)
        chosen = table.chosen()
        assert chosen is not None
        await ui.press("w")
        await ui.until(lambda: chosen[0].title in ui.dialog_title)
        shown = " ".join(
            str(line.content) for line in ui.screen.query(".dialog-body Static").results(Static)
        )
        assert all(term.name in shown for term in chosen[1].largest_terms("node"))
        await ui.press("w")
        await ui.until(lambda: isinstance(ui.screen, PresetsScreen))


async def test_launch_is_no_first_offer_while_planning_for_others(runs_dir: Path) -> None:
    async with opened(runs_dir, machine_file="quad.json") as ui:
        await ui.presets()
        for page in "12":
            await ui.press(page)
            await ui.until(lambda: "Launch" in ui.key_line)
            assert ui.key_line.index("Launch") > ui.key_line.index("Data")


async def find(ui: Driver, text: str) -> None:
    await ui.press("slash")
    await ui.type_text(text)
    await ui.press("enter")


async def test_wider_terminals_and_the_filter_keep_what_is_chosen(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        columns, before = len(table.columns), ui.shown("#detail-title")
        await ui.press("right")
        await ui.until(lambda: ui.shown("#detail-title") != before)
        chosen = ui.shown("#detail-title").split()
        await ui.resize(220, 50)
        await ui.until(lambda: len(table.columns) > columns)
        assert ui.shown("#detail-title").split() == chosen
        await find(ui, "30b")
        assert (table.row_count, "Qwen3 30B" in ui.shown("#detail-title")) == (1, True)
        await ui.press("escape")
        assert table.row_count > 1
        await ui.until(lambda: "Qwen3 30B" in ui.shown("#detail-title"))
        await ui.press("slash")
        await ui.type_text("zzz")
        await ui.until(lambda: "no match" in ui.shown("#detail-title"))


async def test_bad_presets_and_such_that_do_not_fit_say_why(runs_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "so-tui" / "presets"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text('extends = "tiny"\n[offload]\nratoi = 0.5\n')
    async with opened(runs_dir, start=never) as ui:
        table = await ui.presets()
        assert table.row_count == len(load_catalog().presets)
        assert re.search("broken.toml(.|\n)*ratoi", ui.shown("#problems"))
        table.move_cursor(row=table.get_row_index("llama-3.3-70b"), column=table.cursor_column)
        await ui.press("l")
        await ui.until(lambda: "does not fit here" in ui.text())
        assert "needs" in ui.text()


async def test_nothing_starts_on_a_described_machine(runs_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "quad.json"
    file.write_bytes(machine_json(replace(quad_machine(), software=Software())))
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
            assert not ui.screen.query("#offer")
            await ui.press("escape")
        await ui.press("5")
        await ui.until(lambda: "software: not known of a described machine" in ui.text())
        assert "absent" not in ui.text()
        assert not ui.find("HostPanel", HostPanel).display, "what is not this host is not sampled"
        await ui.press("g")
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


async def test_no_key_is_offered_before_it_can_do_anything(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes seconds on a busy machine: what is pressed meanwhile is not offered."""
    planned, keys = threading.Event(), ("enter Configure", "l Launch", "d Data")

    def slowly(*given: Any) -> Any:
        planned.wait(LIMIT_S)
        return plan_table(*given)

    monkeypatch.setattr("so_tui.plan.planner.plan_table", slowly)
    async with opened(runs_dir, machine=CPU_ONLY, start=never) as ui:
        await ui.until(lambda: "no GPU" in ui.shown("#about-machine"))
        assert not any(key in ui.key_line for key in keys)
        assert "o Other machine" in ui.key_line
        await ui.press("enter", "l", "d", "t")
        assert (ui.app.current_mode, len(ui.app.screen_stack)) == ("presets", 1)
        planned.set()
        await ui.until(lambda: isinstance(ui.screen, Question))
        assert "Launch tiny" in ui.text()
        await ui.press("escape")
        assert all(key in ui.key_line for key in keys)


async def test_without_a_gpu_one_key_trains_tiny(runs_dir: Path) -> None:
    async with opened(runs_dir, machine=CPU_ONLY, start=never) as ui:
        await ui.presets()
        assert "tiny" in ui.shown("#detail-title"), "what else fits would take hours a step"
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
        await ui.type_text("gh200-q", replace=True)
        await ui.until(lambda: entry._suggestion == "gh200-quad-120")
        await ui.press("right", "enter")
        await ui.until(lambda: ui.app.machine_file == "gh200-quad-120")
        await ui.until(lambda: "4 GPUs" in ui.text())
        await ui.press("o")
        await ui.until(lambda: ui.screen.query("#said"))
        await ui.until(lambda: ui.find("Input", Input).selected_text == "gh200-quad-120")
        await ui.press("h")
        assert ui.find("Input", Input).value == "h", "replaces the name that is there"
        await ui.press("escape")
        about = ui.shown("#about-machine")
        source = MACHINES["gh200-quad-120"].source
        assert all(word in about for word in ("gh200-quad-120", source, "not measured"))


async def test_models_that_need_gpus_are_one_line_on_a_machine_without(runs_dir: Path) -> None:
    every = len(load_catalog().presets)

    def presets() -> list[str | None]:
        return [row.key.value for row in table.ordered_rows]

    async with opened(runs_dir, machine=CPU_ONLY, start=never) as ui:
        table = await ui.presets()
        assert presets() == ["tiny"]
        await find(ui, "30b")
        assert (presets(), ui.find("#folded", Static).display) == (["qwen3-30b-a3b"], False)
        await ui.press("escape")
        await ui.until(lambda: "tiny" in ui.shown("#detail-title"))
        assert (table.row_count, table.cursor_coordinate) == (1, (0, 4)), "★"
        await ui.pilot.click("#folded", offset=(ui.shown("#folded").index("plans"), 0))
        await ui.until(lambda: ui.screen.query("#said"))
        await ui.type_text("gh200-quad-120", replace=True)
        await ui.press("enter")
        await ui.until(lambda: table.row_count == every)
        rows: list[int] = []
        ui.app.watch(ui.app, "machine", lambda: rows.append(table.row_count), init=False)
        ui.app.load(quad_machine(), "quad.json")
        await ui.until(lambda: rows and table.row_count == every)
        assert rows == [0], "no plans of one machine under the name of another"
        ui.app.load(x86(cores=64, memory_mib=512 * 1024), "")
        await ui.until(lambda: presets() == ["tiny"])  # the others would take hours a step


async def test_a_login_node_leads_to_the_field_for_the_partition(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("so_tui.ui.preset_actions.has_slurm", lambda: True)
    async with opened(runs_dir, machine=CPU_ONLY) as ui:
        await ui.presets()
        assert "partition" in ui.shown("#about-machine")
        await find(ui, "phi-4")
        await ui.press("P")
        await ui.until(lambda: any(row.has_focus_within for row in ui.screen.query(FieldRow)))
        assert ui.find("#field-slurm-partition", FieldRow).has_focus_within
        assert "phi-4" in ui.shown("#form-title")


@pytest.mark.parametrize(("default", "entered"), [("gh", "gh"), ("", "")])
async def test_three_keys_lead_from_a_login_node_to_a_job(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, default: str, entered: str
) -> None:
    """The partition that Slurm takes by default is entered; what is typed replaces it."""
    known = tuple(Partition(name=name, default=name == default) for name in ("gh", "debug"))
    monkeypatch.setattr("so_tui.ui.preset_actions.has_slurm", lambda: True)
    monkeypatch.setattr("so_tui.launch.slurm.client.partitions", lambda: known)
    async with opened(runs_dir, machine=CPU_ONLY) as ui:
        await ui.presets()

        def row() -> FieldRow:
            return ui.find("#field-slurm-partition", FieldRow)

        def note() -> str:
            return str(row().query_one(".field-note", Label).content)

        for _ in range(2):  # the second time, Slurm's answer is there already
            await ui.press("P")
            await ui.until(lambda: any(row.has_focus_within for row in ui.screen.query(FieldRow)))
            await ui.until(lambda: "nodes free" in note() if default else "gh, debug" in note())
            assert row().query_one(Input).value == entered
            await ui.press("x")
            await ui.until(lambda: "none of" in note())
            assert row().query_one(Input).value == "x"
            await ui.press("backspace", "escape", "1")
            await ui.presets()


@pytest.mark.parametrize("page", ["1", "4"])
async def test_tables_drawn_before_measured_are_whole(runs_dir: Path, page: str) -> None:
    run = write_run(runs_dir, steps=2, name="a-run-with-a-name")
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


async def test_paths_are_completed_too(tmp_path: Path) -> None:
    for name in ("node.json", ".hidden", "with\x1b[31m"):
        (tmp_path / name).touch()
    for typed, suggestion in (
        ("gh200-4", "gh200-480"),
        (f"{tmp_path}/", f"{tmp_path}/node.json"),
        (f"{tmp_path}/with", None),
        (f"{tmp_path}/none/x", None),
        ("zzz", None),
        ("~nobody-is-called-so/x", None),
    ):
        assert await _MachineSuggester().get_suggestion(typed) == suggestion


# Adding a model from the Presets screen.

SLOW_S = 60


def answer(_: str, request: dict[str, Any], **__: object) -> Any:
    """Do here what a helper process does, which imports what it needs for several seconds."""
    from so_tui_trainer.tools.describe_model import describe

    return json.loads(json.dumps(list(describe(request))[-1]))


async def test_a_model_is_added_and_selected(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("so_tui.launch.helper_jobs.call_tool", answer)
    model = tmp_path / "Small-Llama"
    model.mkdir()
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **counts}))
    async with opened(runs_dir, (80, 24)) as ui:
        table = await ui.presets()
        before = table.row_count
        await ui.press("a", "enter")
        await ui.until(lambda: "Type a hub id or a folder first" in ui.text())
        field = ui.find("#model", Input)
        field.value = absent = str(tmp_path / "absent")
        await ui.press("enter")
        await ui.until(lambda: "there is no such folder" in ui.shown("#said"), SLOW_S)
        assert field.value == absent, "what was typed stays"
        field.value = str(model)
        await ui.press("enter")
        await ui.until(lambda: not isinstance(ui.screen, AskText), SLOW_S)
        await ui.until(lambda: table.row_count == before + 1)
        assert find_preset("small-llama").spec.model.id == str(model)
        await ui.until(lambda: "Small Llama" in ui.shown("#detail-title"))


async def test_ones_own_preset_is_deleted_after_a_question(runs_dir: Path) -> None:
    save_preset(find_preset("tiny").spec, "aa-mine", base="tiny")
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        table.move_cursor(row=table.get_row_index("aa-mine"))
        await ui.press("D")
        await ui.until(lambda: ui.dialog_title == "Delete your preset aa-mine?")
        await ui.press("enter")
        assert "aa-mine" in load_catalog().presets, "no is the default"
        await ui.press("D", "y")
        await ui.until(lambda: "aa-mine" not in load_catalog().presets)
