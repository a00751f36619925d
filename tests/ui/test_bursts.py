"""Keys that arrive all at once act in their order: what is typed for a field reaches it."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.keys import _character_to_key as character_to_key
from textual.keys import key_to_character
from textual.widgets import Input

from tests.support.make_run import write_run
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")


async def burst(ui: Driver, *keys: str, into: str, expected: str) -> None:
    """Press keys, and type the last ones, without waiting for the effect of any, until a field has
    the text that is ``expected``.
    """
    for key in (*keys, *map(character_to_key, expected)):
        ui.app.post_message(events.Key(key, key_to_character(key)))
    await ui.until(lambda: ui.screen.query(into) and ui.find(into, Input).value == expected)


async def test_bursts_in_log_presets_and_runs(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5, seconds_of_samples=2)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        await burst(ui, "slash", into="#search", expected="sc")
        await ui.press("escape", "1")
        await ui.presets()
        # Letters that are commands otherwise, one of them to leave.
        await burst(ui, "slash", into="#filter", expected="qlo")
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
