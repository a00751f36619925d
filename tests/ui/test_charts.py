"""The charts that a user chooses: metrics, grids, scales, the mouse, and other runs over them."""

from __future__ import annotations

import csv
import math
import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from textual.widgets import Input

from so_tui.ui.chart_metrics import (
    GRIDS,
    METRICS,
    ChartLayout,
    _layout_path,
    load_layout,
    save_layout,
)
from so_tui.ui.charts.chart import SIGNS, Chart, look_of
from so_tui.ui.charts.drawing import columns_beyond, fit_scale
from so_tui.ui.charts.series import Line, StepSeries, Wanted
from so_tui.ui.dashboard.charts import ChartPanel, RunLegend
from so_tui.ui.dashboard.dialogs import ChooseMetrics, _weight_of
from so_tui.ui.dashboard.view import steps_at
from so_tui.ui.dialogs import TickList
from tests.support.make_run import quad_machine, write_run
from tests.support.records import append_records, evaluation_record, step_record
from tests.support.screen import Driver, opened, rows_of


def shown(ui: Driver) -> list[str]:
    return [chart.id or "" for panel in ui.screen.query(ChartPanel) for chart in panel.charts]


async def test_metrics_are_chosen_by_a_filter_and_remembered(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        for keys in (("enter", "n", "escape"), ("enter", "n", "enter")):
            assert shown(ui) == ["loss", "throughput"]
            await choose_metrics(ui)
            await ui.press(*keys)
        await ui.until(lambda: "tick at least one" in ui.shown("#said"))
        assert not _layout_path().exists()
        await ui.press("shift+tab")
        await ui.type_text("MFU")
        await ui.press("enter", "a", "enter")
        await ui.until(lambda: shown(ui) == ["mfu"])
        await ui.until(lambda: re.search(r"MFU +(last )?43.6 %", ui.heading("#mfu")))
        await ui.until(_layout_path().is_file)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        assert shown(ui) == ["mfu"]


async def choose_metrics(ui: Driver) -> None:
    await ui.press("M")
    await ui.until(lambda: isinstance(ui.screen, ChooseMetrics))


async def test_metrics_of_a_run_without_gpus_are_those_it_has(runs_dir: Path) -> None:
    machine = replace(quad_machine(), gpus=())
    run = write_run(runs_dir, machine=machine, preset="tiny", steps=20)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        await ui.until(lambda: "TFLOPS/rank" in ui.text())
        await choose_metrics(ui)
        ticked = ui.find("#metrics", TickList).ticked
        assert "host-memory" in ticked
        assert "gpu-memory" not in ticked
        ui.screen.set_focus(ui.find("#smoothing", Input))
        await ui.answer("0.5")
        await ui.until(_layout_path().is_file)
        assert load_layout() == ChartLayout(ema=0.5), "runs with GPUs show their memory as before"
        await ui.press("less_than_sign")
        await ui.until(lambda: shown(ui) == ["parts", "host-memory"])


async def test_every_metric_is_drawn_or_says_why_not(runs_dir: Path) -> None:
    save_layout(ChartLayout(shown=tuple(metric.key for metric in METRICS), grid=(3, 3)))
    run = write_run(runs_dir, steps=60, seconds_of_samples=20)
    async with opened(runs_dir, (200, 50), open_run=run, shows="training") as ui:
        seen: list[str] = []
        for _ in range(math.ceil(len(METRICS) / 9)):
            for key in shown(ui):
                chart = ui.find(f"#{key}", Chart)
                measured = key not in ("evaluation", "router")
                await ui.until(lambda: chart.axis and bool(chart.lines) == measured)  # noqa: B023 - called at once
                assert measured or "not measured in this run" in chart.render_line(1).text
            seen += shown(ui)
            await ui.press("greater_than_sign")
        assert seen == [metric.key for metric in METRICS]
        await ui.until(lambda: shown(ui)[0] == "loss")


async def test_grids_and_pages(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=60)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        panel = ui.find("ChartPanel", ChartPanel)
        grids = []
        for _ in GRIDS:
            await ui.press("G")
            grids.append((panel.page.rows, panel.page.columns))
            assert len(panel.charts) == min(6, math.prod(grids[-1]))
            await ui.until(lambda: all(each.region.height >= 6 for each in panel.charts))
        assert grids == [*GRIDS[2:-1], (2, 3), *GRIDS[:2]]
        await ui.press("less_than_sign")
        assert shown(ui) == ["parts", "gpu-memory"]
        await ui.until(lambda: "3/3 ▸" in ui.text())


def smoothed_by(ui: Driver, smoothing: str) -> bool:
    heading = ui.heading("#loss")
    return smoothing in heading and ("mean" in heading) == (smoothing == "mean of")


async def test_smoothing_and_scales_are_adjusted(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120)
    async with opened(runs_dir, (150, 36), open_run=run, shows="training") as ui:
        for keys, smoothing in (("", "mean of"), ("w", ""), ("www", "EMA 0.9 "), ("W", "EMA 0.8 ")):
            await ui.press(*keys)
            await ui.until(partial(smoothed_by, ui, smoothing))
        assert "EMA 0.8 " in ui.heading("#throughput")
        ui.find("#throughput", Chart).focus()
        await ui.press("L", "R")
        assert "log y" not in ui.heading("#loss")
        await ui.until(lambda: re.search("log y.*robust y", ui.heading("#throughput")))


async def test_the_mouse_zooms_pans_and_points(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=400)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        await ui.until(lambda: ui.find("#loss", Chart).axis)
        await ui.pilot.mouse_down("#loss", offset=(20, 3))
        await ui.pilot.hover("#loss", offset=(40, 3))
        assert ui.find("#loss", Chart).chosen == (20, 40)
        await ui.pilot.mouse_up("#loss", offset=(40, 3))
        await ui.until(lambda: "zoomed" in ui.heading("#loss"))
        axis = ui.find("#loss", Chart).axis
        assert axis is not None
        assert 100 < axis.low < axis.high < 320
        assert ui.find("#loss", Chart).cursor is None, "a drag is no click"
        await ui.pilot.mouse_down("#throughput", offset=(40, 3), shift=True)
        await ui.pilot.hover("#throughput", offset=(30, 3))
        await ui.pilot.mouse_up("#throughput", offset=(30, 3), shift=True)
        await ui.until(lambda: (now := ui.find("#loss", Chart).axis) and now.low > axis.low + 5)
        await ui.pilot.click("#loss", offset=(30, 3))
        await ui.until(lambda: "at step" in ui.heading("#loss"))


async def test_evaluations_and_samples_of_other_runs_are_laid_over(runs_dir: Path) -> None:
    save_layout(ChartLayout(shown=("evaluation", "gpu-power"), grid=(1, 2)))
    common: dict[str, Any] = {"steps": 60, "seconds_of_samples": 60, "gpus": 2}
    run = write_run(runs_dir, name="this", **common)
    other = write_run(runs_dir, name="other", state="finished", now=1e9, **common)
    write_run(runs_dir, name="without", state="finished", **common)
    append_records(run, evaluation_record(30, 1.5))
    append_records(other, evaluation_record(30, 1.25), evaluation_record(60, 1.125))
    async with opened(runs_dir, (120, 36), open_run=run) as ui:
        await ui.until(lambda: len(ui.app.runs) == 3)
        await ui.state_shown("training")
        await ui.press("v", "a", "enter")
        await ui.until(
            lambda: ui.screen.query(RunLegend) and len(ui.find("#evaluation", Chart).lines) == 2
        )
        own, laid = ui.find("#evaluation", Chart).lines
        assert list(laid.steps or ()) == [30, 60]
        assert list(map(laid.series.value, (0, 1))) == [1.25, 1.125]
        assert laid.role != own.role
        legend = ui.find("RunLegend", RunLegend)
        for words in ("other 1.12", "without not measured"):
            await ui.until(lambda: words in legend.content.plain)  # noqa: B023 - called at once
        power = ui.find("#gpu-power", Chart)

        def laid_over() -> list[Line]:
            return [line for line in power.lines if line.role.startswith("run-")]

        await ui.until(lambda: len(laid_over()) > 2)
        assert len({line.role for line in laid_over()}) == 2, "a colour for each run, not each GPU"
        for line in laid_over():
            inside = [step for step in line.steps or () if math.isfinite(step)]
            assert inside == sorted(inside)
            assert 1 <= inside[0] <= inside[-1] <= 60


async def test_runs_that_no_colour_tells_apart_have_letters(runs_dir: Path) -> None:
    for steps in range(30, 40):
        name = f"run-{steps}"
        write_run(runs_dir, steps=steps, state="finished", name=name)
    run = write_run(runs_dir, steps=20)
    async with opened(runs_dir, (160, 45), open_run=run) as ui:
        await ui.until(lambda: len(ui.app.runs) == 11)
        await ui.state_shown("training")
        await ui.press("v", "a", "enter")
        legend, loss = ui.find("RunLegend", RunLegend), ui.find("#loss", Chart)
        await ui.until(lambda: legend.content.plain.count("run-") == 10)
        await ui.until(lambda: len({(line.role, line.sign) for line in loss.lines[2:]}) == 10)
        assert loss.axis is not None
        assert loss.axis.high == 39, "to the end of the longest run"
        ordered = [row.run.name for row in ui.app.runs if row.run.path != run.path]
        for name, sign in zip(ordered, "●●●●●●●●ab", strict=True):
            assert f"{sign} {name}" in legend.content.plain
        assert max(map(len, legend.content.plain.splitlines())) <= legend.room
        loss.focus()
        await ui.press("m")
        await ui.until(lambda: loss.is_maximized)
        plot = "".join(rows_of(loss)[1:-1])
        assert set(re.findall("[a-z]", plot)) == {"a", "b"}
        await ui.press("x")
        await ui.until(
            lambda: (axis := loss.axis) and axis.unit == "time" and axis.high - axis.low > 110
        )


def test_without_colours_every_line_has_a_letter() -> None:
    assert [look_of(index, coloured=False).sign for index in range(len(SIGNS))] == list(SIGNS)
    assert len(set(SIGNS)) == len(SIGNS)
    assert len({look_of(index, coloured=True) for index in range(100)}) == 100


async def test_charts_are_exported_as_picture_and_table(runs_dir: Path, tmp_path: Path) -> None:
    save_layout(ChartLayout(shown=("loss", "gpu-power"), grid=(1, 2)))
    run = write_run(runs_dir, steps=60, seconds_of_samples=30, name="one", gpus=2)
    async with opened(runs_dir, (120, 36), open_run=run, shows="training") as ui:
        await ui.until(lambda: ui.find("#gpu-power", Chart).lines and ui.find("#loss", Chart).lines)
        for key in ("loss", "gpu-power"):
            for file in (f"{key}.svg", f"{key}.csv"):
                ui.find(f"#{key}", Chart).focus()
                await ui.press("E")
                await ui.until(lambda: ui.screen.query(Input))
                assert ui.find("Input", Input).value == f"one-{key}.svg"
                await ui.answer(str(tmp_path / file))
                wrote = f"Wrote {tmp_path / file}"
                await ui.until(lambda: any(wrote in note for note in ui.notes()))  # noqa: B023 - called at once
    with (tmp_path / "loss.csv").open(newline="") as table:
        steps = list(csv.DictReader(table))
    assert list(steps[0]) == ["step", "time", "loss"]
    assert [int(row["step"]) for row in steps] == list(range(1, 61))
    with (tmp_path / "gpu-power.csv").open(newline="") as table:
        powers = list(csv.DictReader(table))
    assert list(powers[0]) == ["host", "gpu", "time", "power_w"]
    assert {row["gpu"] for row in powers} == {"0", "1", "2", "3"}
    assert all(float(row["power_w"]) > 0 for row in powers)
    for key, word in (("loss", "mean of 50 steps"), ("gpu-power", "GPU 3")):
        text = (tmp_path / f"{key}.svg").read_text()
        assert ("nan" in text, f">{word}</text>" in text) == (False, True)
        assert ElementTree.fromstring(text).findall(".//{http://www.w3.org/2000/svg}polyline")


def test_samples_of_another_run_stand_at_its_own_steps() -> None:
    series = StepSeries(5, Wanted())
    for number, at in ((1, 100.0), (2, 110.0), (4, 130.0)):
        series.extend([step_record(number, time=at)])
    found = steps_at([90.0, 100.0, 105.0, 120.0, 130.0, 131.0], 6, series)
    assert list(found) == [-math.inf, 1, 1.5, 3, 4, math.inf]


def test_what_is_remembered_and_unknown_is_left_out() -> None:
    _layout_path().parent.mkdir(parents=True)
    remembered = '{"shown": ["loss", "gone", "loss"], "ema": 0.5, "log": ["norm"], "new": 1}'
    _layout_path().write_text(remembered)
    assert load_layout() == ChartLayout(shown=("loss",), ema=0.5, log=("norm",))
    for unreadable in ("[", '{"ema": 7}', '{"grid": [9, 9]}'):
        _layout_path().write_text(unreadable)
        assert load_layout() == ChartLayout()


def test_a_typed_weight_is_a_number() -> None:
    assert list(map(_weight_of, ("", "0", " 0.99 "))) == [None, 0.0, 0.99]
    for wrong in ("1", "-0.1", "nan"):
        with pytest.raises(ValueError, match="Expected `float`"):
            _weight_of(wrong)


def test_a_robust_scale_leaves_outliers_out_and_counts_them() -> None:
    spans = [(1.0 + 0.01 * column, 1.1 + 0.01 * column) for column in range(50)]
    spans[7] = (0.9, 900.0)
    assert fit_scale([spans]).high > 900
    scale, logarithmic = (fit_scale([spans], robust=True, log=log) for log in (False, True))
    assert (scale.log, logarithmic.log) == (False, True)
    assert max(scale.high, logarithmic.high) < 2
    assert columns_beyond([spans], scale) == 1
    assert fit_scale([[*[(1.0, 1.0)] * 3, (1.0, 50.0)]], robust=True).high < 2


async def test_charts_of_a_page_name_the_same_steps_and_hide_no_checkpoint(runs_dir: Path) -> None:
    """The number of the page is in the first heading, off the axis."""
    run = write_run(runs_dir, steps=60)
    async with opened(runs_dir, open_run=run, shows="training", size=(120, 36)) as ui:
        panel = ui.find("ChartPanel", ChartPanel)
        axes = [chart.draw_rows()[-1].text for chart in panel.charts]
        assert len(axes) > 1
        assert len({tuple(re.findall(r"[\d,]+", axis)) for axis in axes}) == 1, axes
        assert len({axis.count("◆") for axis in axes}) == 1
        assert "▸" in panel.charts[0].draw_rows()[0].text
