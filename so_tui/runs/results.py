"""What came of a run, in the few figures by which runs are sorted and compared."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from so_tui.runs.blocks import total
from so_tui.runs.codec import decode_metric
from so_tui.runs.directory import RunDirectory
from so_tui.runs.index import size_of
from so_tui.runs.means import mean_steps_of
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import EvaluationRecord, MetricRecord, StepRecord
from so_tui.runs.segments import read_span, segments
from so_tui.spec.types import RunSpec

_END_BYTES = 1 << 17
"""More than the records of a mean and the events between them usually take."""
_READ_S = 20.0


class RunResults(Struct, frozen=True, kw_only=True):
    """Figures of a run's last steps, as many as a mean of its charts covers; None where nothing was measured."""

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
    return replace(found, evaluation_loss=_evaluation_loss(reader.evaluations))


def recent_results(run: RunDirectory, spec: RunSpec | None, total_steps: int) -> RunResults:
    """Return the same results, of which nothing but the end of the newest segment is read where that suffices. Raises OSError."""
    records = _records_at_end(run)
    steps = _increasing(records)
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    if steps and (evaluations or (spec is not None and not spec.data.evaluates)):
        last = steps[-1].step
        span = mean_steps_of(spec, total_steps, last)
        # Only a later attempt could supersede them.
        if steps[0].step <= max(1, last - span + 1):
            counted = [step for step in steps if step.step > last - span]
            return replace(_figures(counted, span), evaluation_loss=_evaluation_loss(evaluations))
    return results_of(read_all(run), spec, total_steps)


def _evaluation_loss(evaluations: Sequence[EvaluationRecord]) -> float | None:
    return evaluations[-1].loss if evaluations and math.isfinite(evaluations[-1].loss) else None


def _records_at_end(run: RunDirectory) -> list[MetricRecord]:
    """Return the records at the end of the newest segment. Raises OSError."""
    newest = max(segments(run.metrics_dir).values(), default=None)
    if newest is None:
        return []
    size = size_of(newest)
    start = max(0, size - _END_BYTES)
    lines = list(read_span(newest, start, size))
    # The first may lack its beginning.
    return [
        record
        for line in (lines[1:] if start else lines)
        if (record := decode_metric(line)) is not None
    ]


def _increasing(records: Sequence[MetricRecord]) -> list[StepRecord]:
    """Return the steps that come after the one before, as readers take them."""
    found: list[StepRecord] = []
    for record in records:
        if isinstance(record, StepRecord) and (not found or record.step > found[-1].step):
            found.append(record)
    return found


def _figures(steps: Sequence[StepRecord], span: int) -> RunResults:
    losses = [step.loss for step in steps if math.isfinite(step.loss)]
    timed = [step for step in steps if math.isfinite(step.step_s) and step.step_s > 0]
    time_s = total(step.step_s for step in timed)
    used = [step for step in timed if step.mfu is not None and math.isfinite(step.mfu)]
    return RunResults(
        mean_steps=span,
        loss=total(losses) / len(losses) if losses else None,
        tokens_per_s=sum(step.useful_tokens for step in timed) / time_s if timed else None,
        mfu=total((step.mfu or 0.0) * step.step_s for step in used)
        / total(step.step_s for step in used)
        if used
        else None,
        step_s=time_s / len(timed) if timed else None,
        gpu_memory_bytes=max(
            (
                step.gpu_memory_peak_bytes
                for step in steps
                if step.gpu_memory_peak_bytes is not None
            ),
            default=None,
        ),
        host_memory_bytes=max(
            (step.host_memory_bytes for step in steps if step.host_memory_bytes is not None),
            default=None,
        ),
    )


def read_all(run: RunDirectory) -> MetricsReader:
    """Return a reader that knows all records of a run, or what could be read in 20 s. Raises OSError."""
    reader = MetricsReader(run)
    deadline = time.monotonic() + _READ_S
    while reader.poll(limit_records=100_000, limit_s=1.0).more and time.monotonic() < deadline:
        continue
    return reader
