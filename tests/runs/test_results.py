"""The figures by which runs are sorted and compared."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.records import EvaluationRecord, MetricRecord, ResumedRecord
from so_tui.runs.results import (
    RunResults,
    mean_steps,
    ordered,
    read_all,
    recent_results,
    results_of,
)
from so_tui.runs.segments import segments
from so_tui.spec import find_preset, with_values
from so_tui.ui.charts.series import StepSeries, Wanted, mean_of
from tests.support.records import step_record as step

SPEC = with_values(find_preset("tiny").spec, {"data.held_out": "0"})
EVALUATED = EvaluationRecord(attempt=1, time=1.0, step=0, loss=2.5, tokens=1)


def append(run: RunDirectory, *records: MetricRecord) -> None:
    writer = MetricsWriter(run, records[0].attempt, segment_bytes=40_000)
    for record in records:
        writer.append(record)
    writer.close()


def falling(attempt: int, steps: range) -> list[MetricRecord]:
    """Steps whose loss falls by 1 and whose MFU rises by 0.1 % with each."""
    return [
        step(number, attempt=attempt, loss=1000.0 * attempt - number, mfu=number / 1000)
        for number in steps
    ]


def test_recent_results_are_those_of_the_whole_run(run: RunDirectory) -> None:
    append(run, *falling(1, range(1, 500)))
    whole = results_of(read_all(run), SPEC, 1250)
    assert recent_results(run, SPEC, 1250) == whole
    assert (whole.mean_steps, whole.loss) == (50, 1000 - 474.5)
    assert whole.mfu == pytest.approx(0.4745)
    *earlier, newest = segments(run.metrics_dir).values()
    for path in earlier:
        path.unlink()
    assert earlier
    assert recent_results(run, SPEC, 1250) == whole, "only the newest segment is read"
    newest.write_bytes(b"x" * 200_000 + b"\n" + newest.read_bytes()[-60_000:])
    assert recent_results(run, SPEC, 1250) == whole, "only its end is read"


def test_the_loss_is_that_at_the_end_of_the_chart(run: RunDirectory) -> None:
    """Whatever the log interval."""
    losses = [math.nan if number == 39 else math.sin(number) for number in range(1, 41)]
    append(run, *(step(2 * number, loss=loss) for number, loss in enumerate(losses, 1)))
    series = StepSeries(mean_steps(80, 2), Wanted(("loss",), ("loss",)))
    series.add_window(read_all(run), 1, 80)
    found = recent_results(run, with_values(SPEC, {"train.log_interval": "2"}), 80)
    assert found.mean_steps == series.span == 10
    assert found.loss == pytest.approx(series.series[mean_of("loss")].value(len(series) - 1))


def test_throughput_is_that_of_the_steps_together(run: RunDirectory) -> None:
    times = [(9.0, 0.1), (1.0, 0.5), (1.0, 0.5), (1.0, 0.5), (1.0, None)]
    for number, (step_s, mfu) in enumerate(times, start=1):
        rate = 1300 / step_s
        timed = step(number, step_s=step_s, useful_tokens_per_s_total=rate, mfu=mfu)
        append(run, replace(timed, useful_tokens=1300))
    found = results_of(read_all(run), SPEC, 5)
    assert (found.tokens_per_s, found.step_s) == (500.0, 2.6)
    assert found.mfu == pytest.approx((0.9 + 1.5) / 12)


def test_results_take_steps_before_a_short_attempt(run: RunDirectory) -> None:
    append(run, *falling(1, range(1, 100)))
    append(run, ResumedRecord(attempt=2, time=1.0, step=89), *falling(2, range(90, 95)))
    found = recent_results(run, SPEC, 300)
    assert found == results_of(read_all(run), SPEC, 300)
    assert found.mean_steps == 10
    assert found.mfu == pytest.approx((94 - 4.5) / 1000)


def test_an_evaluation_is_found_where_the_run_evaluates(run: RunDirectory) -> None:
    """Also without steps, and far back."""
    assert recent_results(run, SPEC, 0) == RunResults()
    append(run, EVALUATED)
    assert results_of(read_all(run), SPEC, 0).evaluation_loss == 2.5
    assert recent_results(run, SPEC, 0).evaluation_loss == 2.5
    append(run, *map(step, range(1, 300)))
    evaluating = with_values(SPEC, {"data.held_out": "0.1"})
    assert recent_results(run, evaluating, 300).evaluation_loss == 2.5


def test_runs_are_ordered_by_results_the_best_first() -> None:
    """And those without last."""
    results = {
        "slow": RunResults(tokens_per_s=1.0, loss=1.0),
        "fast": RunResults(tokens_per_s=9.0, loss=2.0),
        "none": None,
    }
    steps = {"slow": 20, "fast": 10, "none": 0}
    runs = ["none", "slow", "fast"]
    known = (lambda run, _: run), steps.__getitem__
    assert ordered(runs, "tokens/s", *known, results.get) == ["fast", "slow", "none"]
    assert ordered(runs, "loss", *known, results.get) == ["slow", "fast", "none"]
    assert ordered(runs, "started", *known, results.get) == runs
    results.clear()  # what does not order by results does not read them
    assert ordered(runs, "name", *known, results.__getitem__) == ["fast", "none", "slow"]
    assert ordered(runs, "step", *known, results.__getitem__) == ["slow", "fast", "none"]
