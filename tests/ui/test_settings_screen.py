"""Settings on the screen: applied, changed, kept; vim's and own keys; themes for all eyes."""

from __future__ import annotations

import asyncio
import re
from itertools import combinations
from pathlib import Path

import pytest
from textual.color import Color
from textual.widgets import DataTable, Static

from so_tui.folders import settings_file
from so_tui.settings import KeySettings, ScreenSettings, Settings
from so_tui.settings_file import load_settings
from so_tui.ui.chart_metrics import ChartLayout, load_layout, save_layout
from so_tui.ui.charts.chart import Chart
from so_tui.ui.dashboard.charts import ChartPanel
from so_tui.ui.lines import StyledLines
from so_tui.ui.themes import COLOUR_BLIND, CONTRAST, DARK, THEMES
from so_tui.ui.widgets import FindField
from so_tui.units import GIB, memory_size, show_memory_in
from tests.support.held_threads import HeldThreads
from tests.support.make_run import write_run
from tests.support.screen import opened

pytestmark = pytest.mark.usefixtures("_short_form")


async def test_settings_are_changed_in_the_application_and_kept(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.presets()
        assert ui.app.theme == DARK.name
        await ui.press("comma")
        await ui.until(lambda: "screen.theme" in ui.text())
        await ui.press("right", "right")
        assert ui.app.theme == CONTRAST.name
        await ui.press("down", "down", "right", "down", "down", "enter", "escape")
        await ui.until(lambda: load_settings().settings.keys.style == "vim")
        kept = load_settings()
        assert kept.problems == ()
        assert (kept.settings.screen.theme, kept.settings.screen.units) == (
            CONTRAST.name,
            "decimal",
        )
        assert memory_size(96 * 10**9) == "96.0 GB"
        show_memory_in("binary")


async def test_the_last_change_is_kept_whichever_thread_is_first(runs_dir: Path) -> None:
    run = write_run(
        runs_dir, steps=20, total=20, seconds_of_samples=2, state="finished", name="one"
    )
    async with opened(runs_dir, open_run=run, shows="finished") as ui:
        threads = HeldThreads()
        asyncio.get_running_loop().set_default_executor(threads)
        await ui.press("G", "G", "G")
        layout = ui.find("ChartPanel", ChartPanel).chart_layout
        await ui.press("4", "V", "V", "V")
        threads.release()
        assert load_layout().grid == layout.grid is not None
        assert load_settings().settings.runs.group == ui.app.settings.runs.group == "tag"


async def test_memory_has_the_chosen_units_everywhere_at_once(runs_dir: Path) -> None:
    run = write_run(
        runs_dir, steps=60, total=60, seconds_of_samples=20, state="finished", name="one"
    )
    layout = ChartLayout(shown=("gpu-memory", "node-memory"))
    save_layout(layout)
    async with opened(runs_dir, (160, 45), open_run=run) as ui:
        chart, details = ui.find("#gpu-memory", Chart), ui.find("#details", StyledLines)
        await ui.until(lambda: chart.lines and "GiB" in ui.heading("#node-memory"))
        await ui.press("m")
        (largest,) = [line.series.value(line.length - 1) for line in chart.lines]
        assert figure(ui.heading("#gpu-memory"), "GiB") == pytest.approx(largest / GIB, rel=0.01)
        axis = "".join(chart.render_line(row).text for row in range(chart.size.height))
        await ui.press("1")
        await ui.presets()
        assert "GiB" in ui.shown("#detail")
        ui.app.keep({"screen.units": "decimal"})
        await ui.until(lambda: " GB" in ui.shown("#detail") and "GiB" not in ui.text())
        await ui.press("3")
        await ui.until(
            lambda: (
                "GiB"
                not in ui.heading("#gpu-memory")
                + ui.heading("#node-memory")
                + details.content.plain
            )
        )
        assert figure(ui.heading("#gpu-memory"), "GB") == pytest.approx(largest / 1e9, rel=0.01)
        assert axis != "".join(chart.render_line(row).text for row in range(chart.size.height))
        show_memory_in("binary")


def figure(heading: str, unit: str) -> float:
    """Return the number before a unit."""
    found = re.search(rf"([\d.]+) {unit}\b", heading)
    assert found, heading
    return float(found[1])


async def test_a_broken_file_is_reported_and_the_defaults_hold(runs_dir: Path) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("[screen\n")
    async with opened(runs_dir, settings=load_settings()) as ui:
        await ui.until(lambda: any("is not TOML" in note for note in ui.notes()))
        ui.app.theme = CONTRAST.name  # as the palette does
        await ui.until(
            lambda: any(
                "hold only until" in str(title.content)
                for title in ui.screen.query(".dialog-title").results(Static)
            )
        )
    assert settings_file().read_text() == "[screen\n"


async def test_vims_keys_move_and_keys_of_ones_own_replace_others(runs_dir: Path) -> None:
    for name in ("one", "two", "three"):
        write_run(runs_dir, steps=3, seconds_of_samples=1, state="finished", name=name)
    keys = KeySettings(style="vim", bindings={"find": "ctrl+e"})
    async with opened(
        runs_dir, settings=Settings(keys=keys, screen=ScreenSettings(layout="compact"))
    ) as ui:
        assert ui.screen.has_class("-narrow", "-short")
        await ui.press("4")
        table = ui.find("#table", DataTable)
        await ui.until(lambda: table.row_count == 3)
        await ui.press("j", "j")
        assert table.cursor_row == 2
        await ui.press("g", "j", "k")
        assert table.cursor_row == 0
        await ui.press("G")
        assert table.cursor_row == 2
        await ui.press("slash")
        assert not ui.find("#filter", FindField).display
        await ui.press("ctrl+e", "j")
        assert ui.find("#filter", FindField).display
        await ui.until(lambda: table.row_count == 0)  # in a text field, j is a letter
        await ui.press("escape", "question_mark")
        await ui.until(
            lambda: any("as in vim" in str(line.content) for line in ui.screen.query(Static))
        )


def contrast(one: str, two: str) -> float:
    """Return the contrast of two colours by WCAG 2.2, 1 to 21."""
    lights = sorted(
        0.2126 * red + 0.7152 * green + 0.0722 * blue
        for red, green, blue in map(linear, (one, two))
    )
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def linear(colour: str) -> tuple[float, ...]:
    values = (value / 255 for value in Color.parse(colour).rgb)
    return tuple(
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values
    )


# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(colour: str, deficiency: str) -> tuple[float, float, float]:
    """Return a colour as it is seen, in CIE Lab (D65)."""
    own = linear(colour)
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, own, strict=True))))
        for row in DEFICIENCIES[deficiency]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def colours(theme_index: int, *names: str) -> dict[str, str]:
    theme = THEMES[theme_index]
    return {name: theme.variables.get(name) or getattr(theme, name) for name in names}


