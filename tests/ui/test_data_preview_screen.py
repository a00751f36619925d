"""The preview of the data: with the real helper process, and with what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual.widgets import Button, Static

from so_tui.launch import helper, helper_jobs
from so_tui.launch.helper_jobs import DataPreview, Sample
from so_tui.spec import RunSpec
from so_tui.ui.data_preview import FIRST_ROWS, MORE, DataPreviewScreen, _legend
from tests.support import pictured
from tests.support.screen import Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")
SLOW_S = 120
"""A helper process imports transformers, which takes its time on a busy machine."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replay an answer about the data of ``tiny``; how many rows were asked for."""
    rows_asked: list[int] = []

    def replay(_: RunSpec, rows: int, __: object, *, numbers: list[int]) -> Iterator[DataPreview]:
        rows_asked.append(rows)
        samples = pictured.DATA.samples
        named = [Sample("rows.jsonl", row, 0, 0, (), (), "no-answer") for row in numbers]
        shown = (*named, *samples * (rows // len(samples)))
        yield replace(pictured.DATA, samples=shown)

    monkeypatch.setattr(helper_jobs, "preview_data", replay)
    return rows_asked


async def look(ui: Driver, source: str = "") -> DataPreviewScreen:
    await ui.configure()
    if source:
        await ui.edit("data.source", source)
        await ui.press("escape")
    await ui.press("d")
    screen = ui.screen
    assert isinstance(screen, DataPreviewScreen)
    return screen


def done(screen: DataPreviewScreen) -> bool:
    return not screen.query_one("#again", Button).disabled


async def test_more_rows_are_read_and_it_is_left_by_mouse(runs_dir: Path, asked: list[int]) -> None:
    async with opened(runs_dir) as ui:
        screen = await look(ui)
        await ui.until(lambda: done(screen))
        assert len(screen.query(".preview-row")) == FIRST_ROWS
        await ui.pilot.click("#more")
        await ui.until(lambda: len(asked) == 2 and done(screen))
        assert asked == [FIRST_ROWS, FIRST_ROWS * MORE]
        await ui.pilot.click("#leave")
        await ui.until(lambda: ui.screen is not screen)


@pytest.mark.usefixtures("asked")
async def test_any_row_is_shown_by_its_number(runs_dir: Path) -> None:
    async with opened(runs_dir, (80, 24)) as ui:
        screen = await look(ui)
        await ui.until(lambda: done(screen))
        await ui.press("g", *"900", "enter")
        await ui.until(lambda: "355 rows" in ui.text())
        await ui.press(*3 * ["backspace"], *"17", "enter")
        await ui.until(lambda: ui.screen is screen and done(screen) and "row 17 " in ui.text())
        assert "dropped: there is no answer" in ui.text()


async def test_the_helper_ends_on_leaving_and_names_errors(runs_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"instruction": "Add.", "output": ["5"]}')
    async with opened(runs_dir) as ui:
        screen = await look(ui)
        await ui.until(lambda: len(helper._RUNNING) == 1)
        (process,) = (running._process for running in helper._RUNNING)
        await ui.press("escape")
        await ui.until(lambda: process.poll() is not None, SLOW_S / 2)
        assert not list((tmp_path / "cache").rglob("*.partial-*"))
        screen = await look(ui, str(path))
        assert "esc cancels" in ui.text()
        await ui.until(lambda: done(screen), SLOW_S)
        text = " ".join(ui.text().split())
        assert [part in text for part in ("✗", "bad.jsonl, row 1", "column output")] == 3 * [True]


@pytest.mark.usefixtures("asked")
async def test_without_colour_what_is_trained_stands_between_marks(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(runs_dir, (80, 24)) as ui:
        screen = await look(ui)
        await ui.until(lambda: done(screen))
        rows = [str(row.content) for row in screen.query(".preview-row").results(Static)]
        assert any("«git fetch" in row for row in rows)
        assert ["«" in _legend(marks=marks).plain for marks in (True, False)] == [True, False]
