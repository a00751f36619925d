"""Every record of a run is in what is drawn, in whatever portions it is read."""

from __future__ import annotations

import math
import random
import shutil
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from so_tui.runs import MetricsWriter, RunDirectory, create_run
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import ResumedRecord
from so_tui.runs.results import mean_steps
from so_tui.spec.run_spec import DataSpec, ModelSpec, RunSpec
from so_tui.ui.chart_metrics import EMAS
from so_tui.ui.charts.canvas import spans
from so_tui.ui.charts.series import METRICS, SMOOTHED, Axis, FollowedSteps, StepSeries
from tests.support.long_run import FIRST, loss_at, read_on, write_long_run
from tests.support.records import step_record

SPEC = RunSpec(name="tiny", model=ModelSpec(id="some/model"), data=DataSpec(source="rows.json"))
Losses = Mapping[int, float]


def mean_of(losses: Losses, step: int, span: int) -> float:
    """The definition of the mean, in plain words."""
    finite = [
        loss
        for at in range(step - span + 1, step + 1)
        if math.isfinite(loss := losses.get(at, math.nan))
    ]
    return math.fsum(finite) / len(finite) if finite else math.nan


def check_drawn(
    series: StepSeries, losses: Losses, columns: Iterable[int] = (1, 7, 80, 317)
) -> None:
    """Check that the raw line and the mean account for these losses, and for nothing else."""
    line = series.line("loss", "raw", len(series))
    steps = sorted(losses)
    assert series.begin[0] == steps[0]
    assert series.steps[line.length - 1] == steps[-1]
    assert series.series["loss"].missing(line.length) == sum(
        not math.isfinite(loss) for loss in losses.values()
    )
    axis = Axis("step", steps[0], max(steps[-1], steps[0] + 1))
    for number in columns:
        found, gaps = spans(line, axis, number)
        edges = axis.edges(number)
        inside: list[list[float]] = [[] for _ in found]
        row = 0
        for step in steps:
            while series.steps[row] < step:
                row += 1
            # Where the row of this step is drawn.
            column = min(number - 1, max(0, bisect_right(edges, series.steps[row]) - 1))
            assert series.steps[row] - step < 1 << series.halvings
            if math.isfinite(losses[step]):
                inside[column].append(losses[step])
            else:
                assert column in gaps
        for drawn, values in zip(found, inside, strict=True):
            assert drawn == ((min(values), max(values)) if values else None)
    shown = series.line("loss mean", "main", len(series))
    assert shown.steps is not None
    positions = list(shown.steps[: shown.length])
    assert positions == sorted(set(positions))
    every = max(1, len(positions) // 500)
    for index in (*range(0, len(positions), every), len(positions) - 1):
        expected = mean_of(losses, int(positions[index]), series.span)
        assert shown.series.value(index) == pytest.approx(expected, nan_ok=True, rel=1e-12)


def same(one: StepSeries, other: StepSeries) -> bool:
    return (
        one.steps == other.steps
        and one.times == other.times
        and one.begin == other.begin
        and all(
            [series.value(index) for index in range(len(series))]
            == pytest.approx(
                [again.value(index) for index in range(len(again))], rel=1e-12, nan_ok=True
            )
            for series, again in zip(one.series.values(), other.series.values(), strict=True)
        )
    )


def fresh(run: RunDirectory, span: int, ema: float | None = None) -> StepSeries:
    """What somebody sees who opens the run now."""
    reader = MetricsReader(run)
    steps = FollowedSteps(reader)
    steps.want(METRICS, SMOOTHED, ema)
    while read_on(reader, steps, span, 10.0):
        continue
    return steps.series


def runs(
    steps: list[int], segment_bytes: list[int], chunks: list[int]
) -> st.SearchStrategy[dict[str, object]]:
    """What a run is made of, and how it is read."""
    return st.fixed_dictionaries(
        {
            "steps": st.sampled_from(steps),
            "interval": st.sampled_from([1, 1, 3, 10]),
            "skipped": st.sets(st.integers(1, 10_000), max_size=30)
            | st.just({50, 100, 4000, 7950}),
            "nan": st.sets(st.integers(1, 10_000), max_size=30),
            "resumed": st.sampled_from([None, None, 0, 33, 650, 5000, 9400]),
            "segment_bytes": st.sampled_from(segment_bytes),
            "chunk": st.sampled_from(chunks),
            "look_s": st.sampled_from([0.0, 0.02, 0.06, 0.2]),
            "read_meanwhile": st.booleans(),
        }
    )


SMALL = runs([1, 10, 49, 50, 51, 200, 700], [5_000, 64_000], [1, 700, 1 << 18])
LARGE = runs([10_000], [700_000], [100_000, 1 << 18])
PHASES = (Phase.explicit, Phase.generate)
"""Without making a failing case smaller: it says little here, and takes minutes."""
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@given(SMALL)
@settings(
    max_examples=25, deadline=None, suppress_health_check=CHECKS, derandomize=True, phases=PHASES
)
def test_every_record_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, object]
) -> None:
    try_run(tmp_path, monkeypatch, made)


