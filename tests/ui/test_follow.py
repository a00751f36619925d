"""From a run directory to snapshots: live, resumed, unreadable, past, and at the cursor."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.runs import RunDirectory, RunReader, read_spec, write_spec
from so_tui.runs.records import ForeignProcess, GpuSample, NodeSample, ResumedRecord, Sample
from so_tui.runs.results import mean_steps
from so_tui.runs.samples import SampleReader
from so_tui.spec import with_values
from so_tui.ui.charts.drawing import value_at
from so_tui.ui.charts.series import Axis, FollowedSteps, View, Wanted
from so_tui.ui.dashboard.follow import Overlays, RunFollower
from so_tui.ui.dashboard.panels import LogView
from so_tui.ui.dashboard.screen import DashboardScreen
from so_tui.ui.dashboard.view import axis_of
from so_tui.ui.snapshot import Snapshot
from tests.support.long_run import FIRST, SEGMENT_STEPS, WANTED, write_long_run
from tests.support.make_run import STEP_S, quad_machine, write_run
from tests.support.planning import some
from tests.support.records import append_records, append_samples, evaluation_record, step_record
from tests.support.screen import SIZES, opened, rows_of

NOW = 1_700_000_000.0
FEW_ROWS = partial(FollowedSteps, most_rows=2_000)
pytestmark = pytest.mark.usefixtures("_unhurried_reading")


def test_a_run_is_taken_whole_and_then_followed(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=300, seconds_of_samples=40, nan_steps=range(100, 110))
    follower = RunFollower(run)
    first = follower.poll(WANTED)
    assert (first.length, first.live, first.plan is not None) == (300, True, True)
    assert [node.sample.id for node in first.hosts.nodes] == [0, 1, 2, 3]
    assert first.hosts.nodes[1].cpus == tuple(range(72, 144))
    loss = first.whole.series["loss"]
    assert (loss.has_gap(0, 99), loss.has_gap(99, 109)) == (False, True)
    assert first.log_lines
    assert first.latest is not None

    append_records(run, replace(first.latest, step=301, time=first.latest.time + 3, loss=1.25))
    second = follower.poll(WANTED)
    assert (first.length, second.length) == (300, 301), "a snapshot stays as it was handed over"
    assert second.whole.series["loss"].value(300) == 1.25
    assert second.log_lines == ()
    assert [record.step for record in second.recent] == [*range(272, 302)]


def test_a_resume_takes_later_steps_and_evaluations_back(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=50, seconds_of_samples=5)
    follower = RunFollower(run)
    before = follower.poll(WANTED)
    assert before.evaluations is None
    append_records(run, evaluation_record(20, 2.5), evaluation_record(40, 2.0))
    line = some(follower.poll(WANTED).evaluations)
    assert list(line.steps or ()) == [20, 40]
    assert list(map(line.series.value, (0, 1))) == [2.5, 2.0]
    assert follower.poll(WANTED).evaluations is line
    append_records(
        run,
        ResumedRecord(attempt=2, time=time.time(), step=30),
        replace(some(before.latest), attempt=2, step=31, loss=9.0),
        attempt=2,
    )
    for snapshot in (follower.poll(WANTED), RunFollower(run).poll(WANTED)):
        assert snapshot.length == 31
        assert (snapshot.whole.steps[30], snapshot.whole.series["loss"].value(30)) == (31, 9.0)
        assert some(snapshot.evaluations).length == 1
        assert [record.step for record in snapshot.recent] == [*range(2, 32)]
        assert snapshot.recent[-1].loss == 9.0


def test_views_stay_inside_the_run_and_keep_the_newest_in_sight() -> None:
    extent = (1.0, 1000.0)
    tail = View().zoomed(0.5, extent)
    assert tail.tail
    assert tail.resolved((1.0, 2000.0)) == pytest.approx((1500.5, 2000.0))
    middle = View(cursor=500.0).zoomed(0.5, extent)
    assert not middle.tail
    low, high = middle.resolved(extent)
    assert low < 500 < high
    assert middle.zoomed(8, extent).window is None
    assert middle.panned(-99, extent).resolved(extent)[0] == 1.0
    assert View().ranged(50, 50.5, (0, 100)).window == (48.25, 52.25), "wide enough"
    assert View().ranged(90, 300, (0, 100)).tail


def test_the_cursor_stands_on_a_recorded_step() -> None:
    view = View().at(55.9, (1.0, 60.0))
    assert (view.cursor, view.pointed(-1, (1.0, 60.0), 100).cursor) == (56.0, 55.0)
    assert View("time").at(5.5, (0.0, 10.0)).cursor == 5.5
    assert View(cursor=1000.0).pointed(10, (1.0, 1000.0), 100).cursor == 1000.0
    narrow = View(window=(10.0, 20.0), cursor=20.0).pointed(5, (1.0, 1000.0), 10)
    assert narrow.window == (15.0, 25.0)


def test_a_mean_covers_a_share_of_the_run() -> None:
    shares = {0: 5, 60: 5, 249: 5, 250: 10, 625: 25, 1250: 50, 10**6: 50}
    assert {total: mean_steps(total) for total in shares} == shares
    assert (mean_steps(12_500, log_interval=10), mean_steps(8500, log_interval=7)) == (500, 200)


def test_a_run_that_is_laid_over_has_the_means_of_its_own_page(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=600, total=600)
    write_spec(run, with_values(read_spec(run), {"train.log_interval": "20"}))
    own = RunFollower(run).poll(WANTED).whole
    assert own.span == mean_steps(600, 20) == 100
    (laid,) = Overlays().read([run], WANTED, 0.0)
    assert laid.steps.span == own.span


def test_an_ended_run_shows_its_host_while_it_trained(runs_dir: Path) -> None:
    live = RunFollower(write_run(runs_dir, steps=60, seconds_of_samples=30))
    assert not live.poll(WANTED).hosts.averaged
    run = write_run(runs_dir, steps=60, seconds_of_samples=30, state="finished")
    busy = RunFollower(run).poll(WANTED).hosts
    assert busy.averaged
    last = RunReader(run).poll().samples["quad-gh200"][-1]
    idle = tuple(replace(gpu, busy_percent=0, memory_used_bytes=0) for gpu in last.gpus)
    after = (replace(last, time=last.time + second, gpus=idle) for second in range(2, 60))
    append_samples(run, "quad-gh200", *after)
    hosts = RunFollower(run).poll(WANTED).hosts
    assert hosts.gpus[0].sample.busy_percent == busy.gpus[0].sample.busy_percent


def test_a_zoomed_window_is_read_by_step(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.ui.dashboard.follow.FollowedSteps", FEW_ROWS)
    monkeypatch.setattr("so_tui.ui.dashboard.follow.CLOSE_STEPS", 4_000)
    run = long_run(runs_dir)
    follower = RunFollower(run)
    whole = follower.poll(WANTED)
    assert whole.length < 2_000
    assert whole.closer is None
    axis = some(axis_of(whole, View(window=(6000.0, 6100.0))))
    close = follower.poll(WANTED, axis.in_steps())
    line = close.line("loss", "raw", axis)
    steps = list(some(line.steps)[: line.length])
    assert [step for step in steps if 6000 <= step <= 6100] == list(range(6000, 6101))
    assert follower.poll(WANTED).line("loss", "raw", axis_of(whole, View())).length == whole.length

    # A window that reaches to the newest step follows it.
    tail = follower.poll(WANTED, (9_000.0, 12_000.0))
    append_records(run, replace(some(tail.latest), step=12_001, loss=1.25))
    newest = follower.poll(WANTED, (9_000.0, 12_000.0))
    axis = some(axis_of(newest, View(window=(9_001.0, 12_001.0), tail=True)))
    line = newest.line("loss", "raw", axis)
    assert line.series.value(line.length - 1) == 1.25
    assert line.steps is not newest.whole.steps


def long_run(runs_dir: Path) -> RunDirectory:
    """Write a run of 12,000 steps whose losses are the steps."""
    run = write_run(runs_dir, steps=0, seconds_of_samples=0)
    append_records(run, *(step_record(step, loss=float(step)) for step in range(1, 12_001)))
    return run


def test_the_cursor_stands_where_rows_end(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.ui.dashboard.follow.FollowedSteps", FEW_ROWS)
    snapshot = RunFollower(long_run(runs_dir)).poll(WANTED)
    axis = some(axis_of(snapshot, View()))
    for x in (1.0, 49.0, 2_345.0, 11_199.0, 12_000.0):
        at = snapshot.standing(x, "step")
        assert abs(at - x) < 50
        assert value_at(snapshot.line("loss", "raw", axis), axis, at) == at
        mean = value_at(snapshot.line("loss mean", "main", axis), axis, at)
        assert mean == pytest.approx(max((1 + at) / 2, at - 24.5))
        assert snapshot.standing(1e9 + x, "time") == 1e9 + at


def test_records_of_a_failed_poll_are_drawn(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(runs_dir, steps=50)
    follower = RunFollower(run)
    latest = some(follower.poll(WANTED).latest)
    append_records(run, replace(latest, step=51))

    def fail(_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(SampleReader, "poll", fail)
        blind = follower.poll(WANTED)
    assert blind.read_error
    assert blind.length >= 50, "what was known stays"
    append_records(run, replace(latest, step=52))
    snapshot = follower.poll(WANTED)
    assert not snapshot.read_error
    assert list(snapshot.whole.steps[: snapshot.length]) == [*range(1, 53)]
    assert [record.step for record in snapshot.recent] == [*range(23, 53)]


def test_the_load_of_a_long_run_begins_with_its_first_step(runs_dir: Path) -> None:
    machine = quad_machine(nodes=1)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=0, seconds_of_samples=0)
    shutil.rmtree(run.metrics_dir)
    write_long_run(run, 3 * SEGMENT_STEPS)
    began = 1e9 + FIRST
    # Two segments: the newest is followed, the other one is history.
    for seconds in (range(40), range(60, 65)):
        samples = (at_second(began - NOW + second, 20) for second in seconds)
        append_samples(run, machine.hostname, *samples)
    snapshot = RunFollower(run).poll(WANTED)
    assert snapshot.hosts.nodes[0].load[0].times[0] == began


@pytest.mark.parametrize("failing", [1, 3])
def test_unread_samples_are_shown_by_a_later_poll(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """No newer samples follow, as the run has ended."""
    run = write_run(runs_dir, steps=30, seconds_of_samples=60, state="finished")

    def shown(polls: int) -> object:
        follower = RunFollower(run)
        follower.poll(WANTED)
        for _ in range(polls):
            hosts = follower.poll(Wanted(("loss",), samples=("gpu.power_w",))).hosts
        nodes = [(node.host, node.sample.id, node.load[0].length) for node in hosts.nodes]
        return nodes, [line.length for line in hosts.sampled["gpu.power_w"]]

    expected = shown(1)
    read, calls = SampleReader.history, itertools.count(1)

    def history(*args: object) -> object:
        if next(calls) == failing:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(SampleReader, "history", history)
    assert shown(3) == expected


def at_second(second: float, load: int) -> Sample:
    memory: dict[str, Any] = {"memory_used_bytes": load, "memory_total_bytes": 100}
    memory["file_cache_bytes"] = 0
    nodes = (NodeSample(id=0, cores=(load,) * 72, **memory),)
    sample = Sample(attempt=1, time=NOW + second, interval_s=1.0, nodes=nodes)
    if load <= 50:
        return replace(sample, gpus=(GpuSample(index=0),))
    backup = ForeignProcess(pid=1, name="backup", cores=1.0, cpu=3)
    return replace(sample, gpus=(GpuSample(index=0, throttling=("heat",)),), foreign=(backup,))


def write_samples(runs_dir: Path, busy: range) -> RunDirectory:
    """Write a run of 100 steps, 310 seconds, whose host was busy for some seconds."""
    machine = quad_machine(nodes=1)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=100, seconds_of_samples=0, now=NOW)
    samples = (at_second(second, 80 if second in busy else 20) for second in range(-310, 0))
    append_samples(run, machine.hostname, *samples)
    return run


def test_nodes_and_gpus_show_the_mean_of_the_step_at_the_cursor(runs_dir: Path) -> None:
    begin = round(-41 * STEP_S)
    follower = RunFollower(write_samples(runs_dir, range(begin + 1, begin + 3)))  # in step 60
    snapshot = follower.poll(WANTED)
    assert (snapshot.hosts.inspected, core_load(snapshot)) == (None, 20)
    whole = snapshot.whole
    at = Axis("step", 1, 100, 0.0, whole.steps, whole.times, snapshot.length).position(60.0)
    snapshot = follower.poll(WANTED, cursor=at)
    assert snapshot.hosts.inspected is not None
    assert not snapshot.hosts.averaged
    assert snapshot.examined[0].step == 60
    assert core_load(snapshot) > 40
    assert [process.name for process in snapshot.hosts.nodes[0].foreign] == ["backup"]
    assert snapshot.hosts.gpus[0].sample.throttling == ("heat",)
    snapshot = follower.poll(WANTED)
    assert core_load(snapshot) == 20
    assert snapshot.examined == snapshot.recent
    # Before all samples there are none but the newest.
    snapshot = follower.poll(WANTED, cursor=(1.0, NOW - 99 * STEP_S - 10_000))
    assert (snapshot.examined[0].step, core_load(snapshot)) == (1, 20)


def core_load(snapshot: Snapshot) -> int:
    return snapshot.hosts.nodes[0].sample.cores[0]


def test_old_samples_are_found_in_coarser_rows(runs_dir: Path) -> None:
    run = write_samples(runs_dir, range(-310, -200))
    for path in run.samples_dir("quad-gh200").glob("raw-*"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[-60:]))
    follower = RunFollower(run)
    follower.poll(WANTED)
    assert core_load(follower.poll(WANTED, cursor=(20.0, NOW - 80 * STEP_S))) > 50
    assert core_load(follower.poll(WANTED, cursor=(95.0, NOW - 5 * STEP_S))) == 20


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
        await ui.until(lambda: ui.shown("#anatomy").startswith(f"step {step} ") and inspected())
        assert not log.following
        await ui.until(lambda: any(row.split()[1] == str(step) for row in rows_of(log)))
        await ui.press("escape")
        await ui.until(lambda: log.following and not inspected())
        assert not ui.shown("#anatomy").startswith(f"step {step} ")
