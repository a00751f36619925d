"""Every record of a run is in what is drawn, however it is read: in any portions, with or without
indexes, now or again later.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from so_tui.runs import MetricsWriter, RunDirectory, create_run
from so_tui.runs.index import IndexCache, index_path, segments
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import ResumedRecord, StepRecord
from so_tui.runs.results import SINGLE_STEPS, mean_steps
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
    """Check that the raw line and the mean account for these losses, all of them and nothing
    else.
    """
    line = series.line("loss", "raw", series.lengths)
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
            column = min(
                number - 1, max(0, bisect_right(edges, series.steps[row]) - 1)
            )  # where the row of this step is drawn
            assert series.steps[row] - step < 50
            if math.isfinite(losses[step]):
                inside[column].append(losses[step])
            else:
                assert column in gaps
        for drawn, values in zip(found, inside, strict=True):
            assert drawn == ((min(values), max(values)) if values else None)
    shown = series.line("loss mean", "main", series.lengths)
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
        and one.mean_steps == other.mean_steps
        and one.times == other.times
        and one.begin == other.begin
        and all(
            repr([series.value(index) for index in range(len(series))])
            == repr([again.value(index) for index in range(len(again))])
            for series, again in zip(one.series.values(), other.series.values(), strict=True)
        )
    )


def fresh(run: RunDirectory, cache: Path, span: int, ema: float | None = None) -> StepSeries:
    """What somebody sees who opens the run now."""
    reader = MetricsReader(run, IndexCache(cache))
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
            "without_index": st.sampled_from(["none", "some", "all"]),
            "read_meanwhile": st.booleans(),
        }
    )


SMALL = runs([1, 10, 49, 50, 51, 200, 700], [5_000, 64_000], [1, 700, 1 << 18])
LARGE = runs([2 * SINGLE_STEPS - 1, 2 * SINGLE_STEPS, 10_000], [700_000], [100_000, 1 << 18])
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
            "so_tui.runs.metrics.time", SimpleNamespace(monotonic=lambda: next(looks) * look_s)
        )
        patched.setattr("so_tui.runs.metrics._CHUNK_BYTES", made["chunk"])
        _try(run, folder / "cache", **made)  # type: ignore[arg-type]


def _try(
    run: RunDirectory,
    cache: Path,
    *,
    steps: int,
    interval: int,
    skipped: set[int],
    nan: set[int],
    resumed: int | None,
    segment_bytes: int,
    without_index: str,
    read_meanwhile: bool,
    **_: object,
) -> None:
    span = mean_steps(steps, interval)
    reader = MetricsReader(run, IndexCache(cache))
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
    for number, path in segments(run.metrics_dir).items():
        if without_index == "all" or (without_index == "some" and number % 3 == 1):
            index_path(path).unlink(missing_ok=True)
    if not losses:
        return
    for _poll in range(100_000):
        if (
            not read_on(reader, followed, span) and not reader.unread_share
        ):  # an index may have disappeared
            break
    assert reader.unread_share == 0
    check_drawn(followed.series, losses)
    assert same(followed.series, fresh(run, cache, span))


@pytest.mark.slow
def test_every_record_of_a_million_is_drawn_and_opening_them_takes_less_than_a_second(
    run: RunDirectory, tmp_path: Path
) -> None:
    last = write_long_run(run, 1_000_000)
    opened_s = math.inf
    for _ in range(
        3
    ):  # other programs empty the processor's caches: the least of a few is what it takes
        begun = time.process_time()
        reader = MetricsReader(run, IndexCache(tmp_path / "cache"))
        steps = FollowedSteps(reader)
        while read_on(reader, steps, 50, limit_s=10.0):
            continue
        opened_s = min(opened_s, time.process_time() - begun)
        if opened_s < 1.0:
            break
    print(f"opened in {opened_s:.3f} s of process time")
    assert reader.latest is not None
    assert reader.latest.step == last
    assert opened_s < 1.0
    check_drawn(
        steps.series, {step: loss_at(step) for step in range(FIRST, last + 1)}, columns=(317,)
    )
    assert not (tmp_path / "cache").exists()  # all but the newest have an index
    draw = random.Random(0)
    for _ in range(4):
        assert same(steps.series, read_anyhow(run, tmp_path / "other", draw))


def read_anyhow(run: RunDirectory, cache: Path, draw: random.Random) -> StepSeries:
    """Read a long run in chunks of any size, by a clock of any speed, drawing now and then, with
    the index of a real segment gone.
    """
    reader, looks, look_s = (
        MetricsReader(run, IndexCache(cache)),
        count(),
        draw.choice([0.002, 0.004, 0.01, 0.03]),
    )
    steps = FollowedSteps(reader)
    index_path(segments(run.metrics_dir)[draw.choice([198, 199])]).unlink(missing_ok=True)
    polls, more = 0, True
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "so_tui.runs.metrics.time", SimpleNamespace(monotonic=lambda: next(looks) * look_s)
        )
        patched.setattr("so_tui.runs.metrics._CHUNK_BYTES", draw.randrange(700, 1 << 18))
        while more or reader.unread_share:
            progress = reader.poll(limit_records=draw.randrange(1, 5000), limit_s=0.1)
            steps.take(
                [record for record in progress.records if isinstance(record, StepRecord)],
                redraw=progress.redraw,
            )
            polls, more = polls + 1, progress.more
            if draw.random() < 0.1:
                steps.update(50)
    steps.update(50)
    assert polls > 3
    return steps.series


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(SPEC, tmp_path / "runs")


def test_a_run_looks_the_same_at_every_time_live_and_opened_again(
    run: RunDirectory, tmp_path: Path
) -> None:
    writer = MetricsWriter(run, 1, segment_bytes=300_000)
    reader = MetricsReader(run, IndexCache(tmp_path / "cache"))
    live = FollowedSteps(reader)
    for step in range(1, 12_101):
        writer.append(step_record(step, loss=float(step * 7919 % 4999)))
        if step in (10, 300, 3999, 4000, 7999, 8000, 8001, 11_990, 12_000, 12_049, 12_100):
            while read_on(reader, live, 50):
                continue
            assert same(live.series, fresh(run, tmp_path / "other", 50)), step
    writer.close()


@pytest.mark.parametrize("ema", [EMAS[1], pytest.param(EMAS[-1], marks=pytest.mark.slow)])
def test_an_ema_at_a_step_is_the_same_at_every_time_and_exact(
    run: RunDirectory, tmp_path: Path, ema: float
) -> None:
    """Also with steps without a number, with a resume inside a block, and with a segment without an
    index.
    """
    draw = random.Random(int(100 * ema))
    exact: dict[int, float] = {}
    total = share = 0.0
    writer = MetricsWriter(run, 1, segment_bytes=300_000)
    reader = MetricsReader(run, IndexCache(tmp_path / "cache"))
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
            while read_on(reader, live, 50) or reader.unread_share:
                continue
            index_path(min(segments(run.metrics_dir).values())).unlink(missing_ok=True)
            for series in (live.series, fresh(run, tmp_path / "other", 50, ema)):
                shown = series.line("loss mean", "main", series.lengths)
                assert shown.steps is not None
                assert shown.length > 250
                for row in range(shown.length):
                    assert shown.series.value(row) == pytest.approx(
                        exact[int(shown.steps[row])], rel=1e-9
                    ), shown.steps[row]
                assert series.approximate_until == 0
    writer.close()


def test_an_ema_of_another_weight_says_up_to_which_step_it_is_approximate(
    run: RunDirectory, tmp_path: Path
) -> None:
    writer = MetricsWriter(run, 1)
    for step in range(1, 12_101):
        writer.append(step_record(step, loss=float(step % 7)))
        if step == 7999:
            assert fresh(run, tmp_path, 50, 0.93).approximate_until == 0
    writer.close()
    assert fresh(run, tmp_path, 50, 0.93).approximate_until == 8000
    assert fresh(run, tmp_path, 50).approximate_until == 0, (
        "the mean of 50 steps is exact at the ends of blocks"
    )
    closer = StepSeries(50, ema=0.93)
    reader = MetricsReader(run, IndexCache(tmp_path))
    reader.poll(limit_records=20_000, limit_s=60.0)
    closer.add_single(reader, 6000, 7000)
    assert closer.approximate_until == 0
    assert len(closer) == 1001


def test_a_line_ends_where_records_are_still_to_be_read(
    run: RunDirectory, tmp_path: Path, step: Callable[..., StepRecord]
) -> None:
    writer = MetricsWriter(run, 1, segment_bytes=50_000)
    for number in range(1, 2001):
        writer.append(step(number, loss=float(number)))
    writer.close()
    for path in segments(run.metrics_dir).values():
        index_path(path).unlink()
    reader = MetricsReader(run, IndexCache(tmp_path / "cache"))
    steps, seen = FollowedSteps(reader), []
    while read_on(reader, steps, 50, limit_s=0.0):
        if steps.series.steps:
            assert reader.unread_share > 0
            shown = list(steps.series.steps)
            assert shown == [float(number) for number in range(int(shown[0]), 2001)][: len(shown)]
            seen.append(reader.unread_share)
    assert reader.unread_share == 0
    assert len(seen) > 5
    assert seen == sorted(seen, reverse=True)
    assert list(steps.series.steps) == [float(number) for number in range(1, 2001)]


@pytest.fixture
def step() -> Callable[..., StepRecord]:
    return step_record
