"""The Dashboard: a run that starts, is live, has ended, or is gone; in wide terminals too."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual.containers import Container
from textual.geometry import Offset
from textual.widgets import Input

from so_tui.commands.follow import _Printer
from so_tui.launch.launch import read_launch, write_launch
from so_tui.launch.supervisor.slowness import _cause_text
from so_tui.plan.plan import RankBinding
from so_tui.runs import RunDirectory, read_state, records, write_state
from so_tui.runs.results import AnsweredPrompt, Asked, add_answers
from so_tui.runs.state import request
from so_tui.settings_file import load_settings
from so_tui.ui.charts.chart import Chart
from so_tui.ui.configure.form import FormPanel
from so_tui.ui.dashboard.charts import ChartPanel
from so_tui.ui.dashboard.panels import LogPanel, LogView, PlacementPanel
from so_tui.ui.dashboard.view import side_columns
from so_tui.ui.lines import StyledLines
from so_tui.ui.numa_nodes import NumaNodes
from so_tui.ui.run_status import CHECKS, FIRST_STEP, LAUNCHER, _stages, timeline_lines
from so_tui.units import GIB
from tests.support.hostile import HOSTILE, unsafe
from tests.support.make_run import plan_for, quad_machine, sample, write_run
from tests.support.records import append_records, append_samples, change_state, evaluation_record
from tests.support.screen import SIZES, Driver, opened, rows_of


async def test_keys_move_the_axis_of_a_live_run(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=10)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        loss = ui.find("#loss", Chart)
        found = []
        for keys in ("", "x", "xz"):
            await ui.press(*keys)
            assert loss.axis is not None
            found.append((loss.axis.unit, loss.axis.high - loss.axis.low < 70))
        assert found == [("step", False), ("time", False), ("step", True)]
        await ui.press("0", "i")
        assert loss.cursor == 120
        await ui.press("left", "left")
        assert loss.cursor < 120
        assert "at step" in ui.text()
        await ui.press("escape")
        assert loss.cursor is None


async def test_without_a_run_only_keys_that_do_something_are_offered(runs_dir: Path) -> None:
    async with opened(runs_dir) as ui:
        await ui.press("3")
        await ui.until(lambda: "No run yet" in ui.text() and "Zoom" not in ui.key_line)
        assert "q Quit" in ui.key_line
        write_run(runs_dir, steps=5)
        ui.app.list_runs()
        await ui.until(lambda: "Zoom" in ui.key_line)


async def test_several_hosts_are_told_apart(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    shutil.copytree(run.samples_dir("quad-gh200"), run.samples_dir("second"))
    run.log_path(1, "second").write_text("trained elsewhere\n")
    async with opened(runs_dir, (120, 50), open_run=run) as ui:
        nodes = ui.find("#nodes", NumaNodes)
        await ui.until(lambda: len(nodes.pictures) == 8)
        assert {picture.host for picture in nodes.pictures} == {"quad-gh200", "second"}
        names = [line.partition("  ")[0] for line in rows_of(nodes)[:8]]
        assert len(set(names)) == 8, names
        assert sum(name.startswith("second · ") for name in names) == 4
        await ui.until(lambda: "second: trained elsewhere" in ui.text())


@pytest.mark.parametrize("size", SIZES)
async def test_every_value_of_the_loss_is_read_whole(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    append_records(run, evaluation_record(60, 2.5), evaluation_record(110, 2.25))
    async with opened(runs_dir, size, open_run=run) as ui:
        # What finds no room beside the others stands below the heading.
        for keys, evaluated in (((), "2.25"), (("i", *["left"] * 8), "2.50")):
            await ui.press(*keys)
            await ui.until(lambda: re.search(r"mean of 50( steps)? \d\.\d\d", ui.heading("#loss")))
            await ui.until(lambda: re.search(rf"eval(uation)? {evaluated}", ui.text()))  # noqa: B023 - called at once


async def test_maximised_panels_keep_run_and_keys(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    async with opened(runs_dir, (80, 24), open_run=run, shows="training") as ui:
        await ui.until(lambda: "● 1 run live" in ui.text())  # the runs are listed by a thread
        for number, panel in enumerate((Chart, Chart, NumaNodes, LogView)):
            await ui.press(*["tab"] * min(number, 1), "m")
            await ui.until(lambda: "m Back" in ui.key_line)
            assert isinstance(ui.screen.maximized, panel)
            for word in ("so-tui", "● 1 run live", "● training", "^p"):
                await ui.until(lambda word=word: word in ui.text())
            whole = ui.screen.maximized.region
            assert (whole.width, whole.bottom) == (78, 23)
            await ui.press("escape" if number % 2 else "m")
            await ui.until(lambda: "m Maximise" in ui.text())
        await ui.press("m")
        change_state(run, state="failed", reason="rank 2 was lost")
        await ui.state_shown("✗ failed")
        assert "rank 2 was lost" in ui.lines()[2]


async def test_time_left_is_shown_only_while_the_run_trains(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    async with opened(runs_dir, open_run=run) as ui:

        def headings() -> str:
            return f"{ui.shown('#title')}\n{ui.heading('#loss')}\n{ui.heading('#throughput')}"

        await ui.until(lambda: re.search(r"left .*\n.*now ", headings()))
        assert "last " not in headings()
        request(run, "stop")
        await ui.state_shown("asked to stop")
        assert "left " not in headings()
        for state in ("saving", "finished"):
            change_state(run, state=state)
            await ui.state_shown(state)
            assert "left " not in headings()
            assert re.search(r"loss.* last \d.*\nthroughput .*last \d", headings())


async def title_of(run: RunDirectory, size: tuple[int, int], words: str) -> str:
    """Return the run's line once it has ``words``."""
    async with opened(run.path.parent, size, open_run=run) as ui:
        await ui.until(lambda: words in ui.shown("#title"))
        return ui.shown("#title")


