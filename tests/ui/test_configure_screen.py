"""The Configure screen: fields, the plan beside them, and presets that are saved from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Button, Input, Static

from so_tui.plan.plan import Launch
from so_tui.ui.configure.form import FieldRow
from so_tui.ui.configure.screen import ConfigureScreen
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
        slurm = [row.path for row in ui.screen.query(FieldRow) if row.path.startswith("slurm.")]
        assert slurm == ["slurm.partition"]
        await ui.press("slash")
        prompt = ui.find("#find", Input)
        await ui.until(lambda: len(prompt.placeholder) < prompt.content_size.width)  # it is not cut
        await ui.press("escape")
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
        assert row.has_class("-changed")
        assert "was 0.9" in note_of(row)
        gpus = await ui.edit("gpus", "9")
        await ui.until(lambda: button.disabled)
        assert gpus.has_class("-wrong"), "there are four"
        await ui.press("escape", "u", "y")
        await ui.until(lambda: not button.disabled)
        row = await ui.edit("train.warmup_ratio", "0.0")
        await ui.until(lambda: row.has_class("-changed"))
        for key, character in (("7", "7"), ("f5", None)):
            ui.app.post_message(events.Key(key, character))
        await ui.until(lambda: asked)
        assert [launch.plan.spec.train.warmup_ratio for launch in asked] == [0.07]


async def test_a_restored_field_is_no_change_and_keys_reach_it(runs_dir: Path) -> None:
    async with opened(runs_dir, (120, 60)) as ui:
        await ui.configure()
        await ui.press("tab")
        field = ui.app.focused
        assert isinstance(field, Input)
        for key in [*4 * ["backspace"], "3", "4", "left", "1"]:
            ui.app.post_message(events.Key(key, key if key.isdigit() else None))
        await ui.until(lambda: field.value == "314")
        await ui.press("tab", "tab")
        third = ui.app.focused
        await ui.press("tab", "escape")
        assert ui.app.focused is None
        await ui.press("shift+tab")
        assert ui.app.focused is third
        await ui.press("escape", "tab", "escape", "shift+tab")
        assert ui.app.focused is third
        await ui.press("escape", "u", "y")
        await ui.until(titled(ui, "no changes"))
        row = await ui.edit("data.split", "other")
        await ui.until(lambda: row.has_class("-changed") and "was" in note_of(row))
        await ui.type_text("train", replace=True)
        await ui.until(lambda: not row.has_class("-changed"))
        assert not note_of(row), "as before: there is nothing to say of it"
        await ui.press("escape")
        ui.find("#field-data-packing", FieldRow).focus_control()
        await ui.press("space")
        await ui.until(titled(ui, "1 change"))


async def test_what_was_recommended_is_no_change_and_is_named(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        table.move_cursor(row=table.get_row_index("phi-4"), column=0)
        await ui.press("enter")
        await ui.until(titled(ui, "preset phi-4, no changes"))
        assert titled(ui, "recommended for this machine: ")()
        await ui.until(lambda: ui.screen.query(FieldRow) and "fits" in ui.shown("#verdict"))
        row = ui.find("#field-offload-ratio", FieldRow)
        assert "★ preset: 0.9" in note_of(row)
        assert not row.has_class("-changed")
        await ui.edit("offload.ratio", "0.55")
        await ui.until(titled(ui, "1 change"))
        await ui.press("escape", "u", "y")
        await ui.until(titled(ui, "no changes"))
        await ui.until(lambda: "was" not in note_of(row))
        await ui.press("u", "y")
        await ui.until(lambda: not titled(ui, "recommended")())
        assert row.query_one(Input).value == "0.9"
        await ui.press("q")
        await ui.until(lambda: not ui.app.is_running)


async def save_as(ui: Driver, name: str) -> None:
    """Press ^s unless it is asked already, and enter a name."""
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
            await ui.until(titled(ui, "1 change"))
        await ui.press("escape", "5", "2")
        assert titled(ui, "1 change")()
        await ui.press("equals_sign")
        assert "train.learning_rate" in ui.text()
        await ui.press("escape")
        for name, answer in (("tiny", "is a built-in preset"), ("my_ x", "is not a valid name")):
            await save_as(ui, name)
            await ui.until(lambda: answer in ui.shown("#said"))  # noqa: B023 - called at once
            assert ui.find("Input", Input).value == name, "what was typed stays"
        await save_as(ui, "taken")
        await ui.until(lambda: "Replace your preset taken?" in ui.text())
        await ui.press("enter")  # the default keeps what is there
        await ui.until(lambda: ui.screen is form)
        assert titled(ui, "1 change")()
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


async def test_the_plan_follows_the_width_and_its_command_is_copied(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []

    def bars() -> list[str]:
        return [line for line in ui.shown("#plan-text").splitlines() if "━" in line or "─" in line]

    async with opened(runs_dir, (200, 50)) as ui:
        monkeypatch.setattr(ui.app, "copy_to_clipboard", copied.append)
        await ui.presets()
        await ui.press("enter")
        await ui.until(lambda: "fits" in ui.shown("#verdict"))
        wide = bars()
        await ui.resize(110, 50)
        await ui.until(lambda: bars() != wide)
        assert max(map(len, bars())) <= ui.screen.query_one("#plan-pane").content_size.width
        await ui.resize(200, 50)
        await ui.until(lambda: bars() == wide)
        await ui.press("y")
        assert "--include localhost:0" in copied[0]
        assert copied[0] in ui.shown("#plan-text")
