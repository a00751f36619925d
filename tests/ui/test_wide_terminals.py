"""What wide terminals show beside each other, and panels whose sizes are changed and kept."""

from __future__ import annotations

from pathlib import Path

from textual.containers import Container
from textual.geometry import Offset

from so_tui.settings_file import load_settings
from so_tui.ui.configure.form import FormPanel
from so_tui.ui.dashboard.charts import ChartPanel
from so_tui.ui.dashboard.panels import LogView, StepDetails
from so_tui.ui.dashboard.view import side_columns
from so_tui.ui.lines import StyledLines
from so_tui.ui.numa_nodes import NumaNodes
from so_tui.ui.runs.preview import RunPreview
from tests.support.make_run import write_run
from tests.support.screen import Driver, opened


def kept(name: str) -> int | None:
    value: int | None = getattr(load_settings().settings.panels, name)
    return value


async def pull(ui: Driver, selector: str, x: int, y: int) -> None:
    """Pull a line with the mouse by ``x`` and ``y`` cells."""
    begin = ui.screen.query_one(selector).region.offset
    await ui.pilot.mouse_down(offset=begin)
    for part in (1, 2):
        await ui.pilot.hover(offset=begin + Offset(x * part // 2, y * part // 2))
    await ui.pilot.mouse_up(offset=begin + Offset(x, y))


async def test_wide_dashboards_have_two_columns(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=60, seconds_of_samples=30)
    async with opened(runs_dir, (220, 50), open_run=run) as ui:
        await ui.until(lambda: "step 60" in ui.text())
        nodes, details = ui.find("#nodes", NumaNodes), ui.find("StepDetails", StepDetails)
        log, newest = ui.find("#log", LogView), details.lines.content.plain
        assert "slowest rank" in newest
        assert log.region.y > details.region.y
        assert log.region.x == details.lines.region.x > nodes.region.right
        await ui.press("i", "left", "left")
        await ui.until(lambda: "at the cursor" in str(details.heading.render()))
        await ui.until(lambda: details.lines.content.plain != newest)
        assert "node 1" in nodes.render_line(0).text
        await ui.resize(120, 36)
        await ui.until(lambda: not details.display)
        assert log.region.y > nodes.region.y
        assert "node 1" not in nodes.render_line(0).text
        await ui.resize(220, 50)
        gpus = ui.find("#gpus", StyledLines)
        await ui.until(lambda: gpus.size.width > 120 and gpus.rows == gpus.size.height == 4)


async def test_panels_are_resized_by_keys_and_mouse_kept_and_reset(runs_dir: Path) -> None:
    run = write_run(
        runs_dir, steps=60, total=60, seconds_of_samples=2, state="finished", name="one"
    )
    async with opened(runs_dir, (220, 50), open_run=run) as ui:
        await ui.until(lambda: "step 60" in ui.text())
        charts = ui.find("ChartPanel", ChartPanel)
        before = charts.size.height
        await ui.press("left_curly_bracket")
        await ui.until(lambda: kept("charts") == before - 1 == charts.size.height)
        await pull(ui, "#nodes-rule", 0, 4)
        await ui.until(lambda: kept("charts") == before + 3 == charts.size.height)
        await pull(ui, "#panels > Divider", -8, 0)
        await ui.until(lambda: kept("side") == side_columns(220) + 8)
        await ui.press("vertical_line")
        await ui.until(
            lambda: kept("charts") is kept("side") is None and charts.size.height == before
        )
        await ui.press("4")
        await ui.until(lambda: ui.find("RunPreview", RunPreview).size.width)
        preview = ui.find("RunPreview", RunPreview)
        columns = preview.size.width
        await ui.until(lambda: "tokens/s" in ui.shown("#facts"))  # its losses are read in a thread
        await ui.press("right_curly_bracket")  # the list has the focus
        await ui.until(
            lambda: preview.size.width == columns - 4 and kept("run_beside") == columns - 3
        )
        await ui.resize(120, 36)
        body = ui.find("#preview", Container)
        await ui.until(lambda: body.region.y > ui.screen.query_one("#table").region.y)
        rows = body.size.height
        await pull(ui, "#preview-rule", 0, -2)
        await ui.until(lambda: kept("run") == rows + 2 == body.size.height)
        await ui.configure()
        await ui.press("escape")
        form = ui.find("FormPanel", FormPanel)
        columns = form.size.width
        await ui.press("right_curly_bracket")
        await ui.until(lambda: kept("form") == columns + 4 == form.size.width)
        await ui.press("vertical_line")
        await ui.until(lambda: kept("form") is None and form.size.width == columns)
        assert kept("run") == rows + 2, "sizes of other screens stay"