async def test_what_was_saved_and_when_it_is_next_are_shown(runs_dir: Path) -> None:
    """As much of it as there is room for."""
    saved = write_run(runs_dir, steps=420, name="saved")  # step 400, a minute ago
    assert "saved 400, 1 m ago, next in 27 m" in await title_of(saved, (160, 45), "saved")
    fresh = write_run(runs_dir, steps=20, name="fresh")
    wide = await title_of(fresh, (200, 50), "saves every 30 min (177 GB each, 1.0 % of the time)")
    assert "first in 28 m" in wide
    assert "saves in 28 m" in await title_of(fresh, (120, 36), "saves")
    request(fresh, "stop")
    assert "first" not in await title_of(fresh, (200, 50), "asked to stop")


async def test_a_run_that_loads_says_how_often_it_saves(runs_dir: Path) -> None:
    """When the first is due is not known yet, and it is not the end."""
    loads = write_run(runs_dir, steps=0, name="loads", state="loading")
    assert "at the end" not in await title_of(loads, (120, 36), "saves every 30 min")
    again = write_run(runs_dir, steps=420, name="again")
    began = records.PhaseRecord(attempt=1, time=time.time(), phase="loading")
    append_records(again, began)
    change_state(again, state="loading")
    assert "at the end" not in await title_of(again, (120, 36), "saved 400, 1 m ago")


async def test_what_is_saved_is_shown_on_a_narrow_terminal_too(runs_dir: Path) -> None:
    """In place of the bar, whose figures stand beside it."""
    run = write_run(runs_dir, steps=20, total=90, name="qwen3-1128-72d659")
    narrow = await title_of(run, (80, 24), "saves at the end")
    assert re.search(r"step 20 / 90 +left 3 m \d+ s +saves at the end", narrow)


async def test_the_next_checkpoint_is_counted_from_the_last_one_begun(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=420, name="written")
    begun = records.PhaseRecord(attempt=1, time=time.time() - 5, phase="saving")
    back = replace(begun, time=time.time() - 4, phase="training", detail="writing")
    append_records(run, begun, back)
    assert "next in 29 m" in await title_of(run, (160, 45), "next")


async def test_checkpoints_by_steps_are_due_by_the_steps_that_are_left(runs_dir: Path) -> None:
    def planned(name: str, every_steps: int) -> RunDirectory:
        run = write_run(runs_dir, steps=20, total=500, name=name)
        launch = read_launch(run, 1)
        changed = launch.spec.changed("checkpoint", every_steps=every_steps, every_minutes=0.0)
        write_launch(run, 1, replace(launch, plan=replace(launch.plan, spec=changed)))
        return run

    # Steps of 3.1 s.
    assert "saves in 4 m" in await title_of(planned("soon", 100), (120, 36), "saves")
    assert "saves at the end" in await title_of(planned("rare", 600), (120, 36), "saves")
    never = planned("never", 0)
    assert "nothing is saved before the end" in await title_of(never, (120, 36), "saved")


