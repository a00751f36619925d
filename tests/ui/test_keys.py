"""Keys, the palette, the help and the mouse, the same on every screen."""

from __future__ import annotations

import importlib
import pkgutil
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.color import Color
from textual import events
from textual.keys import _character_to_key as character_to_key
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Input, OptionList

from so_tui import ui as package
from so_tui.launch.helper_jobs import Progress
from so_tui.runs import RunDirectory
from so_tui.runs.records import EvaluationRecord
from so_tui.settings import ScreenSettings, Settings
from so_tui.spec.errors import reject
from so_tui.ui.chart_metrics import ChartLayout
from so_tui.ui.chat.screen import ChatScreen
from so_tui.ui.configure.plan_pane import WhatIf
from so_tui.ui.dashboard.charts import ChartPanel
from so_tui.ui.dashboard.dialogs import AnswersScreen, ChooseMetrics, ChooseRuns
from so_tui.ui.dashboard.panels import LogPanel
from so_tui.ui.data_preview import DataPreviewScreen
from so_tui.ui.dialogs import AskText, Notice, Question, SettingsDialog
from so_tui.ui.machine.validation import ValidationScreen
from so_tui.ui.runs.table import RunTable
from so_tui.ui.text import Content
from so_tui.ui.themes import THEMES
from tests.support.make_run import write_run
from tests.support.records import append_records
from tests.support.screen import Driver, burst, opened, rows_of

pytestmark = pytest.mark.usefixtures("_short_form")

MULTIPLEXERS = {"ctrl+b", "ctrl+a", "ctrl+enter"}


def commands(ui: Driver) -> dict[str, str]:
    return {found.title: found.help for found in ui.app.get_system_commands(ui.screen)}


