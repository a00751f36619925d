"""Configure: its fields, what other values would do, the plan, and presets that are saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual import events
from textual.app import App, ComposeResult
from textual.color import Color
from textual.widget import Widget
from textual.widgets import Button, Input, Select, Static

from so_tui.machine.known import named_machine
from so_tui.plan.plan import Launch
from so_tui.plan.planner import make_plan
from so_tui.plan.show import shortfall
from so_tui.spec import find_preset, with_values
from so_tui.ui.configure.form import FieldRow, FormPanel, _Stepper, _Tick
from so_tui.ui.configure.plan_pane import PlanPanel, WhatIf, _figures, nearest_fit
from so_tui.ui.configure.screen import ConfigureScreen
from so_tui.ui.form import CORES, LENGTH, RATIO, Draft, Strip, strips_for
from so_tui.ui.widgets import FindField
from tests.support.make_run import plan_for, quad_machine
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")


def titled(ui: Driver, text: str) -> Callable[[], bool]:
    return lambda: text in ui.shown("#form-title")


def note_of(row: FieldRow) -> str:
    return str(row.query_one(".field-note", Static).content)


async def test_a_wrong_field_is_marked_and_nothing_is_launched(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Launch] = []

    def about() -> str:
        return ui.shown("#about").replace("\n", " ")

    monkeypatch.setattr(
        "so_tui.ui.preset_actions.ask_to_launch", lambda _, launch: asked.append(launch)
    )
    async with opened(runs_dir) as ui:
        await ui.configure()
        assert ui.find("#field-slurm-partition", FieldRow).disabled
        row = await ui.edit("train.learning_rate", "abc")
        await ui.until(lambda: row.has_class("-wrong"))
        await ui.press("f5")
        await ui.until(lambda: re.search("not launched.*train.learning_rate", about()))
        assert not ui.notes()
        await ui.type_text("1e-5", replace=True)
        await ui.until(lambda: not row.has_class("-wrong"))
        assert "not launched" not in about()
        await ui.press("escape", "u", "y")
        button = ui.find("#launch", Button)
        assert not button.disabled
        row = await ui.edit("offload.ratio", "1.5")
        await ui.until(lambda: row.has_class("-wrong"))
        assert button.disabled
        await ui.press("escape", "f5")
        assert ui.screen.focused is row.query_one(Input)
        await ui.type_text("0.5", replace=True)
        await ui.until(lambda: not row.has_class("-wrong") and not button.disabled)
        assert (row.has_class("-changed"), "was auto" in note_of(row)) == (True, True)
        row = await ui.edit("train.warmup_ratio", "0.0")
        await ui.until(lambda: row.has_class("-changed"))
        for key, character in (("7", "7"), ("f5", None)):
            ui.app.post_message(events.Key(key, character))
        await ui.until(lambda: asked)
        assert [launch.plan.spec.train.warmup_ratio for launch in asked] == [0.07]


async def test_what_was_chosen_is_no_change_and_is_named(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        table.move_cursor(row=table.get_row_index("phi-4"), column=0)
        await ui.press("enter")
        await ui.until(titled(ui, "preset phi-4, no changes"))
        assert titled(ui, "chosen for this machine (★)")()
        await ui.until(lambda: ui.screen.query(FieldRow) and "fits" in ui.shown("#verdict"))
        row = ui.find("#field-offload-ratio", FieldRow)
        chosen = row.query_one(Input).value
        assert "★" in note_of(row)
        assert not row.has_class("-changed")
        await ui.edit("offload.ratio", "0.55")
        await ui.until(titled(ui, "1 changed by you"))
        await ui.press("escape", "u", "y")
        await ui.until(titled(ui, "no changes"))
        await ui.until(lambda: "was" not in note_of(row))
        assert row.query_one(Input).value == chosen
        await ui.edit("offload.ratio", "auto")
        await ui.press("escape")
        await ui.until(lambda: row.query_one(Input).value == chosen)
        assert titled(ui, "no changes")()


async def test_fields_that_do_nothing_are_dimmed_and_skipped(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.configure()
        screen = ui.screen
        assert isinstance(screen, ConfigureScreen)
        screen.edit("llama-3.1-8b")
        await ui.until(titled(ui, "no changes"), 20)
        mode, ratio, cores = (
            row_of(ui, f"offload.{name}") for name in ("mode", "ratio", "cpu_adam_cores_fraction")
        )
        mode.query_one(Select).value = "superoffload"
        await ui.edit("offload.cpu_adam_cores_fraction", "0.55")
        await ui.until(lambda: cores.has_class("-changed"), 20)
        mode.focus_control()
        await ui.until(lambda: mode.has_focus_within, 20)
        mode.query_one(Select).value = "gpu"
        await ui.until(lambda: ratio.has_class("-idle"), 20)
        assert all(row.disabled for row in (ratio, cores))
        form = ui.find("FormPanel", FormPanel)
        assert not {ratio, cores} & set(form.rows)
        draft = ui.app.drafts["llama-3.1-8b"]
        counted = re.search(r"([0-9]+) changed by you", ui.shown("#form-title"))
        assert counted
        assert int(counted[1]) == len(draft.changes) - 1, "the cores do nothing"
        mode.query_one(Select).value = "superoffload"
        await ui.until(lambda: not ratio.has_class("-idle") and not ratio.disabled, 20)


async def test_a_half_typed_number_moves_nothing(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.configure()
        row = await ui.edit("offload.ratio", "0.5")
        await ui.until(lambda: row.has_class("-changed"), 20)
        below = row_of(ui, "offload.states")
        before, plan = below.region, ui.shown("#plan-text")
        await ui.type_text("0.", replace=True)
        await ui.until(lambda: row.problem, 20)
        assert (below.region, ui.shown("#plan-text")) == (before, plan)


async def test_a_name_is_found_before_a_description(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.configure()
        form = ui.find("FormPanel", FormPanel)
        await ui.press("slash")
        await ui.type_text("ratio")
        await ui.until(lambda: len(form.rows) < 8, 20)
        assert "data.subset" not in {row.path for row in form.rows}


async def test_a_key_uses_the_nearest_ratio_that_fits(runs_dir: Path) -> None:
    async with opened(runs_dir, (160, 45), machine=named_machine("gh200-480")) as ui:
        await ui.presets()
        await ui.press("2")
        screen = ui.screen
        assert isinstance(screen, ConfigureScreen)
        screen.edit("qwen3-14b")
        planned = attrgetter("_planned.plan.spec.name")
        await ui.until(lambda: screen._planned and planned(screen) == "qwen3-14b", 20)
        await ui.edit("offload.ratio", "0.5")
        what_if = ui.find("#what-if", WhatIf)
        await ui.until(lambda: "which fits" in ui.shown("#verdict") and what_if.strips, 20)
        strips = what_if.strips
        (strip,) = (strip for strip in strips if strip.path == RATIO)
        unfit = strip.choices[strip.at]
        shown = _figures(unfit, 80).plain
        assert unfit.plan.shortage is not None
        assert shown.split("✗ ")[1] == f"{shortfall(unfit.plan)} GiB"
        await ui.press("escape", "f")
        await ui.until(lambda: "✓ fits" in ui.shown("#verdict"), 20)


async def save_as(ui: Driver, name: str) -> None:
    if not ui.screen.query("#said"):
        await ui.press("ctrl+s")
        await ui.until(lambda: ui.screen.query("#said"))
    await ui.type_text(name, replace=True)
    await ui.press("enter")


async def test_edits_survive_screens_and_overwrite_no_preset_unasked(
    runs_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "config" / "so-tui" / "presets"
    folder.mkdir(parents=True)
    taken, new = folder / "taken.toml", folder / "my-tiny.toml"
    before = 'name = "taken"\nextends = "tiny"\n'
    taken.write_text(before)
    async with opened(runs_dir) as ui:
        await ui.configure()
        form = ui.screen
        assert isinstance(form, ConfigureScreen)
        for preset, rate in (("taken", "9e-4"), ("tiny", "2e-4")):
            form.edit(preset)
            await ui.until(titled(ui, f"preset {preset}, no changes"))
            await ui.edit("train.learning_rate", rate)
            await ui.until(titled(ui, "1 changed by you"))
        await ui.press("escape", "5", "2")
        assert titled(ui, "1 changed by you")()
        for name, answer in (("tiny", "is a built-in preset"), ("my_ x", "is not a valid name")):
            await save_as(ui, name)
            await ui.until(lambda: answer in ui.shown("#said"))  # noqa: B023 - called at once
            assert ui.find("Input", Input).value == name, "what was typed stays"
        await save_as(ui, "taken")
        await ui.until(lambda: "Replace your preset taken?" in ui.text())
        await ui.press("enter")  # the default keeps what is there
        await ui.until(lambda: ui.screen is form)
        assert titled(ui, "1 changed by you")()
        assert (taken.read_text(), [*folder.iterdir()]) == (before, [taken])
        await save_as(ui, "taken")
        await ui.press("y")
        await ui.until(lambda: "learning_rate = 0.0002" in taken.read_text())
        # What was typed over it before is gone as well.
        await ui.until(titled(ui, "preset taken, no changes"))
        form.edit("tiny")
        await ui.until(titled(ui, "preset tiny, no changes"))
        await ui.edit("train.learning_rate", "3e-4")
        await ui.press("escape")
        await save_as(ui, "my-tiny")
        await ui.until(new.exists)
        assert all(
            line in new.read_text() for line in ("learning_rate = 0.0003", 'extends = "tiny"')
        )
        await ui.until(titled(ui, "preset my-tiny, no changes"))
        await ui.press("q")
        await ui.until(lambda: not ui.app.is_running)  # nothing is unsaved, so nothing is asked


# The form: its fields, their descriptions, and what other values would do.


def focused_row(ui: Driver) -> str:
    return next((row.path for row in ui.screen.query(FieldRow) if row.has_focus_within), "")


def row_of(ui: Driver, path: str) -> FieldRow:
    return ui.find(f"#field-{path.replace('.', '-')}", FieldRow)


class Boxes(App[None]):
    def compose(self) -> ComposeResult:
        yield _Tick("no", False, compact=True)
        yield _Tick("yes", True, compact=True)


async def test_a_box_has_a_mark_only_while_it_is_on() -> None:
    async with Boxes().run_test() as pilot:
        await pilot.pause()
        lines = [strip.text for strip in pilot.app.screen._compositor.render_strips(pilot.app.size)]
        assert re.findall("▐(.)▌ +(yes|no)", "\n".join(lines)) == [(" ", "no"), ("X", "yes")]


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_the_settings_have_the_focus_while_no_field_has(
    runs_dir: Path, size: tuple[int, int]
) -> None:
    async with opened(runs_dir, size) as ui:
        await ui.configure()
        form = ui.find("FormPanel", FormPanel)
        assert ui.screen.focused is form
        assert "first field" in ui.shown("#about")
        if size > (80, 24):
            bordered = form.styles.border_top[1], ui.find("#plan", PlanPanel).styles.border_top[1]
            assert bordered[0].hex == Color.parse(ui.app.theme_variables["accent"]).hex
            assert bordered[0] != bordered[1]
        await ui.press("equals_sign")
        await ui.until(lambda: "What differs" in ui.dialog_title)
        await ui.press("escape")
        await ui.until(lambda: ui.screen.focused is form)
        await ui.press("down")
        await ui.until(lambda: focused_row(ui) == form.rows[0].path)
        assert "first field" not in ui.shown("#about")
        await ui.press("escape")
        await ui.until(lambda: "first field" in ui.shown("#about"))
        assert ui.screen.focused is form
        await ui.press("slash")
        await ui.until(lambda: isinstance(ui.screen.focused, Input))
        await ui.press("escape")
        await ui.until(lambda: ui.screen.focused is form)


async def test_arrows_move_between_fields_and_step_what_is_compared(runs_dir: Path) -> None:
    async with opened(runs_dir, (80, 24)) as ui:
        await ui.configure()
        form = ui.find("FormPanel", FormPanel)
        paths = [row.path for row in form.rows]
        for path in paths:
            await ui.press("down")
            await ui.until(lambda: focused_row(ui) == path)  # noqa: B023 - called at once
            row = row_of(ui, path)
            # A longer description takes rows from the fields, once it is laid out.
            await ui.until(
                lambda: form.fields.region.contains_region(row.region)  # noqa: B023 - called at once
            )
            assert path in ui.shown("#about")
        await ui.press("down")
        assert focused_row(ui) == paths[-1]
        await ui.press("up")
        await ui.until(lambda: focused_row(ui) == paths[-2])
        await ui.press("escape")
        page = ui.screen
        assert isinstance(page, ConfigureScreen)
        page.edit("qwen3-14b")
        await ui.until(lambda: "preset qwen3-14b" in ui.shown("#form-title"))
        strips = ui.find("WhatIf", WhatIf)
        await ui.until(lambda: [strip.path for strip in strips.strips] == [RATIO, CORES])
        before = strips.strips[0].present
        await ui.press("k")
        await ui.until(lambda: strips.has_focus)
        await ui.until(lambda: "left and right step the value" in ui.text())
        await ui.press("left")
        await ui.until(lambda: strips.strips and strips.strips[0].present < before)
        await ui.until(lambda: f"ratio {strips.strips[0].present:.2f}" in ui.shown("#verdict"))


async def test_a_field_is_stepped_found_and_described(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.configure()
        form = ui.find("FormPanel", FormPanel)
        row = row_of(ui, "train.micro_batch")
        steppers = row.query(_Stepper)
        row.scroll_visible(animate=False)
        await ui.pilot.pause()
        assert not any(stepper.region for stepper in steppers), "only on the selected field"
        await ui.pilot.click(row.query_one(".field-name"))
        await ui.until(lambda: row.has_focus_within and all(part.region for part in steppers))
        number = row.query_one(Input)
        before = int(number.value)
        for stepper in (1, 1, 0):  # more, more, less
            await ui.pilot.click(steppers[stepper])
        assert int(number.value) == before * 2
        await ui.press("shift+down")
        assert int(number.value) == before
        assert row.has_focus_within
        assert ui.app.unsaved() == {"tiny": 1}
        await ui.press("ctrl+r")
        assert not ui.app.unsaved()
        number.value = "4,096"
        await ui.pilot.click(steppers[1])
        assert number.value == "4,096", "the limit"
        row.show_status(was="a value of before", problem="", note="longer than what is left " * 3)
        note = row.query_one(".field-note", Static)
        await ui.until(lambda: note.content_region.area >= len(str(note.render())))
        await ui.press("escape", "u", "y", "slash")
        await ui.type_text("learning rate")
        await ui.until(lambda: 1 <= len(form.rows) <= 8)
        assert "Batch" not in ui.text()
        await ui.press("enter")
        await ui.until(lambda: focused_row(ui) == "train.learning_rate")
        await ui.press("escape", "slash")
        await ui.type_text("steps")
        await ui.press("enter")
        await ui.until(lambda: focused_row(ui) == LENGTH)
        await ui.press("escape", "slash")
        await ui.type_text("nothing is called so")
        await ui.until(lambda: not form.rows)
        await ui.press("escape")
        assert len(form.rows) > 10


async def test_a_field_to_find_with_takes_no_columns(runs_dir: Path) -> None:
    async with opened(runs_dir, (80, 24)) as ui:
        await ui.configure()
        form = ui.find("#form", Widget)
        before = form.region
        await ui.press("slash")
        await ui.until(lambda: ui.screen.query_one(FindField).region.height == 1)
        await ui.until(lambda: form.region != before)
        assert (form.region.x, form.region.width) == (before.x, before.width)


def test_the_nearest_ratio_that_fits_is_used_else_the_remedy() -> None:
    machine = named_machine("gh200-480")
    spec = find_preset("qwen3-14b").spec
    for policy, expected in (("attention", {RATIO}), ("auto", {"offload.mode", RATIO})):
        edits = {"offload.mode": "superoffload", RATIO: "0.5"}
        edits |= {"model.activation_checkpointing": policy} if policy != "auto" else {}
        plan = make_plan(with_values(spec, edits), machine)
        strips = strips_for(plan, machine)
        assert strips is not None
        changes = nearest_fit(plan, strips)
        assert changes.keys() <= expected
        assert make_plan(with_values(spec, edits | changes), machine).fits


def test_strips_say_what_other_values_cost() -> None:
    quad = quad_machine()
    plan = plan_for(quad, "qwen3-14b", 4, 100)
    strips = strips_for(plan, quad)
    assert strips is not None
    ratio, cores = strips
    assert (ratio.path, ratio.present, cores.path) == (RATIO, plan.ratio, CORES)
    assert ratio.choices[ratio.at].plan.step_s == pytest.approx(plan.step_s)
    values = [choice.value for choice in ratio.choices]
    assert values == sorted(values)
    # With nothing offloaded, the plan saves memory elsewhere to make it fit.
    gpu = [choice.plan.gpu_bytes or 0 for choice in ratio.choices[1:]]
    assert gpu == sorted(gpu, reverse=True), "more offloaded, less on the GPU"
    assert (ratio.stepped(1), ratio.stepped(-1)) == (0.2, 0.1)
    assert Strip(RATIO, ratio.choices, 1.0).stepped(1) is None
    assert strips_for(plan, quad, lambda: True) is None
    assert "host" in _figures(ratio.choices[ratio.at], 80).plain
    assert _figures(ratio.choices[ratio.at], 46).cell_length <= 46


# What counts as a change: what differs from what was opened or recommended.

TINY = find_preset("tiny").spec


CHOSEN = {
    "offload.ratio": "0.25",
    "offload.mode": "superoffload",
    "train.micro_batch": "2",
    "train.gradient_accumulation": "2",
}


def resolved(**changes: str) -> Draft:
    """Return a draft for which a plan chose ``CHOSEN``."""
    own = {key.replace("__", "."): text for key, text in changes.items()}
    draft = Draft(with_values(TINY, own))
    draft.resolve(replace(with_values(TINY, CHOSEN), fixed=draft.base.fixed), "this machine")
    return draft


def test_what_is_chosen_is_shown_and_what_is_edited_is_fixed() -> None:
    draft = resolved()
    assert {path: draft.chosen[path] for path in CHOSEN} == CHOSEN
    assert (draft.changes, draft.spec) == ([], TINY)
    assert not draft.enter("offload.ratio", "0.250"), "what is shown"
    assert draft.fix("offload.ratio")
    assert draft.edits == {"offload.ratio": "0.25"}
    assert draft.release("offload.ratio")
    draft.enter("offload.ratio", "0.9")
    assert draft.spec.fixed == ("offload.ratio",), "even to the preset's value"
    assert (draft.values["offload.ratio"], draft.was("offload.ratio")) == ("0.9", "auto")
    assert "offload.ratio" not in draft.chosen
    draft.enter("train.learning_rate", "0.123")
    assert draft.changes == ["offload.ratio", "train.learning_rate"]
    assert draft.was("train.learning_rate") == "0.003"
    draft.enter("offload.ratio", "auto")
    assert draft.changes == ["train.learning_rate"]
    assert draft.spec == with_values(TINY, {"train.learning_rate": "0.123"})
    assert draft.values["offload.ratio"] == "0.25"


def test_a_micro_batch_is_edited_beside_the_accumulation_shown() -> None:
    draft = resolved()
    draft.enter("train.micro_batch", "1")
    train = draft.spec.train
    assert (train.micro_batch, train.gradient_accumulation) == (1, 2)
    assert draft.is_fixed("train.gradient_accumulation")
    draft.release("train.gradient_accumulation")
    assert (draft.changes, draft.spec) == ([], TINY)


def test_what_a_preset_fixes_can_be_left_to_the_machine() -> None:
    draft = resolved(offload__ratio="0.5", gpus="2")
    assert draft.chosen.keys().isdisjoint({"offload.ratio", "gpus"})
    draft.enter("offload.ratio", "auto")
    assert (draft.spec.fixed, draft.was("offload.ratio")) == (("gpus",), "0.5")
    draft.enter("offload.ratio", "0.5")
    assert (draft.changes, draft.spec) == ([], draft.base)
    draft.release("gpus")
    assert draft.spec.fixed == ("offload.ratio",)
    draft.undo()
    assert draft.spec == draft.base


def test_a_plan_of_the_table_fixes_only_another_number_of_gpus() -> None:
    draft = resolved()
    draft.enter("train.seed", "7")
    draft.take(with_values(TINY, {"gpus": "4"}), "this machine")
    assert (draft.spec.gpus, draft.spec.fixed) == (4, ("gpus",))
    draft.take(replace(TINY, gpus=1), "this machine")
    assert (draft.spec.fixed, draft.values["gpus"], draft.changes) == ((), "1", ["train.seed"])