async def test_news_that_come_again_are_drawn(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=60, total=60)
    async with opened(runs_dir, open_run=run) as ui:
        change_state(run, state="saving", detail="checkpoint of step 60")
        await ui.until(lambda: "checkpoint of step 60" in ui.text())
        change_state(run, state="training", detail="")
        await ui.until(lambda: not ui.find("#news", StyledLines).display)
        saved = records.CheckpointRecord(
            attempt=1, time=1e9, step=60, path="/c", bytes=1, seconds=1.0
        )
        append_records(run, saved)
        change_state(run, state="finished", saved_step=60)
        await ui.until(lambda: "E exports the model" in ui.text())


async def test_the_end_of_a_run_is_known_everywhere_at_once(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("so_tui.ui.app.RUNS_POLL_S", 1e6)
    run = write_run(runs_dir, steps=60, total=60)
    async with opened(runs_dir, open_run=run, shows="training") as ui:
        ui.app.list_runs()
        await ui.until(lambda: "● 1 run live" in ui.text())
        ended = records.Alert(kind="ended", attempt=1, time=time.time(), step=60)
        change_state(run, state="finished", step=60, alerts=(ended,))
        await ui.state_shown("finished")
        await ui.until(lambda: "no live runs" in ui.text())
        assert ui.notes() == [], "it is on the screen"


async def test_the_question_to_stop_knows_the_newest_step(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=60, total=99)
    change_state(run, step=58)
    async with opened(runs_dir, open_run=run, shows="60 / 99") as ui:
        await ui.press("s")
        await ui.until(lambda: "at step 60 of 99" in ui.text())


async def test_e_exports_on_the_dashboard_what_it_exports_in_runs(
    runs_dir: Path, tmp_path: Path
) -> None:
    run = write_run(runs_dir, steps=400, total=400, state="finished", name="one")
    async with opened(runs_dir, open_run=run, shows="finished") as ui:
        await ui.until(lambda: ui.find("#loss", Chart).lines and "C Chat" in ui.key_line)
        offered = []
        for screen in ("3", "4"):
            await ui.press(screen)
            await ui.until(lambda: "C Chat" in ui.key_line)
            await ui.press("E")
            await ui.until(lambda: ui.dialog_title == "Export one to")
            offered.append(ui.find("Input", Input).value)
            assert all(word in ui.text() for word in ("from_pretrained", "one.parquet", ".svg"))
            await ui.answer(str(tmp_path / f"steps-{screen}.csv"))
            await ui.until(lambda: (tmp_path / f"steps-{screen}.csv").exists())  # noqa: B023 - called at once
        assert offered == ["one-model"] * 2
    assert (tmp_path / "steps-3.csv").read_bytes() == (tmp_path / "steps-4.csv").read_bytes()


async def test_the_log_is_followed_searched_and_followed_again(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=150, seconds_of_samples=5)
    async with opened(runs_dir, (80, 24), open_run=run) as ui:
        log = ui.find("LogView", LogView)
        await ui.until(lambda: log.lines and log.scroll_y == log.max_scroll_y)
        log.show_vertical_scrollbar = False
        log.vertical_scrollbar.position = 0
        log.show_vertical_scrollbar = True
        assert log.vertical_scrollbar.position == log.scroll_y
        await ui.press("slash")
        await ui.type_text("step 42/")
        await ui.press("enter")
        assert (len(log.matches), log.following) == (1, False)
        await ui.until(lambda: "1 line with “step 42/”" in ui.text())
        assert any("step 42/" in row for row in rows_of(log))
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
        assert "mean of 50" in ui.text()
        assert 1 <= rows_of(ui.find("#loss", Chart))[-1].count("✗") <= 3
        await ui.press("x")
        assert 1 <= rows_of(ui.find("#loss", Chart))[-1].count("✗") <= 3


@pytest.mark.parametrize(("state", "key"), [("training", "s Stop"), ("failed", "r Resume")])
async def test_a_run_whose_folder_is_deleted_offers_nothing(
    runs_dir: Path, state: records.State, key: str
) -> None:
    run = write_run(runs_dir, steps=30, state=state)
    async with opened(runs_dir, (80, 24), open_run=run, shows=state) as ui:
        await ui.until(lambda: key in ui.key_line)
        shutil.rmtree(run.path)
        await ui.state_shown("✗ deleted")
        await ui.until(lambda: key not in ui.key_line)
        assert "its folder has been deleted" in ui.text()
        assert "so-tui resume" not in ui.text()


async def test_a_run_that_may_be_lost_is_checked_first(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(runs_dir, steps=10, name="far")
    os.utime(run.state_path, (time.time() - 120,) * 2)
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


async def test_answers_are_gone_through_by_step(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5)

    def answer(step: int, text: str) -> None:
        said = AnsweredPrompt(prompt="What is a NUMA node?", text=text, tokens=4, stopped=True)
        add_answers(run, Asked(attempt=1, time=0.0, step=step, seconds=0.5, answers=(said,)))

    async with opened(runs_dir, (80, 24), open_run=run, shows="training") as ui:
        await ui.press("p")
        await ui.until(lambda: "prompts.every_steps=100" in ui.text())
        for step, text in ((0, "hehe"), (3, HOSTILE), (5, "Cores and the memory next to them.")):
            answer(step, text)
        await ui.until(lambda: "Cores and the memory next to them." in ui.text())
        assert "after step 5" in ui.text()
        await ui.press("left")
        await ui.until(lambda: "after step 3" in ui.text())
        assert unsafe(ui.text()) == set()
        await ui.press("home")
        await ui.until(lambda: "before training" in ui.text())
        assert "hehe" in ui.text()


def kept(name: str) -> int | None:
    value: int | None = getattr(load_settings().settings.panels, name)
    return value


async def pull(ui: Driver, selector: str, x: int, y: int) -> None:
    begin = ui.screen.query_one(selector).region.offset
    await ui.pilot.mouse_down(offset=begin)
    for part in (1, 2):
        await ui.pilot.hover(offset=begin + Offset(x * part // 2, y * part // 2))
    await ui.pilot.mouse_up(offset=begin + Offset(x, y))


async def test_panels_are_resized_by_keys_and_mouse_kept_and_reset(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=60, state="finished")
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
        await ui.resize(120, 36)
        body = ui.find("#preview", Container)
        await ui.until(lambda: body.region.y > ui.screen.query_one("#table").region.y)
        rows = body.size.height
        await pull(ui, "#preview-rule", 0, -2)
        await ui.until(lambda: kept("run") == rows + 2 == body.size.height)
        await ui.configure()
        await ui.press("escape")
        form = ui.find("FormPanel", FormPanel)
        columns = form.outer_size.width
        await ui.press("right_curly_bracket")
        await ui.until(lambda: kept("form") == columns + 4 == form.outer_size.width)
        await ui.press("vertical_line")
        await ui.until(lambda: kept("form") is None and form.outer_size.width == columns)
        assert kept("run") == rows + 2, "sizes of other screens stay"


def loading(at: float, detail: str = "", **more: object) -> records.PhaseRecord:
    values = {"attempt": 2, "time": at, "phase": "loading", "detail": detail} | more
    return records.PhaseRecord(**values)  # type: ignore[arg-type]


def shown(*phases: records.PhaseRecord, checks_s: float | None = None) -> list[tuple[str, float]]:
    """Return names and begins of the stages of attempt 2, which began at 100 s."""
    return [(stage.name, stage.since) for stage in _stages(phases, 2, 100.0, checks_s)]


def timeline(now: float, *phases: records.PhaseRecord, width: int = 80) -> list[str]:
    return timeline_lines(_stages(phases, 2, 100.0, None), now, width).plain.splitlines()


def test_stages_have_one_row_each_after_the_checks() -> None:
    stages = ((105, "ranks"), (106, "data"), (107, "data"), (110, "weights"))
    phases = [
        loading(50, "of the attempt before", attempt=1),
        loading(103, "starting the ranks"),
        *(loading(at, f"doing {stage}", stage=stage) for at, stage in stages),
        loading(113, "doing weights", stage="weights", done=3, total=8),
    ]
    assert shown(*phases, checks_s=7.5) == [
        (CHECKS, 92.5),
        (LAUNCHER, 100.0),
        ("starting the ranks", 103.0),
        ("ranks", 105.0),
        ("data", 106.0),
        ("weights 3 of 8", 110.0),
    ]
    lines = timeline(120.0, *phases)
    assert [line[0] for line in lines] == [*"✓✓✓✓", "▸"]
    assert ["doing" in line for line in lines] == [*[False] * 4, True], "only what runs says what"
    later = [loading(131, stage="checkpoint"), loading(140, phase="training")]
    assert [name for name, _ in shown(*phases, *later)[-2:]] == ["saved states", FIRST_STEP]
    assert "-" not in "".join(timeline(95.0, loading(90, "a clock that is behind")))


def test_the_lines_fit_and_their_bars_follow_each_other() -> None:
    for width in (40, 80, 160):
        lines = timeline(200.0, loading(110, "x" * 200), loading(130, "loading"), width=width)
        assert max(map(len, lines)) <= width
    starts = [line.index("━") for line in lines]
    assert starts == sorted(starts)
    assert lines[-1].startswith("▸ loading")
    assert "1 m 10 s" in lines[-1]
    many = [loading(100 + number, f"stage {number}") for number in range(40)]
    assert "stage 39" in timeline(200.0, *many)[-1]


# Steps in the log: as columns, from their records.


@pytest.mark.parametrize("width", [60, 80, 120, 220])
async def test_steps_of_the_log_stand_in_columns(runs_dir: Path, width: int) -> None:
    run = write_run(runs_dir, steps=1240)
    log = run.log_path(1, MACHINE.hostname)
    written = log.read_text().splitlines()
    more = "step 1,240/5,000  evaluation loss 1.5 over 40 documents, in 3 s"
    log.write_text("\n".join((*written, more)) + "\n")
    async with opened(runs_dir, (width, 36), open_run=run, shows="training") as ui:
        view = ui.find("#log", LogView)
        await ui.until(lambda: 1240 in view.steps and len(view.lines) > 100)
        *steps, last = [row.strip() for row in rows_of(view)]
        assert last.startswith("step 1,240/5,000  evaluation loss 1.5")
        names = ("step", "loss", "norm", "tok/s", "TFLOPS", "s")
        for number, row in enumerate(reversed(steps[-4:])):
            record = view.steps[1240 - number]
            expected = f"{1240 - number:,} {record.loss:.4f} {record.gradient_norm:.3g}"
            assert row.split()[1:4] == expected.split()
            assert "…" not in row
        title = ui.lines()[view.region.y - 1]
        shown = [name for name in names if f" {name} " in title]
        assert shown[:3] == ["step", "loss", "norm"]
        units = ("s",) if "s" in shown else ()
        assert len(steps[-1].split()) == 1 + len(shown) + len(units)
        # Text that is searched for is shown as it was written.
        view.needle = "step 1,240/5,000  loss"
        await ui.until(lambda: "step 1,240/5,000  loss" in "".join(rows_of(view)))


async def test_the_log_goes_to_steps_beyond_a_thousand(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=1240)
    async with opened(runs_dir, (120, 36), open_run=run, shows="training") as ui:
        panel = ui.find("LogPanel", LogPanel)
        await ui.until(lambda: len(panel.lines.lines) > 100)
        panel.show_step(1100)
        at = next(n for n, line in enumerate(panel.lines.lines) if "step 1,100/" in line)
        assert panel.lines._found == at


# Where ranks really are, and that a run is slower than its plan.

MACHINE = quad_machine()
PLAN = plan_for(MACHINE, "qwen3-14b", 4, 5000)


def placed(binding: RankBinding, **changes: object) -> records.RankPlacement:
    node = binding.numa_node or 0
    right = records.RankPlacement(
        rank=binding.rank, cpus=binding.main_cpus, adam_cpus=binding.adam_cpus
    )
    return replace(right, **({"node_bytes": {node: 80 * GIB}} | changes))


def write_placement(run: RunDirectory, *placement: records.RankPlacement) -> None:
    found = sample(random.Random(1), 1, time.time(), MACHINE, PLAN)
    append_samples(run, MACHINE.hostname, replace(found, placement=placement))


async def said(run: RunDirectory, size: tuple[int, int] = (120, 36)) -> list[str]:
    async with opened(run.path.parent, size, open_run=run, shows="training") as ui:
        panel = ui.find("PlacementPanel", PlacementPanel)
        await ui.until(lambda: panel.display and "✗" in str(panel.content))
        return str(panel.content).splitlines()


@pytest.fixture
def run(runs_dir: Path) -> RunDirectory:
    return write_run(runs_dir, steps=20, seconds_of_samples=5)


async def test_misplaced_ranks_are_named_first(run: RunDirectory) -> None:
    first, second, third, fourth = PLAN.binding
    write_placement(
        run,
        placed(first, nice=19),
        placed(second, cpus=(0, 1), adam_cpus=(0, 1)),
        placed(third, node_bytes={2: 20 * GIB, 3: 60 * GIB}),
        placed(fourth),
    )
    for size in ((80, 24), (200, 50)):
        first_line, second_line, *rest = await said(run, size)
        assert re.match("✗ rank 1 .*0-1.*72-143", first_line)
        assert re.match("✗ rank 2 .*25 %", second_line)
    assert "nice 19" in rest[0]


def write_report(run: RunDirectory, rank: int, host: str, problem: str = "") -> None:
    """Write what a rank reported after it was bound to cores 0 to 3."""
    found = {"found_cpus": (0,), "found_memory_policy": "default", "memory_policy": "default"}
    bound = {"cpus": (0, 1, 2, 3), "main_cpus": (0,), "adam_cpus": (1, 2, 3)}
    own = {"rank": rank, "host": host, "pid": 1, "gpu": 3, "corrected": False, "problem": problem}
    report = records.RankBindingReport(**(own | found | bound))  # type: ignore[arg-type]
    append_records(run, records.BindingRecord(attempt=1, time=time.time(), ranks=(report,)))


async def test_failed_and_foreign_bindings_are_shown(run: RunDirectory) -> None:
    write_report(run, 3, MACHINE.hostname, f"cannot run on cores 216-287 {HOSTILE}")
    lines = await said(run)
    assert lines[0].startswith("✗ rank 3"), "before the first sample of it"
    assert not unsafe(lines[0])
    write_report(run, 7, "another")
    foreign = records.RankPlacement(rank=7, cpus=(0,), adam_cpus=(1,))
    write_placement(run, *map(placed, PLAN.binding), foreign)
    lines = await said(run)
    assert re.match("✗ rank 7 · GPU 3.*0-3", lines[0])
    assert lines[1].startswith("✓ 4 ranks")


FOREIGN = records.Cause(code="foreign-load", seconds=1.0, measured=0.4, planned=0.0, nice=20)
CAUSES = (
    replace(FOREIGN, processes=("make", HOSTILE)),
    records.Cause(code="data", seconds=0.3, measured=0.5, planned=0.01),
)


async def test_a_full_disk_is_told_while_the_run_trains_and_after_it(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the step at which the charts end."""
    fine = read_state(run)
    full = replace(fine, disk_full=True)
    write_state(run, full)
    async with opened(run.path.parent, (120, 36), open_run=run) as ui:
        await ui.until(lambda: "disk is full: steps after 20" in ui.shown("#news"))
        change_state(run, state="failed", reason="no space is left")
        await ui.until(lambda: "no space is left" in ui.shown("#news"))
        assert "steps after 20" in ui.shown("#news")
    printer = _Printer()
    for state in (fine, full, full, fine):
        printer.compare(state)
    told = capsys.readouterr().out.splitlines()
    assert ["full" in line for line in told] == [True, False]


async def test_a_slow_run_says_why_on_the_screen_and_in_lines(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = read_state(run)
    slow = replace(
        fine, slowdown=records.Slowdown(step=20, step_s=4.6, planned_s=3.1, causes=CAUSES)
    )
    write_state(run, slow)
    async with opened(run.path.parent, (120, 36), open_run=run) as ui:
        await ui.until(lambda: "slower than planned" in ui.shown("#news"))
        news = ui.shown("#news").replace("\n", " ")
    assert _cause_text(CAUSES[0]).split(" (")[0] in news
    printer = _Printer()
    for state in (fine, slow, slow, replace(slow, state="saving"), fine):
        printer.compare(state)
    told = capsys.readouterr().out.splitlines()
    assert ["warning" in line for line in told] == [True, False]
    assert not unsafe("".join([news, *told]))
