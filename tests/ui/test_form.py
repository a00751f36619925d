"""The form of Configure: its fields, their descriptions, and what other values would do."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.css.stylesheet import Stylesheet
from textual.dom import DOMNode
from textual.widget import Widget
from textual.widgets import Input, Select, Static

from so_tui.machine.types import Machine
from so_tui.spec import Problem, field_index
from so_tui.ui.configure.form import FieldRow, FormPanel, _Stepper, _Tick
from so_tui.ui.configure.plan_pane import WhatIf, _figures
from so_tui.ui.configure.screen import ConfigureScreen
from so_tui.ui.form import CORES, LENGTH, RATIO, Strip, problem_text, strips_for
from so_tui.ui.widgets import FindField
from tests.support.make_run import plan_for, quad_machine, write_run
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")


def focused_row(ui: Driver) -> str:
    return next((row.path for row in ui.screen.query(FieldRow) if row.has_focus_within), "")


def reached(ui: Driver, path: str) -> bool:
    return focused_row(ui) == path


class Boxes(App[None]):
    """One box that begins off, and one that begins on."""

    def compose(self) -> ComposeResult:
        yield _Tick("no", False, compact=True)
        yield _Tick("yes", True, compact=True)


async def test_a_box_has_a_mark_only_while_it_is_on() -> None:
    async with Boxes().run_test() as pilot:
        await pilot.pause()
        lines = [strip.text for strip in pilot.app.screen._compositor.render_strips(pilot.app.size)]
        assert re.findall("▐(.)▌ +(yes|no)", "\n".join(lines)) == [(" ", "no"), ("X", "yes")]


async def test_arrows_move_between_fields_and_step_what_is_compared(runs_dir: Path) -> None:
    async with opened(runs_dir, (80, 24)) as ui:
        await ui.configure()
        form = ui.find("FormPanel", FormPanel)
        paths = [row.path for row in form.rows]
        for path in paths:
            await ui.press("down")
            await ui.until(partial(reached, ui, path))
            row = ui.find(f"#field-{path.replace('.', '-')}", FieldRow)
            # A longer description takes rows from the fields, once it is laid out.
            await ui.until(
                lambda: form.fields.region.contains_region(row.region)  # noqa: B023 - called at once
            )
            assert path in ui.shown("#about")
            control = ui.app.focused
            if isinstance(control, Input):
                assert control.selected_text == control.value
            elif isinstance(control, Select):
                assert not control.expanded
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
        assert ui.app.unsaved()["qwen3-14b"] >= 1


async def test_a_field_is_stepped_styled_found_and_described(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    styled: set[DOMNode] = set()
    apply = Stylesheet.apply

    def noted(sheet: Stylesheet, node: DOMNode, **options: Any) -> None:
        styled.add(node)
        apply(sheet, node, **options)

    async with opened(runs_dir) as ui:
        await ui.configure()
        form = ui.find("FormPanel", FormPanel)
        await ui.press("down")
        in_form, left = form.styles.border_top, focused_row(ui)
        with monkeypatch.context() as patched:
            patched.setattr(Stylesheet, "apply", noted)
            await ui.press("down")
        rows = {
            row.path
            for node in styled
            for row in node.ancestors_with_self
            if isinstance(row, FieldRow)
        }
        assert rows == {left, focused_row(ui)}, "and not the whole form"
        assert form.styles.border_top == in_form
        await ui.press("escape")
        assert form.styles.border_top != in_form, "a panel without the focus looks so"
        await ui.until(lambda: "fits" in ui.shown("#verdict"))
        row = ui.find("#field-offload-cpu_adam_cores_fraction", FieldRow)
        note = row.query_one(".field-note", Static)
        row.show_status(was=None, preset="0.9", problem="", note="Adam 64, main 8 on each")
        assert str(note.content) == "★ preset: 0.9"
        row.focus_control()
        await ui.until(lambda: str(note.content) == "★ preset: 0.9 · Adam 64, main 8 on each")
        await ui.press("escape")
        await ui.until(lambda: str(note.content) == "★ preset: 0.9")
        page = ui.screen
        assert isinstance(page, ConfigureScreen)
        row = ui.find("#field-train-micro_batch", FieldRow)
        row.scroll_visible(animate=False)
        await ui.pilot.pause()
        assert not any(stepper.region for stepper in row.query(_Stepper)), (
            "only on the selected field"
        )
        await ui.pilot.click(row.query_one(".field-name"))
        await ui.until(
            lambda: row.has_focus_within and all(stepper.region for stepper in row.query(_Stepper))
        )
        number = row.query_one(Input)
        before = int(number.value)
        await clicked(ui, row, 1, 2)
        assert int(number.value) == before * 4
        await clicked(ui, row, 0)
        await ui.press("shift+down")
        assert int(number.value) == before
        assert row.has_focus_within
        assert not ui.app.unsaved()
        number.value = "4,096"
        await clicked(ui, row, 1)
        assert number.value == "4,096", "the limit"
        for path in ("offload.cpu_adam_cores_fraction", "train.gradient_accumulation", "gpus"):
            row = ui.find(f"#field-{path.replace('.', '-')}", FieldRow)
            row.show_status(
                was="a value of before",
                problem="",
                note="a note that is longer than what is left of the row beside it",
            )
            row.focus_control()
            await ui.until(partial(reached, ui, path))
            note = row.query_one(".field-note", Static)
            await ui.until(lambda: note.content_region.area >= len(str(note.render())))  # noqa: B023 - called at once
            assert ui.find("FormPanel", FormPanel).fields.region.contains_region(row.region)
        await ui.press("escape", "u", "y")
        await ui.press("slash")
        await ui.type_text("learning rate")
        await ui.until(lambda: 1 <= len(form.rows) <= 8)
        assert "Batch" not in ui.text()
        await ui.press("enter")
        await ui.until(lambda: focused_row(ui) == "train.learning_rate")
        assert len(form.rows) > 10
        await ui.until(lambda: "train.learning_rate" in ui.shown("#about"))
        await ui.type_text("fast", replace=True)
        await ui.until(lambda: "✗ train.learning_rate" in ui.shown("#about"))
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
    write_run(runs_dir, steps=5, seconds_of_samples=1, state="finished")
    async with opened(runs_dir, (80, 24)) as ui:
        await ui.presets()
        for key, page, rows in (
            ("1", "presets", "#table"),
            ("2", "configure", "#form"),
            ("4", "runs", "#table"),
        ):
            await ui.press(key)
            await ui.until(
                lambda page=page, rows=rows: (  # type: ignore[misc]
                    ui.app.current_mode == page and ui.find(rows, Widget).region.width > 0
                )
            )
            before = ui.find(rows, Widget).region
            await ui.press("slash")
            await ui.until(lambda: ui.screen.query_one(FindField).region.height == 1)
            await ui.until(lambda: ui.find(rows, Widget).region != before)  # noqa: B023 - called at once
            after = ui.find(rows, Widget).region
            assert (after.x, after.width) == (before.x, before.width)
            assert after.y - before.y <= 1, "nothing is blank above it where rows are few"
            await ui.press("escape")


async def clicked(ui: Driver, row: FieldRow, at: int, times: int = 1) -> None:
    """Click the steppers of the selected row: the first takes less, the second more."""
    for _ in range(times):
        await ui.pilot.click(list(row.query(_Stepper))[at])


def test_a_description_writes_numbers_as_the_row_does() -> None:
    numbers = {
        path: FieldRow(info, path, "").about
        for path, info in field_index().items()
        if not info.choices
    }
    assert numbers["train.micro_batch"].endswith("from 1 to 4,096 sequences.")
    assert not [about for about in numbers.values() if re.search(r"\d_\d", about)]


def test_strips_say_what_other_values_cost(quad: Machine) -> None:
    plan = plan_for(quad, "qwen3-14b", 4, 100)
    strips = strips_for(plan, quad)
    assert strips is not None
    ratio, cores = strips
    assert (ratio.path, ratio.present, cores.path) == (RATIO, plan.ratio, CORES)
    assert ratio.choices[ratio.at].plan.step_s == pytest.approx(plan.step_s)
    assert [choice.value for choice in ratio.choices] == sorted(
        choice.value for choice in ratio.choices
    )
    # With nothing offloaded, the plan saves memory elsewhere to make it fit.
    gpu = [choice.plan.gpu_bytes or 0 for choice in ratio.choices[1:]]
    assert gpu == sorted(gpu, reverse=True), "more offloaded, less on the GPU"
    assert ratio.stepped(1) == 0.2
    assert ratio.stepped(-1) == 0.1
    assert Strip(RATIO, ratio.choices, 1.0).stepped(1) is None
    assert strips_for(plan, quad, lambda: True) is None
    assert "host" in _figures(ratio.choices[ratio.at], 80).plain
    assert _figures(ratio.choices[ratio.at], 46).cell_length <= 46


@pytest.fixture
def quad() -> Machine:
    return quad_machine()


def test_problems_are_sentences() -> None:
    clause = Problem(
        code="range", field="gpus", value="9", message="is out of range", remedy="Give 1 to 4."
    )
    whole = Problem(
        code="none",
        field="train.steps",
        value="",
        message="the run has no length",
        remedy="Give one.",
    )
    assert problem_text(clause) == "GPUs 9 is out of range. Give 1 to 4."
    assert problem_text(whole) == "steps: the run has no length. Give one."
