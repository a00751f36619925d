"""Every record of a run is in what is drawn, in whatever portions it is read."""

from __future__ import annotations

import math
import random
import shutil
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from so_tui.runs import MetricsWriter, RunDirectory, create_run
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import ResumedRecord, RunState
from so_tui.runs.results import mean_steps
from so_tui.spec.run_spec import DataSpec, ModelSpec, RunSpec
from so_tui.ui.chart_metrics import EMAS
from so_tui.ui.charts.drawing import spans
from so_tui.ui.charts.series import Axis, FollowedSteps, StepSeries, Wanted
from so_tui.ui.run_rows import CurveReader, RunRow
from tests.support.long_run import FIRST, WANTED, loss_at, read_on, write_long_run
from tests.support.records import step_record

SPEC = RunSpec(name="tiny", model=ModelSpec(id="some/model"), data=DataSpec(source="rows.json"))


def mean_of(losses: Mapping[int, float], step: int, span: int) -> float:
    """The definition of the mean, in plain words."""
    among = (losses.get(at, math.nan) for at in range(step - span + 1, step + 1))
    finite = [loss for loss in among if math.isfinite(loss)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def check_drawn(
    series: StepSeries, losses: Mapping[int, float], columns: Iterable[int] = (1, 7, 80, 317)
) -> None:
    """Check that the raw line and the mean account for these losses, and for nothing else."""
    line = series.line("loss", "raw", len(series))
    steps = sorted(losses)
    assert (series.begin[0], series.steps[line.length - 1]) == (steps[0], steps[-1])
    missing = sum(not math.isfinite(loss) for loss in losses.values())
    assert series.series["loss"].missing == missing
    rows = [bisect_left(series.steps, step) for step in steps]
    for row, step in zip(rows, steps, strict=True):
        assert series.steps[row] - step < 1 << series.halvings
    axis = Axis("step", steps[0], max(steps[-1], steps[0] + 1))
    for number in columns:
        found, gaps = spans(line, axis, number)
        edges = axis.edges(number)
        inside: list[list[float]] = [[] for _ in found]
        broken = set()
        for row, step in zip(rows, steps, strict=True):
            # Where the row of this step is drawn.
            column = min(number - 1, max(0, bisect_right(edges, series.steps[row]) - 1))
            if math.isfinite(losses[step]):
                inside[column].append(losses[step])
            else:
                broken.add(column)
        assert gaps == sorted(broken)
        assert found == [(min(values), max(values)) if values else None for values in inside]
    shown = series.line("loss mean", "main", len(series))
    assert shown.steps is not None
    positions = list(shown.steps[: shown.length])
    assert positions == sorted(set(positions))
    every = max(1, len(positions) // 500)
    for index in (*range(0, len(positions), every), len(positions) - 1):
        expected = mean_of(losses, int(positions[index]), series.span)
        assert shown.series.value(index) == pytest.approx(expected, nan_ok=True, rel=1e-12)


def check_as_opened_now(
    run: RunDirectory, shown: StepSeries, wanted: Wanted = WANTED
) -> StepSeries:
    """Check that opening the run now shows the same. Return what it shows."""
    followed = FollowedSteps(reader := MetricsReader(run))
    while read_on(reader, followed, shown.span, 10.0, wanted):
        continue
    again = followed.series
    assert (shown.steps, shown.times, shown.begin) == (again.steps, again.times, again.begin)
    for name, series in shown.series.items():
        rows = range(len(series))
        check_close(map(series.value, rows), map(again.series[name].value, rows), rel=1e-12)
    return again


def check_close(found: Iterable[float], expected: Iterable[float], rel: float) -> None:
    """Check values as ``pytest.approx`` does, which takes ten times as long."""
    for value, right in zip(found, expected, strict=True):
        assert math.isclose(value, right, rel_tol=rel) or (value != value and right != right)


@given(st.data())
@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.generate],  # making a failing case smaller says little here, and takes minutes
)
def test_every_record_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    draw = data.draw
    last = draw(st.sampled_from([1, 10, 49, 50, 51, 200, 700]))
    interval = draw(st.sampled_from([1, 1, 3, 10]))
    some_steps = st.sets(st.integers(1, 700), max_size=30)
    skipped = draw(some_steps | st.just({50, 100}))
    nan, resumed = draw(some_steps), draw(st.sampled_from([None, 0, 33, 650]))
    segment, read_meanwhile = draw(st.sampled_from([5_000, 64_000])), draw(st.booleans())
    looks, look_s = count(), draw(st.sampled_from([0.0, 0.02, 0.06, 0.2]))
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: next(looks) * look_s)
    monkeypatch.setattr("so_tui.runs.metrics.time", clock)
    chunk_bytes = draw(st.sampled_from([1, 700, 1 << 18]))
    monkeypatch.setattr("so_tui.runs.metrics._CHUNK_BYTES", chunk_bytes)
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    run = create_run(SPEC, tmp_path / "runs")
    span = mean_steps(last, interval)
    followed = FollowedSteps(reader := MetricsReader(run))
    losses: dict[int, float] = {}

    def write(attempt: int, first: int) -> None:
        writer = MetricsWriter(run, attempt, segment_bytes=segment)
        if attempt > 1:
            writer.append(ResumedRecord(attempt=attempt, time=1e9, step=first - 1))
        for step in range(first, last + 1):
            if step in skipped or (step % interval and step not in (1, last)):
                continue
            losses[step] = math.nan if step in nan else attempt + (step * 7919 % 4999) / 1000
            writer.append(step_record(step, attempt=attempt, loss=losses[step]))
            if read_meanwhile and step % 197 == 0:
                read_on(reader, followed, span)
        writer.close()

    write(1, 1)
    if resumed is not None and resumed < last:
        for superseded in [step for step in losses if step > resumed]:
            del losses[superseded]
        write(2, resumed + 1)
    if losses:
        while read_on(reader, followed, span):
            drawn = list(followed.series.steps)
            assert drawn == sorted(set(drawn))
        assert followed.unread_share == 0
        check_drawn(followed.series, losses)
        check_as_opened_now(run, followed.series)


