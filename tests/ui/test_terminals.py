"""Terminals without colour, without Unicode, with other themes, and such as vanish."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from textual.strip import Strip

from tests.support.make_run import write_run
from tests.support.screen import Driver, opened
from tests.support.waiting import LIMIT_S

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
        await ui.until(lambda: "forward" in ui.shown("StepPanel"))
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


def test_a_screen_that_lost_its_terminal_ends(tmp_path: Path) -> None:
    """Without SIGHUP it would read nothing for ever."""
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from so_tui.cli import"
    command = [sys.executable, "-c", f"{ignoring} main; raise SystemExit(main())"]
    environment = {**os.environ, "TERM": "xterm-256color", "HOME": str(tmp_path)}
    controller, terminal = pty.openpty()
    screen = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    painted, deadline = 0, time.monotonic() + LIMIT_S
    while painted < 2_000 and time.monotonic() < deadline:
        if select.select([controller], [], [], 0.5)[0]:
            painted += len(os.read(controller, 65536))
    os.close(controller)
    try:
        assert screen.wait(timeout=LIMIT_S) >= 0
    finally:
        screen.kill()
