"""Pictures of screens, compared with those in ``__snapshots__``. CONTRIBUTING.md says how to renew them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from so_tui.ui.screens.configure import ConfigureScreen
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.field import FieldRow
from tests.support.make_run import write_run
from tests.support.screen import SIZES, Driver, opened

NOW = 1_800_000_000.0
REST_S = 0.25
"""Longer than the dashboard takes from one poll to the next."""
pytestmark = [pytest.mark.usefixtures("_fixed_clock"), pytest.mark.parametrize("size", SIZES, ids=["80x24", "120x36"])]


class SvgExtension(SingleFileSnapshotExtension):
    """One SVG file for each picture."""

    file_extension = "svg"
    _write_mode = WriteMode.TEXT


@pytest.fixture
def picture(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(SvgExtension)


@pytest.fixture
def _fixed_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the clock and the polls, so that nothing on the screen depends on when it was drawn, or on this machine."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("time.time", lambda: NOW)
    monkeypatch.setattr("so_tui.ui.widgets.run_lines.STALE_S", 1e9)
    monkeypatch.setattr("so_tui.machine.doctor.findings", lambda *_, **__: ())
    yield
    monkeypatch.undo()
    time.tzset()


async def svg(ui: Driver) -> str:
    """Return the screen as SVG once it has come to rest, without the identifier that Rich makes of its content."""
    before = ""
    while before != (now := re.sub(r"terminal-\d+", "terminal", ui.app.export_screenshot(title="so-tui"))):
        before = now
        await asyncio.sleep(REST_S)
    return now


def marked(row: FieldRow, mark: str) -> Callable[[], bool]:
    return lambda: row.has_class(mark)


@pytest.mark.parametrize("state", ["training", "failed"])
async def test_dashboard(runs_dir: Path, picture: SnapshotAssertion, size: tuple[int, int], state: Literal["training", "failed"]) -> None:
    run = write_run(runs_dir, steps=1240, seconds_of_samples=900, state=state, now=NOW - 5, name="qwen3-14b-a")
    async with opened(runs_dir, size, open_run=run) as ui:
        await ui.state_shown(state)
        await ui.until(lambda: ui.find("#loss", Chart).lines and ui.app.runs and ui.app.findings is not None)
        assert await svg(ui) == picture


async def test_configure(runs_dir: Path, picture: SnapshotAssertion, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as ui:
        await ui.configure()
        form = ui.screen
        assert isinstance(form, ConfigureScreen)
        form.edit("qwen3-14b")
        await ui.until(lambda: "preset qwen3-14b, no changes" in ui.shown("#form-title"))
        for gpus, mark in (("4", "-changed"), ("9", "-wrong")):
            row = await ui.edit("gpus", gpus)
            await ui.until(marked(row, mark))
            await ui.until(lambda: "1 change" in ui.shown("#form-title") and ui.app.findings is not None)
            if mark == "-changed":
                await ui.until(lambda: form.plan.what_if.strips)
            await ui.press("escape")
            assert await svg(ui) == picture(name=mark.removeprefix("-"))


async def test_presets(runs_dir: Path, picture: SnapshotAssertion, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as ui:
        await ui.presets()
        await ui.until(lambda: ui.app.findings is not None)
        assert await svg(ui) == picture


async def test_machine(runs_dir: Path, picture: SnapshotAssertion, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as ui:
        await ui.press("5")
        await ui.until(lambda: ui.app.findings is not None)
        assert await svg(ui) == picture
