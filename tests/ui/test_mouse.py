"""What a hand that stays on the mouse can do: every dialog closes, and what is seen as a control is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.screen import ModalScreen

from so_tui.runs import RunDirectory
from so_tui.settings.types import Settings
from so_tui.ui import screens
from so_tui.ui.chart_layout import ChartLayout
from so_tui.ui.screens.add_model import AddModel
from so_tui.ui.screens.answers import AnswersScreen
from so_tui.ui.screens.choose_metrics import ChooseMetrics
from so_tui.ui.screens.choose_runs import ChooseRuns
from so_tui.ui.screens.data_preview import DataPreviewScreen
from so_tui.ui.screens.dialogs import AskText, CloseButton, KeysHelp, Notice, Question
from so_tui.ui.screens.settings import SettingsDialog
from so_tui.ui.screens.validation import ValidationScreen
from tests.support.make_run import write_run
from tests.support.screen import opened

pytestmark = pytest.mark.usefixtures("_short_form")

MANY_LINES = "\n".join(map(str, range(200)))
DIALOGS: dict[type[ModalScreen[Any]], Callable[[RunDirectory], ModalScreen[Any]]] = {
    AddModel: lambda _: AddModel(),
    AnswersScreen: AnswersScreen,
    AskText: lambda _: AskText("Ask", "hint", "", yes="Yes", read=str, choices=[(str(n), "") for n in range(50)]),
    ChooseMetrics: lambda _: ChooseMetrics(ChartLayout()),
    ChooseRuns: lambda _: ChooseRuns((), ()),
    KeysHelp: lambda _: KeysHelp("Keys", MANY_LINES, []),
    Notice: lambda _: Notice("Compared", [lambda width: MANY_LINES]),
    Question: lambda _: Question("Sure?", [MANY_LINES], yes="Yes"),
    SettingsDialog: lambda _: SettingsDialog(Settings(), ()),
    ValidationScreen: lambda run: ValidationScreen(run.path),
}
ELSEWHERE = {DataPreviewScreen}
"""Starts a process; it is closed by mouse in test_data_preview_screen.py."""


def dialog_classes() -> set[type[ModalScreen[Any]]]:
    """Return every dialog that can be opened: no other builds on it, but for a Question."""
    for module in pkgutil.iter_modules(screens.__path__, f"{screens.__name__}."):
        importlib.import_module(module.name)
    found: set[type[ModalScreen[Any]]] = set()
    waiting: list[type[ModalScreen[Any]]] = [*ModalScreen.__subclasses__()]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith(screens.__name__) and "compose" in vars(kind):
            found.add(kind)
    return found


def test_no_dialog_is_forgotten() -> None:
    assert dialog_classes() <= DIALOGS.keys() | ELSEWHERE


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_a_click_closes_every_dialog(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=3, seconds_of_samples=1, state="finished")
    async with opened(runs_dir, size) as ui:
        await ui.presets()
        below = ui.screen
        for kind, make in DIALOGS.items():
            await ui.app.push_screen(make(run))
            await ui.until(lambda: ui.screen is not below and ui.screen.query(CloseButton))
            button = ui.screen.query_one(CloseButton)
            assert ui.screen.region.contains_region(button.region), kind.__name__
            assert await ui.pilot.click(button), f"{kind.__name__}: something covers it"
            await ui.until(lambda: ui.screen is below)


async def test_arrows_of_a_setting_go_both_ways(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.presets()
        before = ui.app.theme
        await ui.press("comma")
        await ui.until(lambda: ui.screen.query(".settings"))
        options = ui.screen.query_one(".settings")

        async def click(sign: str) -> None:
            row = options.render_line(0).text
            await ui.pilot.click(options, offset=(row.index(sign), 0))

        await click("▸")
        forward = ui.app.theme
        assert forward != before
        await click("◂")
        assert ui.app.theme == before
        await click("◂")
        assert ui.app.theme not in (before, forward)
