"""The Dashboard: a run that is live, that has ended, and that is gone."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.runs import read_state, write_state
from so_tui.runs.records import CheckpointRecord, EvaluationRecord, State
from so_tui.runs.state import request
from so_tui.ui.app import _key_groups
from so_tui.ui.charts.chart import Chart
from so_tui.ui.dashboard.panels import LogView
from so_tui.ui.dashboard.screen import DashboardScreen
from so_tui.ui.lines import StyledLines
from so_tui.ui.numa_nodes import NumaNodes
from tests.support.make_run import write_run
from tests.support.records import append_records, change_state
from tests.support.screen import SIZES, Driver, opened

MEAN = r"mean of 50( steps)?"


async def test_keys_move_the_axis_of_a_live_run(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=10)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        assert "step 120 / 5,000" in ui.shown("#title")
        assert len(ui.screen.query_one(NumaNodes).pictures) == 4
        loss = ui.find("#loss", Chart)
        assert loss.axis is not None
        assert loss.axis.unit == "step"
        await ui.press("x")
        assert loss.axis.unit == "time"
        await ui.press("x", "z")
        assert loss.axis.high - loss.axis.low < 70
        await ui.press("0", "i")
        assert loss.cursor == 120
        await ui.press("left", "left")
        assert loss.cursor is not None
        assert loss.cursor < 120
        assert "at step" in ui.text()
        await ui.press("escape")
        assert loss.cursor is None
        await ui.press("L")
        assert loss.log_scale


async def test_without_a_run_only_keys_that_do_something_are_offered(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.press("3")
        await ui.until(lambda: "No run yet" in ui.text() and "Zoom" not in ui.key_line)
        assert "Press 1 and then l" in ui.text()
        assert "q Quit" in ui.key_line
        await ui.press("4")
        await ui.until(lambda: "No runs yet" in ui.text())
        await ui.press("3")
        write_run(runs_dir, steps=5, seconds_of_samples=2)
        ui.app.list_runs()
        await ui.until(lambda: "Zoom" in ui.key_line)


async def test_several_hosts_are_told_apart(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    shutil.copytree(run.samples_dir("quad-gh200"), run.samples_dir("second"))
    run.log_path(1, "second").write_text("trained elsewhere\n")
    async with opened(runs_dir, (120, 50), open_run=run) as ui:
        await ui.until(lambda: len(ui.find("#nodes", NumaNodes).pictures) == 8)
        assert {picture.host for picture in ui.find("#nodes", NumaNodes).pictures} == {
            "quad-gh200",
            "second",
        }
        assert "8 nodes of 2 hosts" in ui.text()
        assert "second GPU 3" in ui.shown("#gpus")
        await ui.until(lambda: "second: trained elsewhere" in ui.text())


@pytest.mark.parametrize("size", SIZES)
async def test_every_value_of_the_loss_is_read_whole(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    append_records(
        run,
        *(
            EvaluationRecord(attempt=1, time=time.time(), step=step, loss=loss, tokens=100)
            for step, loss in ((60, 2.5), (110, 2.25))
        ),
    )
    async with opened(runs_dir, size, open_run=run) as ui:
        # What finds no room beside the others stands below the heading.
        await ui.until(lambda: re.search(rf"{MEAN} \d\.\d\d", ui.heading("#loss")))
        await ui.until(lambda: re.search(r"eval(uation)? 2\.25", ui.text()))
        await ui.press("i", *["left"] * 8)
        await ui.until(lambda: re.search(rf"{MEAN} \d\.\d\d", ui.heading("#loss")))
        await ui.until(lambda: re.search(r"eval(uation)? 2\.50", ui.text()))


@pytest.mark.parametrize("size", SIZES)
async def test_maximised_panels_keep_run_and_keys(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    async with opened(runs_dir, size, open_run=run, shows="training") as ui:
        await ui.until(lambda: "● 1 run live" in ui.text())  # the runs are listed by a thread
        for number, panel in enumerate((Chart, Chart, NumaNodes, LogView)):
            await ui.press(*["tab"] * min(number, 1), "m")
            await ui.until(lambda: "m Back" in ui.key_line)
            assert isinstance(ui.screen.maximized, panel)
            for word in ("so-tui", "● 1 run live", "● training", "^p"):
                await ui.until(lambda word=word: word in ui.text())
            assert "╱" not in ui.text(), "the panel has the whole width"
            assert ui.screen.maximized.region.bottom == size[1] - 1
            assert ("m", "All panels again") in [
                (key, more) for _, keys in _key_groups(ui.screen) for key, _, more in keys
            ]
            await ui.press("escape" if number % 2 else "m")
            await ui.until(lambda: "m Maximise" in ui.text())
        await ui.press("m", "slash")
        await ui.type_text("step 42/")
        await ui.until(lambda: "step 42/" in ui.lines()[-2])
        await ui.press("enter")
        state = replace(
            read_state(run), state="failed", reason="rank 2 was lost", suggestion="so-tui resume it"
        )
        write_state(run, state)
        await ui.state_shown("✗ failed")
        assert "rank 2 was lost" in ui.lines()[2]


async def test_time_left_is_shown_only_while_the_run_trains(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)

    def headings() -> str:
        return ui.heading("#loss") + "\n" + ui.heading("#throughput")

    async with opened(runs_dir, open_run=run) as ui:
        await ui.until(
            lambda: (
                "left " in ui.shown("#title") and "now " in headings() and "last " not in headings()
            )
        )
        request(run, "stop")
        await ui.state_shown("asked to stop")
        assert "left " not in ui.shown("#title")
        change_state(run, detail="asked to stop")
        await ui.until(lambda: known_detail(ui) == "asked to stop")
        assert not ui.find("#news", StyledLines).display, "the title says it already"
        states: tuple[State, ...] = ("saving", "loading", "finished")
        for state in states:
            change_state(run, state=state)
            await ui.state_shown(state)
            assert "left " not in ui.shown("#title")
            assert re.search(r"loss +last \d", headings())
            assert re.search(r"throughput .*last \d", headings())


def known_detail(ui: Driver) -> str:
    """Return what the state of the run that is drawn says of itself."""
    snapshot = ui.screen.snapshot if isinstance(ui.screen, DashboardScreen) else None
    return snapshot.state.detail if snapshot is not None and snapshot.state is not None else ""


async def test_news_that_come_again_are_drawn(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=60, total=60, seconds_of_samples=5)
    async with opened(runs_dir, open_run=run) as ui:
        news = ui.find("#news", StyledLines)
        training = read_state(run)
        write_state(run, replace(training, state="saving", detail="checkpoint of step 60"))
        await ui.until(lambda: "checkpoint of step 60" in ui.text())
        write_state(run, training)
        await ui.until(lambda: not news.display)
        append_records(
            run,
            CheckpointRecord(
                attempt=1, time=time.time(), step=60, path="/checkpoint", bytes=1, seconds=1.0
            ),
        )
        write_state(run, replace(training, state="finished", saved_step=60))
        await ui.until(lambda: "E exports the model" in ui.text())


async def test_the_log_is_followed_searched_and_followed_again(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=150, seconds_of_samples=5)
    async with opened(runs_dir, (80, 24), open_run=run) as ui:
        log = ui.find("LogView", LogView)
        await ui.until(lambda: log.lines and log.scroll_y == log.max_scroll_y)
        assert log.following
        log.show_vertical_scrollbar = False
        log.vertical_scrollbar.position = 0
        log.show_vertical_scrollbar = True
        assert log.vertical_scrollbar.position == log.scroll_y
        await ui.press("slash")
        await ui.type_text("step 42/")
        await ui.press("enter")
        assert log.matches == 1
        assert not log.following
        await ui.until(lambda: "1 line with “step 42/”" in ui.text())
        found = next(index for index, line in enumerate(log.lines) if "step 42/" in line)
        assert log.scroll_y <= found < log.scroll_y + log.size.height
        await ui.press("f")
        assert log.following
        with run.log_path(1, "quad-gh200").open("a") as file:
            file.write("Traceback: the newest line\n")
        await ui.until(lambda: "the newest line" in log.lines[-1])
        assert log.scroll_y == log.max_scroll_y


@pytest.mark.parametrize("size", SIZES)
async def test_steps_without_a_loss_are_marked(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5, nan_steps=range(60, 63))
    async with opened(runs_dir, size, open_run=run) as ui:
        await ui.until(lambda: "3 NaN" in ui.heading("#loss"))
        assert "mean of 50" in ui.heading("#loss")

        def marks() -> str:
            chart = ui.find("#loss", Chart)
            return chart.render_line(chart.size.height - 1).text

        assert 1 <= marks().count("✗") <= 3
        await ui.press("x")
        assert 1 <= marks().count("✗") <= 3


async def test_the_log_of_a_run_opened_second_is_followed(runs_dir: Path) -> None:
    first, second = (
        write_run(runs_dir, preset=name, steps=120, seconds_of_samples=5)
        for name in ("phi-4", "qwen3-14b")
    )
    async with opened(runs_dir, open_run=first) as ui:
        log = ui.find("LogView", LogView)
        await ui.until(lambda: log.lines and log.scroll_y == log.max_scroll_y)
        for opened_next, scrolled_up in ((second, False), (first, True)):
            if scrolled_up:
                log.focus()
                await ui.press("home")
                await ui.until(lambda: not log.following)
            ui.app.open_run(opened_next)
            await ui.state_shown(opened_next.name)
            await ui.until(lambda: log.lines and log.max_scroll_y > 0)
            await ui.until(lambda: log.following and log.scroll_y == log.max_scroll_y)


@pytest.mark.parametrize("size", SIZES)
async def test_the_search_bar_moves_no_panel(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    async with opened(runs_dir, size, open_run=run, shows="training") as ui:
        panels = ui.screen.query_one("#panels")
        before = [child.region.offset for child in panels.children], panels.max_scroll_y
        await ui.press("slash")
        await ui.pilot.pause()
        assert ([child.region.offset for child in panels.children], panels.max_scroll_y) == before
        await ui.press("escape")
        await ui.pilot.pause()
        assert panels.max_scroll_y == before[1]


async def test_long_log_lines_are_cut_unless_maximised(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=5)
    with run.log_path(1, "quad-gh200").open("a") as file:
        file.write(f"{'long ' * 40}end\n")
    async with opened(runs_dir, (80, 24), open_run=run) as ui:
        log = ui.find("LogView", LogView)
        await ui.until(lambda: re.search("long long .*…", ui.lines()[-2]))
        assert not log.show_horizontal_scrollbar
        log.focus()
        await ui.press("m")
        await ui.until(lambda: log.show_horizontal_scrollbar)
        log.scroll_to(x=log.max_scroll_x, animate=False)
        await ui.until(lambda: ui.lines()[-3].rstrip().endswith("long end"))
        await ui.press("m")
        await ui.until(lambda: not log.show_horizontal_scrollbar)
        await ui.until(lambda: re.match(" long long .*…", ui.lines()[-2]))
        assert log.following


def offered(ui: Driver) -> set[str]:
    """Return what the line of keys offers to do to the run."""
    return {key for key in ("r Resume", "s Stop", "c Save now") if key in ui.key_line}


@pytest.mark.parametrize("state", ["training", "failed"])
async def test_a_run_whose_folder_is_deleted_offers_nothing(runs_dir: Path, state: State) -> None:
    run = write_run(runs_dir, steps=30, seconds_of_samples=2, state=state)
    async with opened(runs_dir, (80, 24), open_run=run, shows=state) as ui:
        if state == "failed":
            text = " ".join(ui.text().split())
            assert "ran out of GPU memory" in text
            assert "11 GiB less" in text
            await ui.until(lambda: offered(ui) == {"r Resume"})
        shutil.rmtree(run.path)
        await ui.state_shown("✗ deleted")
        await ui.until(lambda: not offered(ui))
        text = ui.text()
        assert "its folder has been deleted" in text
        assert state not in text.split("its folder")[0]
        assert "so-tui resume" not in text


async def test_a_run_that_may_be_lost_is_checked_first(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(runs_dir, steps=10, seconds_of_samples=2, name="far")
    before = time.time() - 120
    os.utime(run.state_path, (before, before))
    async with opened(runs_dir, open_run=run, shows="checking") as ui:
        assert "training" not in ui.shown("#title")
        assert "now " not in ui.heading("#loss")
        assert "r Resume" not in ui.key_line
        await ui.press("4")
        await ui.until(lambda: "○ checking" in ui.text() and "● training" not in ui.text())
        change_state(run, heartbeat=2)
        await ui.until(lambda: "● training" in ui.text())
        await ui.press("3")
        await ui.state_shown("training")
        monkeypatch.setattr("so_tui.runs.liveness.STALE_S", 0.5)
        await ui.state_shown("lost")
        await ui.until(lambda: "r Resume" in ui.key_line)
        await ui.press("r")
        await ui.until(lambda: "Has far ended?" in ui.text())