def test_the_theme_of_high_contrast_has_it() -> None:
    names = "foreground faint primary success warning error adam main-core rule"
    texts = colours(THEMES.index(CONTRAST), *names.split())
    for name, colour in texts.items():
        assert contrast(colour, "#000000") >= 7, name
        assert contrast(colour, "#1c1c1c") >= 7, name
    cursor = [CONTRAST.variables[f"block-cursor-{part}"] for part in ("foreground", "background")]
    assert contrast(*cursor) >= 7


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_everybody_can_tell_the_parts_apart(deficiency: str) -> None:
    for names in (("adam", "main-core", "forward", "data-part"), ("success", "warning", "error")):
        for one, two in combinations(colours(THEMES.index(COLOUR_BLIND), *names).items(), 2):
            apart = (
                sum(
                    (a - b) ** 2
                    for a, b in zip(seen(one[1], deficiency), seen(two[1], deficiency), strict=True)
                )
                ** 0.5
            )
            assert apart >= 20, (one, two, apart)


@pytest.mark.parametrize("theme", range(len(THEMES)), ids=[theme.name for theme in THEMES])
def test_roles_have_readable_colours_of_their_own(theme: int) -> None:
    roles = colours(theme, "accent", "gpu", "adam", "main-core", "memory")
    assert len(set(roles.values())) == len(roles)
    for name, colour in roles.items():
        assert contrast(colour, THEMES[theme].background or "") >= 4.5, name
    parts = colours(theme, "data-part", "forward", "backward", "exposed", "other-part")
    assert len(set(parts.values())) == len(parts)
    assert parts["exposed"] == roles["adam"]  # it is Adam that the GPU waits for


def test_every_theme_defines_what_the_others_do() -> None:
    for theme in THEMES:
        assert theme.variables.keys() == DARK.variables.keys(), theme.name
