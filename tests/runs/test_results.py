"""The figures by which runs are sorted and compared."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.comparison import ordered
from so_tui.runs.records import EvaluationRecord, ResumedRecord, StepRecord
from so_tui.runs.results import RECENT, RunResults, read_all, recent_results, results_of
from so_tui.runs.segments import segments

Step = Callable[..., StepRecord]


def write(run: RunDirectory, step: Step, attempt: int, steps: range) -> None:
    writer = MetricsWriter(run, attempt, segment_bytes=40_000)
    if attempt > 1:
        writer.append(ResumedRecord(attempt=attempt, time=1.0, step=steps[0] - 1))
    for number in steps:
        writer.append(replace(step(number, attempt=attempt, loss=1000.0 * attempt - number), mfu=number / 1000))
    writer.close()


def test_recent_results_are_those_of_the_whole_run(run: RunDirectory, step: Step) -> None:
    write(run, step, 1, range(1, 500))
    whole = results_of(read_all(run))
    assert recent_results(run) == whole
    assert (whole.loss, whole.mfu) == (1000 - 489.5, 0.4895)
    *earlier, newest = segments(run.metrics_dir).values()
    for path in earlier:
        path.unlink()
    assert earlier
    assert recent_results(run) == whole, "only the newest segment is read"
    newest.write_bytes(b"x" * 100_000 + b"\n" + newest.read_bytes()[-30_000:])
    assert recent_results(run) == whole, "only its end is read"


def test_recent_results_of_a_short_attempt_take_steps_before_it_that_still_count(run: RunDirectory, step: Step) -> None:
    write(run, step, 1, range(1, 100))
    write(run, step, 2, range(90, 95))
    found = recent_results(run)
    assert found == results_of(read_all(run))
    assert found.mfu == (94 - (RECENT - 1) / 2) / 1000


def test_a_run_without_steps_has_no_results_and_evaluations_need_the_whole_run(run: RunDirectory) -> None:
    assert recent_results(run) == RunResults()
    writer = MetricsWriter(run, 1)
    writer.append(EvaluationRecord(attempt=1, time=1.0, step=1, loss=2.5, tokens=1))
    writer.close()
    assert results_of(read_all(run)).evaluation_loss == 2.5


def test_runs_are_ordered_by_results_the_best_first_and_those_without_last() -> None:
    results = {"slow": RunResults(tokens_per_s=1.0, loss=1.0), "fast": RunResults(tokens_per_s=9.0, loss=2.0), "none": None}
    runs = ["none", "slow", "fast"]
    assert ordered(runs, "tokens/s", lambda run, _: run, results.get) == ["fast", "slow", "none"]
    assert ordered(runs, "loss", lambda run, _: run, results.get) == ["slow", "fast", "none"]
    assert ordered(runs, "name", lambda run, _: run, lambda _: (_ for _ in ()).throw(AssertionError)) == ["fast", "none", "slow"]
    assert ordered(runs, "started", lambda run, _: run, results.get) == runs
