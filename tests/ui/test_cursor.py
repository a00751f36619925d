"""The linked cursor: step, NUMA nodes, GPUs and log show what was at the inspected step."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from so_tui.runs import RunDirectory
from so_tui.runs.records import ForeignProcess, GpuSample, NodeSample, Sample
from so_tui.ui.charts.series import Axis
from so_tui.ui.dashboard.follow import RunFollower
from so_tui.ui.dashboard.panels import LogView
from so_tui.ui.dashboard.screen import DashboardScreen
from so_tui.ui.snapshot import Snapshot
from tests.support.make_run import STEP_S, quad_machine, write_run
from tests.support.records import append_samples
from tests.support.screen import SIZES, opened, rows_of

pytestmark = pytest.mark.usefixtures("_unhurried_reading")

NOW = 1_700_000_000.0


def at_second(second: float, load: int) -> Sample:
    node = NodeSample(
        id=0, cores=(load,) * 72, memory_used_bytes=load, memory_total_bytes=100, file_cache_bytes=0
    )
    busy = load > 50
    gpu = GpuSample(index=0, clock_mhz=1000 + load, throttling=("heat",) if busy else ())
    backup = ForeignProcess(pid=1, name="backup", cores=1.0, cpu=3)
    return Sample(
        attempt=1,
        time=NOW + second,
        interval_s=1.0,
        nodes=(node,),
        gpus=(gpu,),
        foreign=(backup,) if busy else (),
    )


@pytest.fixture
def run(runs_dir: Path) -> RunDirectory:
    """A run of 100 steps whose host was busy during step 60 only."""
    machine = quad_machine(nodes=1)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=100, seconds_of_samples=0, now=NOW)
    begin, end = -41 * STEP_S, -40 * STEP_S
    append_samples(
        run,
        machine.hostname,
        *(
            at_second(second, 80 if begin < second - 0.5 < end - 1 else 20)
            for second in range(-310, 0)
        ),
    )
    return run


def test_nodes_and_gpus_show_the_mean_of_the_step_at_the_cursor(run: RunDirectory) -> None:
    follower = RunFollower(run)
    snapshot = follower.poll()
    assert snapshot.hosts.inspected is None
    assert core_load(snapshot) == 20
    whole = snapshot.whole
    at = Axis("step", 1, 100, 0.0, whole.steps, whole.times, snapshot.length).position(60.0)
    snapshot = follower.poll(cursor=at)
    assert snapshot.hosts.inspected is not None
    assert not snapshot.hosts.averaged
    assert snapshot.examined[0].step == 60
    assert core_load(snapshot) > 40
    assert [process.name for process in snapshot.hosts.nodes[0].foreign] == ["backup"]
    assert snapshot.hosts.gpus[0].sample.throttling == ("heat",)
    snapshot = follower.poll()
    assert core_load(snapshot) == 20
    assert snapshot.examined == snapshot.recent
    # Before all samples there are none but the newest.
    snapshot = follower.poll(cursor=(1.0, NOW - 99 * STEP_S - 10_000))
    assert (snapshot.examined[0].step, core_load(snapshot)) == (1, 20)


def core_load(snapshot: Snapshot) -> int:
    return snapshot.hosts.nodes[0].sample.cores[0]


def test_old_samples_are_found_in_coarser_rows(runs_dir: Path) -> None:
    machine = quad_machine(nodes=1)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=100, seconds_of_samples=0, now=NOW)
    samples = (at_second(second, 80 if second < -200 else 20) for second in range(-310, 0))
    append_samples(run, machine.hostname, *samples)
    for path in run.samples_dir(machine.hostname).glob("raw-*"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[-60:]))
    follower = RunFollower(run)
    follower.poll()
    assert core_load(follower.poll(cursor=(20.0, NOW - 80 * STEP_S))) > 50
    assert core_load(follower.poll(cursor=(95.0, NOW - 5 * STEP_S))) == 20


def test_a_position_is_a_step_and_a_time_on_either_axis() -> None:
    steps, times = array("d", range(1, 101)), array("d", range(10, 1010, 10))
    by_step = Axis("step", 1, 100, 0.0, steps, times, 100)
    by_time = Axis("time", 0, NOW, 0.0, steps, times, 100)
    assert by_step.position(60.0) == (60.0, 600.0)
    for time, step in ((600.0, 60.0), (605.0, 60.0), (0.0, 0.0)):
        assert by_time.position(time) == (step, time)
    assert Axis("time", 0, 1).position(0.5) == (0.0, 0.5)


@pytest.mark.parametrize("size", SIZES)
async def test_panels_follow_the_cursor_and_return(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=300)
    async with opened(runs_dir, size, open_run=run, shows="training") as ui:
        screen, log = ui.screen, ui.find("#log", LogView)
        assert isinstance(screen, DashboardScreen)

        def inspected() -> bool:
            return screen.snapshot is not None and screen.snapshot.hosts.inspected is not None

        await ui.until(lambda: screen.snapshot and screen.snapshot.recent and len(log.lines) > 100)
        await ui.press("i", "shift+left", "shift+left")
        await ui.until(lambda: screen.view.cursor is not None and screen.view.cursor < 118)
        step = round(screen.view.cursor or 0)
        await ui.until(lambda: ui.shown("StepPanel").startswith(f"step {step} ") and inspected())
        assert not log.following
        assert f"step {step}/" in "".join(rows_of(log))
        await ui.press("escape")
        await ui.until(lambda: log.following and not inspected())
        assert not ui.shown("StepPanel").startswith(f"step {step} ")