@pytest.mark.slow
@given(LARGE)
@settings(
    max_examples=3, deadline=None, suppress_health_check=CHECKS, derandomize=True, phases=PHASES
)
def test_every_record_of_ten_thousand_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, object]
) -> None:
    try_run(tmp_path, monkeypatch, made)


def try_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, object]) -> None:
    folder = tmp_path / "case"
    shutil.rmtree(folder, ignore_errors=True)
    run = create_run(SPEC, folder / "runs", "run")
    looks, look_s = count(), float(str(made["look_s"]))
    with monkeypatch.context() as patched:
        patched.setattr(
            "so_tui.runs.metrics.time",
            SimpleNamespace(sleep=time.sleep, monotonic=lambda: next(looks) * look_s),
        )
        patched.setattr("so_tui.runs.metrics._CHUNK_BYTES", made["chunk"])
        _try(run, **made)  # type: ignore[arg-type]


def _try(
    run: RunDirectory,
    *,
    steps: int,
    interval: int,
    skipped: set[int],
    nan: set[int],
    resumed: int | None,
    segment_bytes: int,
    read_meanwhile: bool,
    **_: object,
) -> None:
    span = mean_steps(steps, interval)
    reader = MetricsReader(run)
    followed = FollowedSteps(reader)
    losses: dict[int, float] = {}

    def write(attempt: int, first: int) -> None:
        writer = MetricsWriter(run, attempt, segment_bytes=segment_bytes)
        if attempt > 1:
            writer.append(ResumedRecord(attempt=attempt, time=1e9, step=first - 1))
        for step in range(first, steps + 1):
            if step in skipped or (step % interval and step not in (1, steps)):
                continue
            losses[step] = math.nan if step in nan else attempt + (step * 7919 % 4999) / 1000
            writer.append(step_record(step, attempt=attempt, loss=losses[step]))
            if read_meanwhile and step % 197 == 0:
                read_on(reader, followed, span)
        writer.close()

    write(1, 1)
    if resumed is not None and resumed < steps:
        for superseded in [step for step in losses if step > resumed]:
            del losses[superseded]
        write(2, resumed + 1)
    if not losses:
        return
    for _poll in range(100_000):
        if not read_on(reader, followed, span):
            break
    assert followed.unread_share == 0
    check_drawn(followed.series, losses)
    assert same(followed.series, fresh(run, span))


def test_a_long_run_is_drawn_whole(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.ui.charts.series.MOST_ROWS", 6_000)
    last = write_long_run(run, 25_000)
    reader = MetricsReader(run)
    steps = FollowedSteps(reader)
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


@pytest.mark.parametrize("ema", [EMAS[1], pytest.param(EMAS[-1], marks=pytest.mark.slow)])
def test_an_ema_is_exact_at_every_time(run: RunDirectory, tmp_path: Path, ema: float) -> None:
    """Also with steps without a number, and with a resume."""
    draw = random.Random(int(100 * ema))
    exact: dict[int, float] = {}
    total = share = 0.0
    writer = MetricsWriter(run, 1, segment_bytes=300_000)
    reader = MetricsReader(run)
    live = FollowedSteps(reader)
    live.want(METRICS, SMOOTHED, ema)
    for step in range(1, 12_101):
        loss = math.nan if step % 611 == 0 else draw.uniform(0.5, 2.5)
        if step == 3033:  # what comes after it in the first attempt does not count
            writer.append(step_record(step, loss=99.0))
            writer.append(step_record(step + 1, loss=99.0))
            writer.close()
            writer = MetricsWriter(run, 2, segment_bytes=300_000)
            writer.append(ResumedRecord(attempt=2, time=1e9, step=step - 1))
        writer.append(step_record(step, attempt=1 if step < 3033 else 2, loss=loss))
        if math.isfinite(loss):
            total, share = ema * total + (1 - ema) * loss, ema * share + (1 - ema)
        exact[step] = total / share
        if step in (300, 7999, 8000, 12_000, 12_100):
            while read_on(reader, live, 50):
                continue
            opened = fresh(run, 50, ema)
            assert same(live.series, opened), step
            for series in (live.series, opened):
                shown = series.line("loss mean", "main", len(series))
                assert shown.steps is not None
                assert shown.length > 250
                for row in range(shown.length):
                    assert shown.series.value(row) == pytest.approx(
                        exact[int(shown.steps[row])], rel=1e-9
                    ), shown.steps[row]
    writer.close()
