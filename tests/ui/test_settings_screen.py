"""Settings on the screen: applied, changed, kept; vim's and own keys; themes for all eyes."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import combinations
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from rich._palettes import STANDARD_PALETTE
from textual.color import Color, Lab, rgb_to_lab
from textual.strip import Strip
from textual.theme import Theme
from textual.widgets import DataTable, Static

from so_tui.folders import settings_file
from so_tui.settings import KeySettings, ScreenSettings, Settings
from so_tui.settings_file import load_settings
from so_tui.ui.chart_metrics import ChartLayout, load_layout, save_layout
from so_tui.ui.charts.chart import Chart
from so_tui.ui.dashboard.charts import ChartPanel
from so_tui.ui.lines import StyledLines
from so_tui.ui.themes import COLOUR_BLIND, CONTRAST, DARK, THEMES, themes_for
from so_tui.ui.widgets import FindField
from so_tui.units import memory_size, show_memory_in
from tests.support.make_run import write_run
from tests.support.screen import Driver, opened, rows_of

pytestmark = pytest.mark.usefixtures("_short_form")
GROUNDS = ("#000000", "#1c1c1c")


async def test_settings_are_changed_in_the_application_and_kept(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.presets()
        assert ui.app.theme == DARK.name
        await ui.press("comma")
        await ui.until(lambda: "screen.theme" in ui.text())
        options = ui.screen.query_one(".settings")
        await ui.pilot.click(options, offset=(options.render_line(0).text.index("▸"), 0))
        assert ui.app.theme != DARK.name
        await ui.press("left")
        assert ui.app.theme == DARK.name
        await ui.press("right", "right")
        assert ui.app.theme == CONTRAST.name
        await ui.press("down", "down", "right", "down", "down", "enter", "escape")
        await ui.until(lambda: load_settings().settings.keys.style == "vim")
        kept = load_settings()
        screen = kept.settings.screen
        assert (kept.problems, screen.theme, screen.units) == ((), CONTRAST.name, "decimal")
        assert memory_size(96 * 10**9) == "96.0 GB"
        show_memory_in("binary")


class HeldThreads(ThreadPoolExecutor):
    """Holds what it is given until it is released; then the newest begins first, as it may."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, partial(work, *args, **kwargs)))
        return future

    def release(self) -> None:
        while self.held:
            future, work = self.held.pop()
            future.set_result(work())


async def test_the_last_change_is_kept_whichever_thread_is_first(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=20, total=20, state="finished")
    async with opened(runs_dir, open_run=run, shows="finished") as ui:
        threads = HeldThreads()
        asyncio.get_running_loop().set_default_executor(threads)
        await ui.press("G", "G", "G")
        layout = ui.find("ChartPanel", ChartPanel).chart_layout
        await ui.press("4", "V", "V", "V")
        threads.release()
        await ui.until(lambda: load_layout().grid == layout.grid is not None)
        assert ui.app.settings.runs.group == "tag"
        await ui.until(lambda: load_settings().settings.runs.group == "tag")


async def test_memory_has_the_chosen_units_everywhere_at_once(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=60, total=60, seconds_of_samples=20, state="finished")
    save_layout(ChartLayout(shown=("gpu-memory", "node-memory")))
    async with opened(runs_dir, (160, 45), open_run=run) as ui:
        chart, details = ui.find("#gpu-memory", Chart), ui.find("#details", StyledLines)

        def headings() -> str:
            return ui.heading("#gpu-memory") + ui.heading("#node-memory")

        await ui.until(lambda: chart.lines and "GiB" in ui.heading("#node-memory"))
        (largest,) = [line.series.value(line.length - 1) for line in chart.lines]
        axis = rows_of(chart)
        await ui.press("1")
        await ui.presets()
        assert "GiB" in ui.shown("#detail")
        ui.app.keep({"screen.units": "decimal"})
        await ui.until(lambda: " GB" in ui.shown("#detail") and "GiB" not in ui.text())
        await ui.press("3")
        await ui.until(lambda: "GiB" not in headings() + details.content.plain)
        assert memory_size(int(largest)).split()[0] in ui.heading("#gpu-memory")
        assert axis != rows_of(chart)
        show_memory_in("binary")


def shows(ui: Driver, text: str) -> bool:
    return any(text in str(line.content) for line in ui.screen.query(Static))


async def test_a_broken_file_is_reported_and_the_defaults_hold(runs_dir: Path) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("[screen\n")
    async with opened(runs_dir, settings=load_settings()) as ui:
        await ui.until(lambda: any("is not TOML" in note for note in ui.notes()))
        ui.app.theme = CONTRAST.name  # as the palette does
        await ui.until(lambda: shows(ui, "hold only until"))
    assert settings_file().read_text() == "[screen\n"


