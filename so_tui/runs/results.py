"""What came of a run, in the few figures by which runs are sorted and compared."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.runs.directory import RunDirectory, write_run_json
from so_tui.runs.metrics import MetricsReader, records_at_end
from so_tui.runs.records import EvaluationRecord, StepRecord
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.decoding import decode_json, prepare, readable_json
from so_tui.trust.files import read_bounded
from so_tui.units import duration, memory_size, plural, rate

# What the model answered to the prompts of the spec: ``answers.json``, replaced atomically by rank
# 0. Its size is bounded.


MOST_ASKED = 100
"""Times asked that are kept: the first, and the newest ones."""
LONGEST_ANSWER = 8_000
_LARGEST_BYTES = 32 << 20


class AnsweredPrompt(Struct, frozen=True, kw_only=True):
    """A prompt and its answer."""

    prompt: str
    text: str
    tokens: int
    """A stop token included."""
    stopped: bool
    """Whether the answer ended by itself."""


class Asked(Struct, frozen=True, kw_only=True):
    """The answers after a step."""

    attempt: int
    time: float
    step: int
    seconds: float
    answers: tuple[AnsweredPrompt, ...]


class Answers(Struct, frozen=True, kw_only=True):
    """Content of ``answers.json``."""

    v: int = 1
    asked: tuple[Asked, ...] = ()
    """In the order of steps."""


prepare(Answers)


def read_answers(run: RunDirectory) -> Answers:
    """Return the answers of a run; none if there is no such file, or it cannot be read."""
    return readable_json(run.answers_path, Answers, limit_bytes=_LARGEST_BYTES) or Answers()


def add_answers(run: RunDirectory, asked: Asked) -> None:
    """Add the answers after a step, in place of those of this and later steps, which a resumed run
    takes again.

    Raises:
        OSError: They cannot be written, or the earlier ones, which would be lost, cannot be read.
    """
    before = Answers()
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # none yet, or a damaged file
        before = decode_json(read_bounded(run.answers_path, _LARGEST_BYTES), Answers)
    earlier = tuple(each for each in before.asked if each.step < asked.step)
    kept = earlier if len(earlier) < MOST_ASKED else (earlier[0], *earlier[2 - MOST_ASKED :])
    write_run_json(run, run.answers_path, Answers(asked=(*kept, asked)))


# How many steps the means of a run cover: those of its charts, and those of its results.


MEAN_RECORDS = 50
"""Logged steps that a mean covers in all but short runs."""
_LONG_RUN = 8000
"""From so many steps on, means cover a multiple of MEAN_RECORDS steps."""


def mean_steps(total_steps: int, log_interval: int = 1) -> int:
    """Return how many steps a mean covers: 50 logged ones, in short runs about a twenty-fifth of
    the run.
    """
    logged = total_steps // log_interval
    steps = log_interval * next((span for span in (MEAN_RECORDS, 25, 10) if 25 * span <= logged), 5)
    return steps if total_steps < _LONG_RUN else math.ceil(steps / MEAN_RECORDS) * MEAN_RECORDS


def mean_steps_of(spec: RunSpec | None, total_steps: int, last_step: int) -> int:
    """Return how many steps the means of a run cover, which follows from the run, not from when it
    was opened.

    Args:
        spec: Its settings; None where they cannot be read.
        total_steps: Steps that it shall take; 0 where that is not known.
        last_step: The last that it took.
    """
    return mean_steps(
        max(total_steps, last_step), spec.train.log_interval if spec is not None else 1
    )


def mean_name(span: int, ema: float | None = None) -> str:
    """Return the name of a mean: ``mean of 50 steps``, or ``EMA 0.9`` where that weight was
    chosen.
    """
    return f"mean of {span} steps" if ema is None else f"EMA {ema:g}"


def total(values: Iterable[float]) -> float:
    """Return the exact sum of finite values, rounded once; infinity or NaN where it is too
    large.
    """
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


MOST_S = 40.0
"""How long a command may take to read all its runs."""


def reading_time(each_s: float) -> Callable[[], float]:
    """Return a function that says how long one command may take to read the metrics of its next
    run: ``each_s``, less at the end of its time, and then 0. A folder of runs may be anybody's.
    """
    end = time.monotonic() + MOST_S
    return lambda: min(each_s, max(0.0, end - time.monotonic()))


class RunResults(Struct, frozen=True, kw_only=True):
    """Figures of a run's last steps, as many as a mean of its charts covers; None where nothing was
    measured.
    """

    mean_steps: int | None = None
    """How many steps those are."""
    loss: float | None = None
    """Mean of the finite losses, as at the end of the chart."""
    evaluation_loss: float | None = None
    """Of the last evaluation."""
    tokens_per_s: float | None = None
    """Useful tokens on all ranks over the time of the steps."""
    mfu: float | None = None
    """Of the time of the steps."""
    step_s: float | None = None
    """Mean time of a step."""
    gpu_memory_bytes: int | None = None
    """Highest peak."""
    host_memory_bytes: int | None = None
    """The same of host memory."""
    whole: bool = True
    """Whether that is all that the run recorded, or what could be read of it in time."""


def results_of(reader: MetricsReader, spec: RunSpec | None, total_steps: int) -> RunResults:
    """Return the results by the records that are known.

    Args:
        reader: A reader that knows the run.
        spec: The run's settings; None where they cannot be read.
        total_steps: Steps that it shall take; 0 where that is not known.

    Raises:
        OSError: The run cannot be read.
    """
    found = RunResults()
    if reader.latest is not None:
        last = reader.latest.step
        span = mean_steps_of(spec, total_steps, last)
        found = _figures(list(reader.steps(last - span + 1, last)), span)
    evaluation_loss = _evaluation_loss(reader.events.evaluations)
    return replace(found, evaluation_loss=evaluation_loss, whole=reader.whole)


def recent_results(
    run: RunDirectory, spec: RunSpec | None, total_steps: int, limit_s: float = math.inf
) -> RunResults:
    """Return the same results, of which nothing but the end of the newest segment is read where
    that suffices, and otherwise what can be in ``limit_s``. Raises OSError.
    """
    records = records_at_end(run)
    steps: list[StepRecord] = []
    for record in records:  # readers skip a step that does not follow its predecessor
        if isinstance(record, StepRecord) and (not steps or record.step > steps[-1].step):
            steps.append(record)
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    if steps and (evaluations or (spec is not None and not spec.data.evaluates)):
        last = steps[-1].step
        span = mean_steps_of(spec, total_steps, last)
        # Only a later attempt could supersede them.
        if steps[0].step <= max(1, last - span + 1):
            counted = [step for step in steps if step.step > last - span]
            return replace(_figures(counted, span), evaluation_loss=_evaluation_loss(evaluations))
    return results_of(read_all(run, limit_s), spec, total_steps)


def _evaluation_loss(evaluations: Sequence[EvaluationRecord]) -> float | None:
    return evaluations[-1].loss if evaluations and math.isfinite(evaluations[-1].loss) else None


def _figures(steps: Sequence[StepRecord], span: int) -> RunResults:
    timed = [step for step in steps if math.isfinite(step.step_s) and step.step_s > 0]
    time_s = total(step.step_s for step in timed)
    return RunResults(
        mean_steps=span,
        loss=_mean((step.loss, 1.0) for step in steps),
        tokens_per_s=sum(step.useful_tokens for step in timed) / time_s if timed else None,
        mfu=_mean((step.mfu, step.step_s) for step in timed),
        step_s=time_s / len(timed) if timed else None,
        gpu_memory_bytes=_most(step.gpu_memory_peak_bytes for step in steps),
        host_memory_bytes=_most(step.host_memory_bytes for step in steps),
    )


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of the finite values; None if there are none."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    known = [(value, weight) for value, weight in known if math.isfinite(value)]
    if not known:
        return None
    return total(value * weight for value, weight in known) / total(weight for _, weight in known)


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def read_all(run: RunDirectory, limit_s: float = math.inf) -> MetricsReader:
    """Return a reader that knows all records of a run, or those that could be read in ``limit_s``.
    Raises OSError.
    """
    reader = MetricsReader(run)
    deadline = time.monotonic() + limit_s
    while reader.poll(limit_records=100_000, limit_s=min(0.5, limit_s)).more:
        if time.monotonic() >= deadline:
            break
    return reader


# Compare and order runs: pure functions of their settings and results.


Run = TypeVar("Run")

RESULTS = {
    "loss": "mean loss",
    "evaluation_loss": "evaluation loss",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "step_s": "step time",
    "gpu_memory_bytes": "GPU memory",
    "host_memory_bytes": "host memory",
    "mean_steps": "means of",
}
"""Names of results by field."""
_BY_RESULT = {
    "loss": ("loss", False),
    "evaluation": ("evaluation_loss", False),
    "tokens/s": ("tokens_per_s", True),
    "mfu": ("mfu", True),
    "memory": ("gpu_memory_bytes", False),
}
"""Result and whether the highest comes first, by the name of an order."""


def result_of_order(sort: str) -> str | None:
    """Return the result that an order goes by; None for the other orders."""
    return _BY_RESULT[sort][0] if sort in _BY_RESULT else None


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values are not the same in all settings, sorted."""
    keys = sorted({key for values in settings for key in values})
    return [key for key in keys if len({values.get(key) for values in settings}) > 1]