async def test_every_command_is_in_the_palette_and_the_help(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        listed = "Stop,Save now,Axis,Zoom,Inspect,Maximise,Search,Quit,Go to Presets,Help,Theme"
        assert set(listed.split(",")) <= commands(ui).keys()
        await ui.press("ctrl+p")
        await ui.until(lambda: "Save now" in ui.text())
        await ui.press("escape", "question_mark")
        assert re.search("what it is for(.|\n)*This screen", ui.text())
        await ui.press("end")
        await ui.until(lambda: "Everywhere" in ui.text())
        await ui.press("escape", "1")
        await ui.presets()
        assert {"Launch", "Filter"} <= commands(ui).keys()


async def test_help_key_line_and_mouse_name_what_a_screen_is_for(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.configure()
        await ui.press("tab")
        keys = "esc Leave the field F5 Launch ^s Save ^p commands"
        assert " ".join(ui.key_line.split()) == keys
        await ui.press("escape", "1")
        await ui.presets()
        await ui.press("slash")
        assert " ".join(ui.key_line.split()) == "enter Go there esc Clear F5 Launch ^p commands"
        await ui.press("escape")
        tabs = ui.lines()[1]
        for text, mode in (("4 Runs", "runs"), ("Presets", "presets")):
            await ui.pilot.click(offset=(tabs.index(text) + 2, 1))
            await ui.until(lambda: ui.app.current_mode == mode)  # noqa: B023 - called at once
        await ui.pilot.click(offset=(ui.key_line.index("Filter") + 1, 35))
        await ui.until(lambda: ui.screen.query_one("#filter").display)


async def test_one_key_means_one_thing_and_the_way_out_is_always_shown(runs_dir: Path) -> None:
    """A key may be absent from a screen. Multiplexers keep the keys that they take."""
    meaning: dict[str, set[str]] = {}
    async with opened(runs_dir, (80, 24)) as ui:
        for number in "12345":
            await ui.press(number)
            assert all(words in ui.key_line for words in ("q Quit", "^p commands"))
            keys = ui.screen._bindings.key_to_bindings
            assert not MULTIPLEXERS & {*keys, *ui.app._bindings.key_to_bindings}
            for key, bindings in keys.items():
                meaning.setdefault(key, set()).update(
                    binding.id if "to_run" in binding.action else binding.action.partition("(")[0]
                    for binding in bindings
                    if binding.id
                )
        assert len(meaning) > 20
        # Before a run they are about its plan, and while it trains about charts and the log.
        several = {"w": {"all_reasons", "smooth"}, "f": {"fit", "follow"}}
        found = {key: actions for key, actions in meaning.items() if len(actions) > 1}
        assert found == several
        for width in (80, 60, 40):
            await ui.resize(width, 20)
            await ui.until(lambda: re.search("1.* 2.* 3.* 4.* 5 Mach.* [?] help", ui.lines()[1]))


# The mouse alone is enough: every dialog closes, and what looks like a control is one.

CHOICES = [(str(number), "") for number in range(50)]
MANY_LINES = "\n".join(map(str, range(200)))
DIALOGS: dict[type[ModalScreen[Any]], Callable[[RunDirectory], ModalScreen[Any]]] = {
    AnswersScreen: AnswersScreen,
    AskText: lambda _: AskText("Ask", "hint", Input(), yes="Yes", read=str, choices=CHOICES),
    ChooseMetrics: lambda _: ChooseMetrics(ChartLayout()),
    ChooseRuns: lambda _: ChooseRuns((), ()),
    Notice: lambda _: Notice("Compared", [lambda _: Content(MANY_LINES)]),
    Question: lambda _: Question("Sure?", [MANY_LINES], yes="Yes"),
    SettingsDialog: lambda _: SettingsDialog(Settings(), ()),
    ValidationScreen: lambda run: ValidationScreen(run.path),
}
READ_FIRST: dict[type[ModalScreen[Any]], str] = {
    AnswersScreen: ".dialog-title",
    ValidationScreen: "#report-status",
}
"""What dialogs that read something fill then, which moves their buttons."""
ELSEWHERE = {ChatScreen, DataPreviewScreen}
"""They start a process, and are closed by mouse in tests of their own."""


def test_no_dialog_is_forgotten() -> None:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    waiting: list[type[ModalScreen[Any]]] = [*ModalScreen.__subclasses__()]
    for kind in waiting:
        waiting += kind.__subclasses__()
        if kind.__module__.startswith(package.__name__) and "compose" in vars(kind):
            assert kind in DIALOGS.keys() | ELSEWHERE


def closing(screen: Screen[Any]) -> list[Button]:
    """Return the buttons that are named after the key that leaves a dialog."""
    return [found for found in screen.query(Button) if str(found.label).endswith(("  esc", "  n"))]


async def test_a_click_closes_every_dialog(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=3, state="finished")
    async with opened(runs_dir, (80, 24)) as ui:
        await ui.presets()
        below = ui.screen
        for kind, make in DIALOGS.items():
            await ui.app.push_screen(make(run))
            await ui.until(lambda: ui.screen is not below and closing(ui.screen))
            if filled := READ_FIRST.get(kind):
                await ui.until(partial(ui.shown, filled))
            button = closing(ui.screen)[0]
            assert ui.screen.region.contains_region(button.region), kind.__name__
            assert await ui.pilot.click(button), f"{kind.__name__}: something covers it"
            await ui.until(lambda: ui.screen is below)


async def test_a_strip_is_moved_by_mouse(runs_dir: Path) -> None:
    async with opened(runs_dir, (120, 50)) as ui:
        await ui.presets()
        await ui.press("enter")
        await ui.until(lambda: ui.screen.query(WhatIf) and ui.find("#what-if", WhatIf).strips)
        panel = ui.find("#what-if", WhatIf)
        row = panel.render_line(1).text
        cell = row.index("1.00") - 3  # the last but one: 0.9
        await ui.pilot.click(panel, offset=(cell, 1))
        assert panel.strips[0].present == 0.9
        await ui.until(lambda: ui.find("#field-offload-ratio Input", Input).value == "0.9")
        await ui.pilot._post_mouse_events([events.MouseScrollDown], panel, offset=(cell, 1))
        assert 0.8 <= panel.strips[0].present < 0.9
        left = (row.index("0.00") + 5, 1)
        await ui.pilot.mouse_down(panel, offset=(cell, 1))
        await ui.pilot.hover(panel, offset=left)
        await ui.pilot.mouse_up(panel, offset=left)
        assert panel.strips[0].present == 0.0


async def test_a_click_on_a_heading_sorts_and_marks_it(runs_dir: Path) -> None:
    for n, name in enumerate("cab", 1):
        run = write_run(runs_dir, steps=20 * n, total=99, state="failed", name=name)
    evaluated = EvaluationRecord(attempt=1, time=time.time(), step=60, loss=1.118, tokens=1000)
    append_records(run, evaluated)
    compact = Settings(screen=ScreenSettings(layout="compact"))
    async with opened(runs_dir, (200, 50), settings=compact) as ui:
        await ui.press("4")
        table = ui.find("#table", RunTable)

        def heading() -> str:
            return table.render_line(0).text

        await ui.until(lambda: table.row_count == 3 and "evaluation loss" in heading())
        names = "state,model,step,mean loss,evaluation loss,tokens/s,MFU,GPU memory,age,host,name"
        for name in names.split(","):
            at = heading().index(f"{name} ") + table.gutter.left
            await ui.pilot.click(table, offset=(at, table.gutter.top))
            await ui.until(lambda: re.search(rf"\b{name} [▴▾]", heading()))  # noqa: B023 - called at once
        assert [Path(str(key.value)).name for key in table.rows] == ["a", "b", "c"]


async def test_the_tab_of_configure_takes_over_what_is_selected(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        table = await ui.presets()
        await ui.press("down")
        preset = table.ordered_rows[table.cursor_row].key.value
        assert preset != "tiny"
        await ui.press("2")
        await ui.until(lambda: f"preset {preset}," in ui.shown("#form-title"))
        await ui.edit("train.learning_rate", "2e-4")
        await ui.press("escape", "1", "down", "2")
        assert f"preset {preset}," in ui.shown("#form-title"), "an edit is not put aside"


async def test_clicks_turn_pages_and_follow_the_log(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=30, name="one")
    other = write_run(runs_dir, steps=30, name="two")
    async with opened(runs_dir, open_run=run, shows="one") as ui:
        panel = ui.find("ChartPanel", ChartPanel)

        def heading() -> str:
            return rows_of(panel.charts[0])[0]

        await ui.until(lambda: "1/3 ▸" in heading())
        at = (heading().index("1/3") + 1, 0)
        await ui.pilot.click(panel.charts[0], offset=at)
        await ui.until(lambda: panel.page.number == 1)
        ui.app.open_run(other)
        await ui.until(lambda: panel.page.number == 0)
        log = ui.find("LogPanel", LogPanel)
        ui.app.open_run(run)
        await ui.until(lambda: log.lines.max_scroll_y > 0)
        log.lines.scroll_home(animate=False)
        await ui.until(lambda: not log.lines.following)
        await ui.pilot.click(log.heading, offset=(10, 0))
        await ui.until(lambda: log.lines.following)
        log.lines.scroll_home(animate=False)
        await ui.until(lambda: not log.lines.following)
        ui.app.open_run(other)
        await ui.state_shown(other.name)
        await ui.until(lambda: log.lines.following and log.lines.max_scroll_y > 0)
        await ui.until(lambda: log.lines.scroll_y == log.lines.max_scroll_y)


# Keys that arrive all at once act in their order: what is typed for a field reaches it.


async def test_bursts_in_log_presets_and_runs(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        await burst(ui, "slash", into="#search", expected="sc")
        await ui.press("escape", "1")
        await ui.presets()
        # Letters that are commands otherwise, one of them to leave.
        mistyped = ("slash", "w", "e", "backspace", "backspace")
        await burst(ui, *mistyped, into="#filter", expected="qlo")
        await ui.press("escape")
        await burst(ui, "4", "slash", into="RunsScreen #filter", expected="qD")
        await ui.press("escape")
        await burst(ui, "T", into="AskText Input", expected="short #q")


async def test_bursts_in_configure(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.presets()
        # The screen was never open.
        await burst(ui, "2", "slash", into="ConfigureScreen #find", expected="micro")
        await ui.press("escape")
        await ui.configure()
        # A field is selected when it is entered.
        find = ("slash", *map(character_to_key, "micro batch"), "enter")
        await burst(ui, *find, into="#field-train-micro_batch Input", expected="3")


# What is typed while something loads is text, or nothing: never a command of what lies below.


async def test_letters_while_a_dialog_checks_stay_in_its_field(runs_dir: Path) -> None:
    go_on = threading.Event()

    def read(text: str) -> str:
        assert go_on.wait(60)
        raise reject("invalid-name", "name", text, "is not known", "Give another.")

    async with opened(runs_dir) as ui:
        await ui.presets()
        ask = AskText("Ask", "hint", Input(), yes="Yes", read=read, slow="looking for {}")
        ui.app.push_screen(ask)
        await ui.until(lambda: isinstance(ui.app.focused, Input))
        await ui.type_text("one")
        await ui.press("enter")
        await ui.until(lambda: "looking for one" in ui.text())
        await ui.type_text(" q1Dl,")
        go_on.set()
        await ui.until(lambda: "is not known" in ui.text())
        assert ui.screen.query_one(Input).value == "one q1Dl,"


async def test_letters_while_data_is_read_do_nothing_below(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def preview(*_: object, **__: object) -> Iterator[Progress]:
        yield Progress(message="reading", done_rows=1, total_rows=2)
        assert go_on.wait(60)

    monkeypatch.setattr("so_tui.launch.helper_jobs.preview_data", preview)
    async with opened(runs_dir) as ui:
        await ui.presets()
        await ui.press("d")
        await ui.until(lambda: "reading" in ui.text())
        await ui.press("m", "g", "r", "1", "4", "l", "D", "t", "comma")
        assert isinstance(ui.screen, DataPreviewScreen)
        await ui.press("q")
        await ui.until(lambda: not isinstance(ui.screen, DataPreviewScreen))
        assert ui.app.is_running
        assert ui.app.current_mode == "presets"
        go_on.set()


def luminance(colour: Color | None) -> float:
    """Return the relative luminance of a colour, as WCAG defines it."""
    assert colour is not None
    parts = (part / 255 for part in colour.get_truecolor())
    linear = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [theme.name for theme in THEMES])
async def test_grey_text_is_legible_under_the_cursor(runs_dir: Path, theme: str) -> None:
    write_run(runs_dir, steps=3, state="finished", name="one")
    run = write_run(runs_dir, steps=3, name="two")
    settings = Settings(screen=ScreenSettings(theme=theme))
    async with opened(runs_dir, open_run=run, settings=settings) as ui:
        await ui.until(lambda: len(ui.app.runs) == 2)
        await ui.press("v")
        ticks = ui.find("#runs", OptionList)
        await ui.until(lambda: ticks.has_focus and ticks.highlighted == 0)
        segments = [part for part in ticks.render_line(0) if part.text.strip()]
        assert len(segments) > 2
        for text, style, _ in segments:
            assert style is not None
            light = sorted(map(luminance, (style.color, style.bgcolor)))
            assert (light[1] + 0.05) / (light[0] + 0.05) >= 3, (text, style)


async def test_a_note_replaces_the_one_before_but_no_warning(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        ui.app.notify("first")
        ui.app.notify("careful", severity="warning")
        ui.app.notify("second")
        await ui.until(lambda: "second" in ui.notes())
        assert ui.notes() == ["careful", "second"]
