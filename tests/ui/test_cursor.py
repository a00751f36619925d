"""The linked cursor: step, NUMA nodes, GPUs and log show what was at the inspected step."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.runs import RunDirectory, SampleWriter
from so_tui.runs.records import ForeignProcess, GpuSample, NodeSample, Sample
from so_tui.ui.charts.series import Axis
from so_tui.ui.dashboard.follow import RunFollower
from so_tui.ui.dashboard.panels import LogView
from so_tui.ui.dashboard.screen import DashboardScreen
from tests.support.make_run import STEP_S, quad_machine, write_run
from tests.support.records import append_samples
from tests.support.screen import SIZES, opened

pytestmark = pytest.mark.usefixtures("_unhurried_reading")

NOW = 1_700_000_000.0


def at_second(run_end: float, second: float, load: int) -> Sample:
    node = NodeSample(
        id=0, cores=(load,) * 72, memory_used_bytes=load, memory_total_bytes=100, file_cache_bytes=0
    )
    foreign = (ForeignProcess(pid=1, name="backup", cores=1.0, cpu=3),) if load > 50 else ()
    return Sample(
        attempt=1,
        time=run_end + second,
        interval_s=1.0,
        nodes=(node,),
        gpus=(
            GpuSample(index=0, clock_mhz=1000 + load, throttling=("heat",) if load > 50 else ()),
        ),
        foreign=foreign,
    )


@pytest.fixture
def run(runs_dir: Path) -> RunDirectory:
    """A run of 100 steps whose host was busy during step 60 only."""
    machine = quad_machine(nodes=1)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=100, seconds_of_samples=0, now=NOW)
    writer = SampleWriter(run, machine.hostname)
    begin, end = -41 * STEP_S, -40 * STEP_S
    for tenth in range(-3100, 0, 10):
        second = tenth / 10
        writer.append(at_second(NOW, second, 80 if begin < second - 0.5 < end - 1 else 20))
    writer.close()
    return run


def test_nodes_and_gpus_show_the_mean_of_the_step_at_the_cursor(run: RunDirectory) -> None:
    follower = RunFollower(run)
    snapshot = follower.poll()
    assert snapshot.hosts.inspected is None
    assert snapshot.hosts.nodes[0].sample.cores[0] == 20
    at = Axis(
        "step", 1, 100, 0.0, snapshot.whole.steps, snapshot.whole.times, snapshot.length
    ).position(60.0)
    inspected = follower.poll(cursor=at)
    assert inspected.hosts.inspected is not None
    assert inspected.examined[0].step == 60
    assert inspected.hosts.nodes[0].sample.cores[0] > 40
    assert [process.name for process in inspected.hosts.nodes[0].foreign] == ["backup"]
    assert inspected.hosts.gpus[0].sample.throttling == ("heat",)
    assert not inspected.hosts.averaged
    after = follower.poll()
    assert after.hosts.nodes[0].sample.cores[0] == 20
    assert after.examined == after.recent


def test_a_cursor_before_all_samples_shows_the_newest_ones(run: RunDirectory) -> None:
    follower = RunFollower(run)
    follower.poll()
    snapshot = follower.poll(cursor=(1.0, NOW - 99 * STEP_S - 10_000))
    assert snapshot.examined[0].step == 1
    assert snapshot.hosts.nodes[0].sample.cores[0] == 20


def test_old_samples_are_found_in_coarser_rows(runs_dir: Path) -> None:
    machine = quad_machine(nodes=1, cores=72)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=100, seconds_of_samples=0, now=NOW)
    append_samples(
        run,
        machine.hostname,
        *(at_second(NOW, second, 80 if second < -200 else 20) for second in range(-310, 0)),
    )
    for path in run.samples_dir(machine.hostname).glob("raw-*"):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[-60:]))
    follower = RunFollower(run)
    follower.poll()
    assert follower.poll(cursor=(20.0, NOW - 80 * STEP_S)).hosts.nodes[0].sample.cores[0] > 50
    assert follower.poll(cursor=(95.0, NOW - 5 * STEP_S)).hosts.nodes[0].sample.cores[0] == 20


def test_a_position_is_a_step_and_a_time_on_either_axis(run: RunDirectory) -> None:
    snapshot = RunFollower(run).poll()
    by_step = Axis("step", 1, 100, 0.0, snapshot.whole.steps, snapshot.whole.times, snapshot.length)
    by_time = Axis("time", 0, NOW, 0.0, snapshot.whole.steps, snapshot.whole.times, snapshot.length)
    step, time = by_step.position(60.0)
    assert step == 60
    assert by_time.position(time) == (60.0, time)
    assert by_time.position(time + STEP_S / 2) == (60.0, time + STEP_S / 2)
    assert by_time.position(0.0) == (0.0, 0.0)
    assert Axis("time", 0, 1).position(0.5) == (0.0, 0.5)


@pytest.mark.parametrize("size", SIZES)
async def test_panels_follow_the_cursor_and_return(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=300)
    async with opened(runs_dir, size, open_run=run, shows="training") as ui:
        screen, log = ui.screen, ui.find("#log", LogView)
        assert isinstance(screen, DashboardScreen)
        await ui.until(
            lambda: screen.snapshot is not None and screen.snapshot.recent and len(log.lines) > 100
        )
        await ui.press("i", "shift+left", "shift+left")
        await ui.until(lambda: screen.view.cursor is not None and screen.view.cursor < 118)
        step = round(screen.view.cursor or 0)
        await ui.until(lambda: ui.shown("StepPanel").startswith(f"step {step} "))
        await ui.until(
            lambda: screen.snapshot is not None and screen.snapshot.hosts.inspected is not None
        )
        assert not log.following
        assert f"step {step}/" in "".join(log.render_line(y).text for y in range(log.size.height))
        await ui.press("escape")
        await ui.until(lambda: screen.snapshot and screen.snapshot.hosts.inspected is None)
        await ui.until(
            lambda: log.following and not ui.shown("StepPanel").startswith(f"step {step} ")
        )
