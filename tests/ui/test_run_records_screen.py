"""The list of runs: order, groups, comparison, notes, and what is exported from it."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text
from textual.widgets import DataTable, Input

from so_tui.runs.listing import RunNotes, read_notes, write_notes
from so_tui.settings_file import load_settings
from so_tui.spec import find_preset, load_catalog, save_preset
from so_tui.ui.charts.series import write_picture
from so_tui.ui.run_actions import _note_text, _parsed_note
from tests.support.make_run import write_run
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")


def names(ui: Driver) -> list[str]:
    table: DataTable[Text] = ui.find("#table", DataTable)
    return [Path(str(key.value)).name for key in table.rows]


async def test_runs_are_sorted_grouped_compared_and_annotated(runs_dir: Path) -> None:
    runs = [
        write_run(runs_dir, steps=20 * n, total=99, seconds_of_samples=1, state="failed", name=name)
        for n, name in enumerate("cab", 1)
    ]
    write_notes(runs[0], RunNotes(tags=("paper",)))
    async with opened(runs_dir) as ui:
        await ui.press("4")
        await ui.until(lambda: names(ui) == ["b", "a", "c"])
        table = ui.find("#table", DataTable)
        before = table.cursor_row
        await ui.press("j", "k", "k")
        assert table.cursor_row == before, "without vim's keys they do nothing"
        await ui.press("S")
        await ui.until(lambda: names(ui) == ["a", "b", "c"])
        await ui.press("V", "V", "V")
        await ui.until(lambda: load_settings().settings.runs.group == "tag")
        assert load_settings().settings.runs.sort == "name"
        await ui.press("up", "T")
        await ui.until(lambda: isinstance(ui.app.focused, Input))
        await ui.type_text("too short #paper", replace=True)
        await ui.press("enter")
        await ui.until(lambda: names(ui) == ["a", "c", "b"])
        assert read_notes(runs[1]) == RunNotes(note="too short", tags=("paper",))
        assert "paper a" in ui.text()
        await ui.until(lambda: "too short" in ui.shown("#facts"))
        await ui.press("space", "down", "space", "down", "space", "equals_sign")
        await ui.until(lambda: "3 runs: " in ui.dialog_title)
        await ui.until(lambda: "tokens/s" in ui.text())


async def test_metrics_export_overwrites_nothing(runs_dir: Path, tmp_path: Path) -> None:
    write_run(runs_dir, steps=30, seconds_of_samples=1, state="finished", name="one")
    async with opened(runs_dir) as ui:

        async def export(file: str) -> None:
            await ui.press("E")
            await ui.until(lambda: isinstance(ui.app.focused, Input))
            await ui.type_text(str(tmp_path / file), replace=True)
            await ui.press("enter")

        await ui.press("4")
        await ui.until(lambda: names(ui) == ["one"] and ui.screen._curves)  # type: ignore[attr-defined]
        for file in ("steps.csv", "loss.svg"):
            await export(file)
            await ui.until(lambda: re.search(f"exported .*{file}", ui.shown("#facts")))  # noqa: B023 - called at once
            assert any(f"Wrote {tmp_path / file}" in note for note in ui.notes())
        await export("loss.svg")
        await ui.until(lambda: "exists already" in ui.shown("#said"))
    with (tmp_path / "steps.csv").open(newline="") as rows:
        assert len(list(csv.DictReader(rows))) == 30
    picture = ElementTree.parse(tmp_path / "loss.svg")
    assert picture.findall(".//{http://www.w3.org/2000/svg}polyline")


async def test_a_preset_of_ones_own_is_deleted_after_a_question(runs_dir: Path) -> None:
    save_preset(find_preset("tiny").spec, "aa-mine", base="tiny")
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        table.move_cursor(row=[key.value for key in table.rows].index("aa-mine"))
        await ui.press("D")
        await ui.until(lambda: "Delete your preset aa-mine?" in ui.dialog_title)
        await ui.press("enter")
        assert "aa-mine" in load_catalog().presets, "no is the default"
        await ui.press("D", "y")
        await ui.until(lambda: "aa-mine" not in load_catalog().presets)
        await ui.until(lambda: "aa-mine" not in [key.value for key in table.rows])


def test_a_picture_holds_no_markup_of_a_name(tmp_path: Path) -> None:
    write_picture(tmp_path / "chart.svg", "<script>\x1b&", [])
    text = (tmp_path / "chart.svg").read_text()
    assert ElementTree.fromstring(text).findall(".//{http://www.w3.org/2000/svg}script") == []
    assert "\x1b" not in text


def test_what_is_typed_as_a_note_is_what_is_shown_again() -> None:
    notes = RunNotes(note="two words", tags=("a", "b.c"))
    assert _parsed_note(_note_text(notes)) == notes
    assert _parsed_note("x #a y #a") == RunNotes(note="x y", tags=("a",))
    assert _parsed_note("") == RunNotes()


async def test_the_logs_of_earlier_attempts_are_shown(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=3, seconds_of_samples=1, state="finished", name="again")
    for attempt in (1, 2, 3):
        run.attempt_dir(attempt).mkdir(parents=True, exist_ok=True)
        run.log_path(attempt, "host").write_text(f"said by {attempt}\x1b]0;x\x07\n")
    async with opened(runs_dir) as ui:
        await ui.press("4")
        await ui.until(lambda: names(ui) == ["again"])
        await ui.press("A")
        await ui.until(lambda: "earlier attempts" in ui.dialog_title)
        assert [f"said by {attempt}" in ui.text() for attempt in (1, 2, 3)] == [True, True, False]