def result_text(results: RunResults, key: str) -> str:
    """Return a result as it is shown; empty if it was not measured."""
    value = getattr(results, key)
    if value is None:
        return ""
    match key:
        case "mean_steps":
            return f"last {plural(value, 'step')}"
        case "loss" | "evaluation_loss":
            return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"
        case "tokens_per_s":
            return rate(value)
        case "mfu":
            return f"{100 * value:.1f} %"
        case "step_s":
            return duration(value)
    return memory_size(value)


def ordered(
    runs: Iterable[Run],
    sort: str,
    text_of: Callable[[Run, str], str],
    step_of: Callable[[Run], int],
    results: Callable[[Run], RunResults | None],
) -> list[Run]:
    """Return runs, which come newest first, in another order.

    Args:
        runs: The runs, in any form.
        sort: ``started``, ``step``, a result (``loss``, ``evaluation``, ``tokens/s``, ``mfu``,
            ``memory``), or what ``text_of`` knows.
        text_of: Returns a run's name, model, state or host by that word.
        step_of: Returns the step that a run has reached; the run that has come furthest is the
            first.
        results: Returns a run's results, and is called only where ``sort`` is a result: the best
            comes first, runs without it last.
    """
    if sort == "started":
        return list(runs)
    if sort == "step":
        return sorted(runs, key=lambda run: -step_of(run))
    if sort not in _BY_RESULT:
        return sorted(runs, key=lambda run: text_of(run, sort))
    key, highest_first = _BY_RESULT[sort]

    def place(run: Run) -> float:
        found = results(run)
        value: float | None = None if found is None else getattr(found, key)
        return math.inf if value is None else -value if highest_first else value

    return sorted(runs, key=place)
