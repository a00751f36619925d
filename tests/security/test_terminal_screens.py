"""Nothing that other people wrote controls the terminal, or the application, through a screen."""

from __future__ import annotations

import base64
import re
import time
from itertools import chain
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from textual.content import Content as AnyContent
from textual.strip import Strip

from so_tui.trust.text import brief_message, printable, printable_line
from so_tui.ui.app import SoTuiApp
from so_tui.ui.charts.chart import Chart
from so_tui.ui.dashboard.panels import LogView
from so_tui.ui.dialogs import Notice, Question
from so_tui.ui.lines import StyledLines
from so_tui.ui.numa_nodes import NumaNodes
from so_tui.ui.page import PAGES
from so_tui.ui.text import Content, shorten, shorten_path
from so_tui.ui.textual_fixes import DrawsPrintable, FixedApp
from tests.support.hostile import HOSTILE, SURROGATE, HostileWorld, hostile_world
from tests.support.screen import Driver, opened, wait_for_what_runs

WAYS = {
    "presets": ["1", "slash", *"owned", "enter"],
    "configure": ["1", "enter"],
    "dashboard": ["4", "enter"],
    "runs": ["4"],
    "machine": ["5"],
    "help": ["1", "question_mark"],
    "distances": ["5", "b"],
    "delete": ["4", "D"],
    "settings": ["3", "equals_sign"],
    "data": ["1", "d"],
    "add a model": ["1", "a"],
    "another machine": ["5", "o"],
    "commands": ["1", "ctrl+p"],
}
"""Each screen, and dialogs over them, with the keys that lead there."""
DIALOGS = ("help", "delete", "settings", "data", "add a model", "another machine", "commands")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostileWorld:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    wait_for_what_runs(monkeypatch)
    return hostile_world(tmp_path / "world")


def assert_only_text(driver: Driver) -> None:
    """Check each character on the terminal, and that no text became a link or an action."""
    strips = driver.screen._compositor.render_strips(driver.app.size)
    for text, style, control in chain.from_iterable(strips):
        assert not control
        assert printable_line(text) == text
        if style is not None:
            assert style.link is None
            assert "app.quit" not in str(style.meta)


def is_text(text: str) -> bool:
    return printable(text) == text


@pytest.mark.parametrize("size", [(80, 24), pytest.param((160, 50), marks=pytest.mark.slow)])
async def test_screens_show_printable_text(size: tuple[int, int], world: HostileWorld) -> None:
    assert {name for name, _ in PAGES} <= set(WAYS)
    async with opened(world.runs_dir, size, machine=world.machine) as driver:
        await driver.until(lambda: driver.app.runs and driver.app.findings is not None)
        for name, keys in WAYS.items():
            for key in keys:
                await driver.press(key)
            if name not in DIALOGS:
                await driver.until(lambda: "x1b" in driver.text())
                assert_only_text(driver)
                continue
            await driver.until(lambda: len(driver.app.screen_stack) == 2)
            assert_only_text(driver)
            await driver.press("escape")
            await driver.until(lambda: len(driver.app.screen_stack) == 1)


async def test_what_is_copied_notified_and_asked_is_text(
    world: HostileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(world.runs_dir, machine=world.machine) as driver:
        driver.app.notify(HOSTILE + SURROGATE, title=HOSTILE, markup=False, timeout=60)
        driver.app.call_later(
            driver.app.push_screen,
            Notice(HOSTILE, (HOSTILE + SURROGATE, lambda _: Content(HOSTILE)), offer=HOSTILE),
        )
        await driver.until(lambda: "forged line" in driver.text())
        assert_only_text(driver)
        driver.app.call_later(driver.app.push_screen, Question(HOSTILE, (HOSTILE,), yes=HOSTILE))
        await driver.until(lambda: isinstance(driver.screen, Question))
        assert_only_text(driver)
        written: list[str] = []
        assert driver.app._driver is not None
        monkeypatch.setattr(driver.app._driver, "write", written.append)
        driver.app.copy_to_clipboard(HOSTILE + SURROGATE)
        (copied,) = [text for text in written if text.startswith("\x1b]52")]
        encoded = copied.removeprefix("\x1b]52;c;").removesuffix("\x07")
        assert is_text(base64.b64decode(encoded, validate=True).decode())


def test_a_copied_path_is_quoted(world: HostileWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    from so_tui.ui.run_actions import _copy_path

    copied: list[str] = []
    app = SoTuiApp()
    monkeypatch.setattr(app, "copy_to_clipboard", copied.append)
    monkeypatch.setattr(app, "notify", lambda *_, **__: None)
    _copy_path(app, world.run)
    assert copied[0].startswith("$'")
    assert copied[0].isprintable()


def test_the_last_words_of_the_screen_are_printable(capfd: pytest.CaptureFixture[str]) -> None:
    app = SoTuiApp()
    app.exit(message=HOSTILE + SURROGATE)
    app._print_error_renderables()
    printed = capfd.readouterr().err
    assert "owned" in printed
    assert is_text(printed)


def test_content_spells_out_what_is_not_text() -> None:
    styled = Content.styled("a\x1bb", "bold")
    assert (styled.plain, styled.spans[0].end) == ("a\\x1bb", 6)
    pieces = Content.assemble("\x9b", ("\u202e", "bold"), Content("\x07"), end="\x1b")
    assert pieces.plain == "\\x9b\\u202e\\x07\\x1b"
    assert (pieces.spans[0].start, pieces.spans[0].end) == (4, 10)
    assert (Content("a") + "\x1b").plain == "a\\x1b"
    assert Content("\x1b").join(["\x9b", AnyContent("x")]).plain == "\\x9b\\x1bx"


def test_texts_are_shortened_to_their_cells() -> None:
    began = time.process_time()
    for text in ("漢字" * 500_000, "e\u0301" * 500_000, HOSTILE * 5_000, "\u200b" * 1_000_000):
        message = brief_message(text)
        assert (len(message) <= 2000, message.isprintable()) == (True, True)
        for width in (1, 5, 16, 80):
            assert Strip([Segment(shorten(text, width))]).cell_length <= width
            assert Strip([Segment(shorten_path(text, width))]).cell_length <= width
    assert time.process_time() - began < 2
    assert (shorten("abcdef", 6), shorten("abcdef", 4)) == ("abcdef", "abc…")
    assert shorten_path("/abcdef", 5) == "…cdef"


def test_screens_make_content_in_one_way() -> None:
    sources = Path(__file__).parents[2].glob("so_tui/ui/**/*.py")
    imports = r"textual.content import .*Content\b|import content"
    assert [path.name for path in sources if re.search(imports, path.read_text())] == ["text.py"]


class Careless(DrawsPrintable):
    """Draws a line as it was given, like a chart, a log or a node that forgot to clean its text."""

    def draw_line(self, y: int) -> Strip:
        return Strip([Segment(HOSTILE), Segment(SURROGATE)]).adjust_cell_length(self.size.width)


async def test_widgets_that_draw_every_second_are_checked_too() -> None:
    for kind in (Chart, NumaNodes, StyledLines, LogView):
        assert issubclass(kind, DrawsPrintable)
    app: FixedApp[None] = FixedApp()
    async with app.run_test(size=(100, 10)) as pilot:
        await app.mount(Careless())
        await pilot.pause()
        strips = app.screen._compositor.render_strips(app.size)
        assert "owned" in strips[0].text
        for strip in strips:
            assert printable_line(strip.text) == strip.text
            assert strip.cell_length == 100 == cell_len(strip.text)
