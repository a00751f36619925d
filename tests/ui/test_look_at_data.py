"""Looking at the data from the screen: with the real helper process, and with what goes wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from test_screens import opened, presets_ready, screen_text, until
from textual.pilot import Pilot
from textual.widgets import Button, Static

from so_tui.ui.screens.look_at_data import LookAtData
from so_tui.ui.widgets.field import FieldRow

SLOW_S = 120
"""A helper process imports transformers; on a busy machine that takes its time."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def look(pilot: Pilot[None], source: str = "") -> LookAtData:
    """Press d in Configure, with another data source typed in."""
    await presets_ready(pilot)
    await pilot.press("2")
    await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "fits" in str(pilot.app.screen.query_one("#verdict", Static).content))
    if source:
        pilot.app.screen.query_one("#field-data-source", FieldRow).focus_control()
        await pilot.press("ctrl+u", *source, "escape")
    await pilot.press("d")
    screen = pilot.app.screen
    assert isinstance(screen, LookAtData)
    return screen


def done(screen: LookAtData) -> bool:
    return not screen.query_one("#again", Button).disabled


async def test_the_data_is_shown_as_the_model_will_see_it_and_more_of_it_on_demand(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        screen = await look(pilot)
        assert "esc cancels" in screen_text(pilot)
        await until(pilot, lambda: done(screen), SLOW_S)
        text = screen_text(pilot)
        for words in (
            "355 are trained on",
            "% full",
            "documents by length",
            "do not see each other",
            "what is trained",
            "row 1",
            "<|eos|>",
        ):
            assert words in text
        rows = len(screen.query(".look-row"))
        await pilot.click("#more")
        await until(pilot, lambda: done(screen) and len(screen.query(".look-row")) > rows, SLOW_S)
        await pilot.press("escape")
        assert pilot.app.screen is not screen


async def test_what_is_wrong_with_it_is_told_with_the_remedy(runs_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"instruction": "Add.", "output": ["5"]}')
    async with opened(runs_dir) as pilot:
        screen = await look(pilot, str(path))
        await until(pilot, lambda: done(screen), SLOW_S)
        text = " ".join(screen_text(pilot).split())
        for words in ("✗", "bad.jsonl, row 1", "column output", "Mend or remove the row"):
            assert words in text


async def test_leaving_ends_the_helper_process(runs_dir: Path, tmp_path: Path) -> None:
    async with opened(runs_dir) as pilot:
        screen = await look(pilot)
        cancel = screen._cancel
        assert cancel is not None
        await until(pilot, lambda: cancel._process is not None)
        process = cancel._process
        assert process is not None
        await pilot.press("escape")
        began = time.monotonic()
        await until(pilot, lambda: process.poll() is not None, SLOW_S)
        assert time.monotonic() - began < SLOW_S / 2
        assert not list((tmp_path / "cache").rglob("*.partial-*"))


async def test_without_colour_what_is_trained_stands_between_marks(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from so_tui.ui.widgets.data_view import legend

    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(runs_dir, (80, 24)) as pilot:
        assert pilot.app.no_color
        screen = await look(pilot)
        await until(pilot, lambda: done(screen), SLOW_S)
        assert any("«git fetch" in str(row.content) for row in screen.query(".look-row").results(Static))
        assert "«" in legend(marks=True).plain
        assert "«" not in legend(marks=False).plain
