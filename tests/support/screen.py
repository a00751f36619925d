"""The application without a terminal, driven by keys, and read as a user reads it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from rich.text import Text
from textual import events
from textual.keys import _character_to_key as character_to_key
from textual.keys import key_to_character
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static

from so_tui.machine.types import Machine
from so_tui.runs import RunDirectory
from so_tui.settings import Settings
from so_tui.settings_file import Loaded
from so_tui.ui.app import SoTuiApp
from so_tui.ui.charts.chart import Chart
from so_tui.ui.configure.form import FieldRow
from so_tui.ui.lines import StyledLines
from tests.support.make_run import quad_machine
from tests.support.waiting import LIMIT_S

SIZES = [(80, 24), pytest.param((120, 36), marks=pytest.mark.slow)]
"""The smallest terminal, and a common one, which is tried in the slow tier."""
WidgetType = TypeVar("WidgetType", bound=Widget)


def rows_of(widget: Widget) -> list[str]:
    return [widget.render_line(y).text for y in range(widget.size.height)]


async def settled(min_sleep: float = 0, max_sleep: float = LIMIT_S) -> None:
    """Wait until the event loop has nothing left to run before a timer, thread or process does.

    Textual looks at CPU use instead: 20 ms at least, and wrong on busy machines.
    """
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    async with asyncio.timeout(max_sleep):
        await asyncio.sleep(min_sleep)
        while ready:
            await asyncio.sleep(0)


def wait_for_what_runs(patch: pytest.MonkeyPatch) -> None:
    """Let the pilot wait until what it did has had its effects, on a busy machine too."""
    patch.setattr("textual.app.wait_for_idle", settled)
    patch.setattr("textual.pilot.wait_for_idle", settled)


class Driver:
    """Presses keys, waits for conditions, and returns what is on the screen."""

    def __init__(self, app: SoTuiApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    @property
    def screen(self) -> Screen[object]:
        return self.app.screen

    async def press(self, *keys: str) -> None:
        """Press keys one after the other, each when the one before has had its effect."""
        await self.pilot.press(*keys)

    async def resize(self, width: int, height: int) -> None:
        """Give the terminal another size, and wait until the screen has it."""
        await self.pilot.resize_terminal(width, height)
        await self.until(
            lambda: self.app._resize_event is None and self.screen._size == (width, height)
        )

    async def type_text(self, text: str, *, replace: bool = False) -> None:
        """Type into the text field with the focus, or ``replace`` what stands in it, at once."""
        field = self.app.focused
        assert isinstance(field, Input)
        if replace:
            field.clear()
        for character in text:
            self.app.post_message(events.Key(character, character))
        expected = field.value + text
        await self.until(lambda: field.value == expected)

    async def answer(self, text: str) -> None:
        """Answer the question for a text that was asked by the last key."""
        await self.until(lambda: isinstance(self.app.focused, Input))
        await self.type_text(text, replace=True)
        await self.press("enter")

    async def until(self, happened: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait until ``happened`` returns something true, and everything is drawn."""
        async with asyncio.timeout(limit_s):
            await settled()  # a screen that has just been opened is not laid out yet
            while not happened():
                await settled(0.03)
        await self.pilot.pause()

    def find(self, selector: str, kind: type[WidgetType]) -> WidgetType:
        return self.screen.query_one(selector, kind)

    def shown(self, selector: str) -> str:
        widget = self.screen.query_one(selector)
        assert isinstance(widget, Static | StyledLines)
        return str(widget.content)

    def heading(self, selector: str) -> str:
        """Return the heading of a chart without the line in which it stands."""
        return re.sub(" *[╭─╮]+ *", "  ", self.find(selector, Chart).render_line(0).text).strip()

    def lines(self) -> list[str]:
        """Return the rows of the screen, and check that none is wider than the terminal."""
        width, height = self.app.size
        strips = self.screen._compositor.render_strips(self.app.size)
        assert len(strips) == height
        assert all(strip.cell_length <= width for strip in strips)
        return [strip.text for strip in strips]

    def text(self) -> str:
        return "\n".join(self.lines())

    @property
    def key_line(self) -> str:
        return self.lines()[-1]

    @property
    def dialog_title(self) -> str:
        """The title of the dialog on the screen; empty without one, or before it has lines."""
        titles = self.screen.query(".dialog-title").results(Static)
        return "".join(str(title.content) for title in titles)

    def notes(self) -> list[str]:
        return [note.message for note in self.app._notifications]

    async def presets(self) -> DataTable[Text]:
        """Return the table of presets once it is planned."""
        table: DataTable[Text] = self.screen.query_one("#table", DataTable)
        await self.until(lambda: table.row_count > 0)
        return table

    async def configure(self) -> None:
        """Go to Configure with the preset that it opens by itself, and wait for its plan."""
        self.app.switch_mode("configure")
        await self.until(lambda: self.screen.query(FieldRow) and "fits" in self.shown("#verdict"))

    async def edit(self, path: str, text: str) -> FieldRow:
        row = self.find(f"#field-{path.replace('.', '-')}", FieldRow)
        row.focus_control()
        await self.until(lambda: row.has_focus_within)
        await self.type_text(text, replace=True)
        return row

    async def state_shown(self, state: str) -> None:
        """Wait until the dashboard shows a state of its run."""
        await self.until(lambda: state in self.shown("#title"))


@asynccontextmanager
async def opened(
    runs_dir: Path,
    size: tuple[int, int] = (120, 36),
    *,
    machine: Machine | None = None,
    this_machine: bool = False,
    open_run: RunDirectory | None = None,
    start: Callable[..., RunDirectory] | None = None,
    settings: Loaded | Settings | None = None,
    machine_file: str = "",
    shows: str = "",
) -> AsyncIterator[Driver]:
    """Open the application on a machine (four GH200 by default); wait until a run ``shows``.

    ``start`` stands in for the checks and the start of a run, for tests of other things.
    """
    app = SoTuiApp(
        machine=None if this_machine else machine or quad_machine(),
        runs_dir=runs_dir,
        open_run=open_run,
        settings=Loaded(settings) if isinstance(settings, Settings) else settings,
        machine_file=machine_file,
    )
    with pytest.MonkeyPatch.context() as patches:
        if start is not None:
            patches.setattr("so_tui.launch.checks.preflight", lambda launch, **_: (launch, ()))
            patches.setattr("so_tui.launch.lifecycle.start", start)
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.until(lambda: app.machine is not None and app.catalog is not None)
            if shows:
                await driver.state_shown(shows)
            yield driver


async def burst(ui: Driver, *keys: str, into: str, expected: str) -> None:
    """Press keys, and type the last ones, without waiting for the effect of any, until a field has
    the text that is ``expected``.
    """
    for key in (*keys, *map(character_to_key, expected)):
        ui.app.post_message(events.Key(key, key_to_character(key)))
    await ui.until(lambda: ui.screen.query(into) and ui.find(into, Input).value == expected)
