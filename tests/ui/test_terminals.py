"""Terminals without colour, without Unicode, and with other themes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from textual.strip import Strip

from tests.support.make_run import write_run
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")


def filtered(ui: Driver) -> list[Strip]:
    """Return the rows of the screen as the terminal gets them, through the application's filter."""
    strips = ui.screen._compositor.render_strips(ui.app.size)
    return [
        strip.apply_filter(ui.app._filters[-1], ui.screen.background_colors[1]) for strip in strips
    ]


async def test_without_colour_and_unicode_all_is_grey_and_plain(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SO_TUI_GLYPHS", "ascii")
    monkeypatch.setenv("NO_COLOR", "1")
    run = write_run(runs_dir, steps=20, seconds_of_samples=3)
    async with opened(runs_dir, (120, 36), open_run=run, shows="● training") as ui:
        colours = [
            segment.style.color
            for strip in filtered(ui)
            for segment in strip
            if segment.style is not None
        ]
        triplets = [
            colour.triplet
            for colour in colours
            if colour is not None and colour.triplet is not None
        ]
        assert triplets
        assert all(len(set(triplet)) == 1 for triplet in triplets)
        await ui.until(lambda: "forward" in ui.shown("StepPanel"))
        (row,) = [strip.text for strip in filtered(ui) if " backward " in strip.text]
        (bar,) = re.findall(r"s +([dfbxo]{8,})", row)
        assert re.fullmatch("d+f+b+x+o*", bar)
        for letter, name in (("f", "forward"), ("b", "backward"), ("x", "exposed")):
            assert f"{letter} {name} " in row
        for number in "31245":
            await ui.press(number)
            if number == "1":
                await ui.presets()
            for strip in filtered(ui):
                assert strip.text.isascii(), strip.text


async def test_foreign_themes_have_the_colours_of_every_screen(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=3)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        for theme in ("textual-dark", "ansi-dark"):
            ui.app.theme = theme
            for number in "12345":
                await ui.press(number)
                assert "so-tui" in ui.text()