async def test_vims_keys_move_and_keys_of_ones_own_replace_others(runs_dir: Path) -> None:
    for name in ("one", "two", "three"):
        write_run(runs_dir, steps=3, state="finished", name=name)
    keys = KeySettings(style="vim", bindings={"find": "ctrl+e"})
    settings = Settings(keys=keys, screen=ScreenSettings(layout="compact"))
    async with opened(runs_dir, settings=settings) as ui:
        assert ui.screen.has_class("-narrow", "-short")
        await ui.press("4")
        table = ui.find("#table", DataTable)
        await ui.until(lambda: table.row_count == 3)
        for moves, row in (("jj", 2), ("gjk", 0), ("G", 2)):
            await ui.press(*moves)
            assert table.cursor_row == row
        await ui.press("slash")
        assert not ui.find("#filter", FindField).display
        await ui.press("ctrl+e", "j")
        assert ui.find("#filter", FindField).display
        await ui.until(lambda: table.row_count == 0)  # in a text field, j is a letter
        await ui.press("escape", "question_mark")
        await ui.until(lambda: shows(ui, "as in vim"))


def linear(colour: str) -> tuple[float, float, float]:
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in Color.parse(colour).normalized
    )
    return red, green, blue


def contrast(one: str, two: str) -> float:
    """Return the contrast of two colours by WCAG 2.2, 1 to 21."""
    low, high = sorted(
        0.2126 * red + 0.7152 * green + 0.0722 * blue
        for red, green, blue in map(linear, (one, two))
    )
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
DEFICIENCIES = {
    "none": "1 0 0  0 1 0  0 0 1",
    "protanopia": "0.152286 1.052583 -0.204868  0.114503 0.786281 0.099216  "
    "-0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968  0.280085 0.672501 0.047413  "
    "-0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779  -0.078411 0.930809 0.147602  "
    "0.004733 0.691367 0.303900",
}


def seen(colour: str, deficiency: str) -> Lab:
    own, factors = linear(colour), list(map(float, DEFICIENCIES[deficiency].split()))
    light = (min(1.0, max(0.0, sum(map(mul, factors[row : row + 3], own)))) for row in (0, 3, 6))
    encoded = (
        12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
        for value in light
    )
    return rgb_to_lab(Color(*(round(255 * value) for value in encoded)))


def colours(theme: Theme, names: str) -> dict[str, str]:
    return {name: theme.variables.get(name) or getattr(theme, name) for name in names.split()}


def test_the_theme_of_high_contrast_has_it() -> None:
    names = "foreground faint primary success warning error adam main-core rule"
    cursor = [CONTRAST.variables[f"block-cursor-{part}"] for part in ("foreground", "background")]
    pairs = [(text, ground) for text in colours(CONTRAST, names).values() for ground in GROUNDS]
    for one, two in (*pairs, cursor):
        assert contrast(one, two) >= 7, (one, two)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_everybody_can_tell_the_parts_apart(deficiency: str) -> None:
    for names in ("adam main-core forward data-part", "success warning error"):
        shown = [seen(colour, deficiency) for colour in colours(COLOUR_BLIND, names).values()]
        for one, two in combinations(shown, 2):
            assert math.dist((one.L, one.a, one.b), (two.L, two.a, two.b)) >= 20, names


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_roles_have_readable_colours_of_their_own(theme: Theme) -> None:
    assert theme.variables.keys() == DARK.variables.keys()
    roles = colours(theme, "accent gpu adam main-core memory")
    parts = colours(theme, "data-part forward backward exposed other-part")
    for kind in (roles, parts):
        assert len(set(kind.values())) == len(kind)
    for name, colour in roles.items():
        assert contrast(colour, theme.background or "") >= 4.5, name
    assert parts["exposed"] == roles["adam"]  # it is Adam that the GPU waits for
    run, adam, strip = (
        contrast(colour, theme.background or "")
        for colour in colours(theme, "run adam adam-strip").values()
    )
    assert run > adam >= strip >= 3  # the loss is brighter than the load of cores


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_focus_has_the_colour_of_nothing_else(theme: Theme) -> None:
    names = "gpu adam main-core memory forward backward data-part run success warning error faint"
    for deficiency in DEFICIENCIES:
        accent = seen(theme.accent or "", deficiency)
        for name, colour in colours(theme, names).items():
            other = seen(colour, deficiency)
            apart = math.dist((accent.L, accent.a, accent.b), (other.L, other.a, other.b))
            assert apart >= 15, (name, deficiency)


def test_a_terminal_of_16_colours_shows_those_that_are_meant() -> None:
    (dark, *_) = themes_for("standard")
    assert dark.name == DARK.name
    assert dark.variables.keys() == DARK.variables.keys()
    own = {str(Color(*triplet).hex).lower() for triplet in STANDARD_PALETTE._colors}
    names = "accent success warning error foreground faint rule gpu adam main-core memory run"
    shown = colours(dark, names)
    assert set(shown.values()) <= own
    assert len(set(colours(dark, "accent success warning error gpu adam").values())) == 6
    assert themes_for("256") == THEMES


# Terminals without colour, without Unicode, and with other themes.


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
    run = write_run(runs_dir, steps=20)
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
    run = write_run(runs_dir, steps=20)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        for theme in ("textual-dark", "ansi-dark"):
            ui.app.theme = theme
            for number in "12345":
                await ui.press(number)
                assert "so-tui" in ui.text()
