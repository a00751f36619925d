"""Keys, the palette, the help and the mouse, the same on every screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from so_tui.ui.app import _key_groups
from tests.support.make_run import write_run
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")

MULTIPLEXERS = {"ctrl+b", "ctrl+a", "ctrl+enter"}


def commands(ui: Driver) -> dict[str, str]:
    """Return title and help of every command of the palette."""
    return {found.title: found.help for found in ui.app.get_system_commands(ui.screen)}


async def test_every_command_is_in_the_palette_and_the_help(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5, seconds_of_samples=2)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        listed = "Stop,Save now,Axis,Zoom,Inspect,Maximise,Search,Quit,Go to Presets,Help,Theme"
        assert set(listed.split(",")) <= commands(ui).keys()
        assert commands(ui)["Go to Runs"] == "key 4", "its title says the rest"
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
        names = [name for _, name, _ in dict(_key_groups(ui.screen))["This screen"]]
        assert names[0] == "Launch"
        assert names[-3:] == ["Larger panel", "Smaller panel", "Reset sizes"]
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
        assert {key: actions for key, actions in meaning.items() if len(actions) > 1} == {}
        await ui.press("1")
        await ui.presets()
        assert "/ Filter" in ui.key_line, "the line of keys uses its room"
        await ui.press("5")
        for width in (80, 60, 40):
            await ui.resize(width, 20)
            await ui.until(lambda: re.search("1.* 2.* 3.* 4.* 5 Mach.* [?] help", ui.lines()[1]))