def test_a_long_run_is_drawn_whole(run: RunDirectory) -> None:
    last = write_long_run(run, 25_000)
    steps = FollowedSteps(reader := MetricsReader(run), most_rows=6_000)
    while read_on(reader, steps, 50, limit_s=10.0):
        continue
    assert reader.latest is not None
    assert reader.latest.step == last
    assert steps.series.halvings == 4
    losses = {step: loss_at(step) for step in range(FIRST, last + 1)}
    check_drawn(steps.series, losses, columns=(1, 80, 317))
    writer = MetricsWriter(run, 1)
    for step in range(last + 1, last + 104):
        losses[step] = float(step % 7)
        writer.append(step_record(step, loss=losses[step], time=1e9 + step))
        if step % 3 == 0:
            read_on(reader, steps, 50)
    writer.close()
    read_on(reader, steps, 50)
    check_drawn(steps.series, losses, columns=(80,))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(SPEC, tmp_path / "runs")


def test_the_curve_of_a_watched_run_keeps_its_past(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("so_tui.ui.run_rows.ROWS", 20)
    row, curves = RunRow(run, SPEC, RunState(name=run.name, state="training")), CurveReader()
    writer = MetricsWriter(run, 1)
    for step in range(1, 101):
        writer.append(step_record(step))
        curve = curves.read(row)
    writer.close()
    assert curve is not None
    assert curve.line.steps is not None
    assert curve.line.steps[curve.line.length // 2] == 51


@pytest.mark.parametrize("ema", [EMAS[1], pytest.param(EMAS[-1], marks=pytest.mark.slow)])
def test_an_ema_is_exact_at_every_time(run: RunDirectory, ema: float) -> None:
    """Also with steps without a number, the first one too, and with a resume."""
    draw = random.Random(int(100 * ema))
    exact: dict[int, float] = {}
    total = share = 0.0
    writer = MetricsWriter(run, 1, segment_bytes=300_000)
    live = FollowedSteps(reader := MetricsReader(run))
    wanted = replace(WANTED, ema=ema)
    for step in range(1, 12_101):
        loss = math.nan if step % 611 in (0, 1) else draw.uniform(0.5, 2.5)
        if step == 3033:  # what comes after it in the first attempt does not count
            writer.append(step_record(step, loss=99.0))
            writer.append(step_record(step + 1, loss=99.0))
            writer.close()
            writer = MetricsWriter(run, 2, segment_bytes=300_000)
            writer.append(ResumedRecord(attempt=2, time=1e9, step=step - 1))
        writer.append(step_record(step, attempt=1 if step < 3033 else 2, loss=loss))
        if math.isfinite(loss):
            total, share = ema * total + (1 - ema) * loss, ema * share + (1 - ema)
        exact[step] = total / share if share else math.nan
        if step in (300, 7999, 8000, 12_000, 12_100):
            while read_on(reader, live, 50, wanted=wanted):
                continue
            for series in (live.series, check_as_opened_now(run, live.series, wanted)):
                shown = series.line("loss mean", "main", len(series))
                assert shown.length > 250
                steps = (shown.steps or ())[: shown.length]
                expected = (exact[int(step)] for step in steps)
                check_close(map(shown.series.value, range(shown.length)), expected, rel=1e-9)
    writer.close()
