"""Keys that arrive all at once act in their order: what is typed for a field reaches it."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.keys import _character_to_key as character_to_key
from textual.keys import key_to_character
from textual.widgets import Input

from so_tui.ui.configure.form import FormPanel
from so_tui.ui.dialogs import AskText
from tests.support.make_run import write_run
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")


def burst(ui: Driver, *keys: str) -> None:
    """Press keys without waiting for the effect of any."""
    for key in keys:
        ui.app.post_message(events.Key(key, key_to_character(key)))


def typed(text: str) -> list[str]:
    """Return the keys that type a text."""
    return [character_to_key(character) for character in text]


async def value(ui: Driver, selector: str, expected: str) -> None:
    """Wait until a text field holds a text."""
    await ui.until(lambda: ui.screen.query(selector) and ui.find(selector, Input).value == expected)


async def test_bursts_in_log_presets_and_runs(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5, seconds_of_samples=2)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        burst(ui, "slash", *typed("sc"))
        await value(ui, "#search", "sc")
        await ui.press("escape", "1")
        await ui.presets()
        # Letters that are commands otherwise, one of them to leave.
        burst(ui, "slash", *typed("qlo"))
        await value(ui, "#filter", "qlo")
        await ui.press("escape")
        burst(ui, "4", "slash", *typed("qD"))
        await value(ui, "RunsScreen #filter", "qD")
        await ui.press("escape")
        burst(ui, "T", *typed("short #q"))
        await ui.until(lambda: isinstance(ui.screen, AskText))
        await value(ui, "AskText Input", "short #q")


async def test_bursts_in_configure(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.presets()
        burst(ui, "2", "slash", *typed("micro"))  # the screen was never open
        await value(ui, "ConfigureScreen #find", "micro")
        await ui.press("escape")
        await ui.configure()
        rows = ui.find("FormPanel", FormPanel).rows
        burst(ui, "down", "down", "down", "up")
        await ui.until(lambda: rows[1].has_focus_within)
        await ui.press("escape")
        # A field is selected when it is entered.
        burst(ui, "slash", *typed("micro batch"), "enter", *typed("3"))
        await value(ui, "#field-train-micro_batch Input", "3")
