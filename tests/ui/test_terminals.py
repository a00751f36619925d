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
    look, background = ui.app._filters[-1], ui.screen.background_colors[1]
    strips = ui.screen._compositor.render_strips(ui.app.size)
    return [strip.apply_filter(look, background) for strip in strips]


async def test_without_colour_and_unicode_all_is_grey_and_plain(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SO_TUI_GLYPHS", "ascii")
    monkeypatch.setenv("NO_COLOR", "1")
    run = write_run(runs_dir, steps=20, seconds_of_samples=3)
    async with opened(runs_dir, (120, 36), open_run=run, shows="● training") as ui:
        styles = [segment.style for strip in filtered(ui) for segment in strip]
        colours = {style.color.triplet for style in styles if style and style.color}
        triplets = [triplet for triplet in colours if triplet]
        assert triplets
        assert all(len(set(triplet)) == 1 for triplet in triplets)
        await ui.until(lambda: "forward" in ui.shown("#anatomy"))
        (row,) = [strip.text for strip in filtered(ui) if " backward " in strip.text]
        assert re.search(r"s +d+f+b+x+o* ", row), "a bar of letters"
        for name in ("f forward ", "b backward ", "x exposed "):
            assert name in row
        for number in "31245":
            await ui.press(number)
            if number == "1":
                await ui.presets()
            assert [strip.text for strip in filtered(ui) if not strip.text.isascii()] == []


async def test_foreign_themes_have_the_colours_of_every_screen(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=3)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        for theme in ("textual-dark", "ansi-dark"):
            ui.app.theme = theme
            for number in "12345":
                await ui.press(number)
                assert "so-tui" in ui.text()
