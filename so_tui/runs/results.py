"""What came of a run, in the few figures by which runs are sorted and compared."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from so_tui.runs.codec import decode_metric
from so_tui.runs.directory import RunDirectory
from so_tui.runs.index import size_of
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import StepRecord
from so_tui.runs.segments import read_span, segments

RECENT = 20
"""Steps whose median a figure is: one slow step says nothing of a run."""
_END_BYTES = 1 << 16
"""More than RECENT steps and the events between them usually take."""
_READ_S = 20.0


class RunResults(Struct, frozen=True, kw_only=True):
    """Figures of a run's last steps; None where nothing was measured."""

    loss: float | None = None
    """Median of the last steps."""
    evaluation_loss: float | None = None
    """Of the last evaluation."""
    tokens_per_s: float | None = None
    """Useful tokens per second on all ranks."""
    mfu: float | None = None
    step_s: float | None = None
    gpu_memory_bytes: int | None = None
    """Highest peak of the last steps."""
    host_memory_bytes: int | None = None


def results_of(reader: MetricsReader) -> RunResults:
    """Return the results by the records that are known. Raises OSError."""
    evaluations = reader.evaluations
    loss = evaluations[-1].loss if evaluations and math.isfinite(evaluations[-1].loss) else None
    return replace(_figures(reader.recent(RECENT)), evaluation_loss=loss)


def recent_results(run: RunDirectory) -> RunResults:
    """Return the results of a run but that of its evaluation, which may be far back. Raises OSError.

    The end of the newest segment suffices where it has enough steps: only a later attempt could supersede them.
    """
    steps = _steps_at_end(run)
    return _figures(steps if len(steps) == RECENT else read_all(run).recent(RECENT))


def _steps_at_end(run: RunDirectory) -> list[StepRecord]:
    """Return the last RECENT steps, or fewer, of the end of the newest segment. Raises OSError."""
    newest = max(segments(run.metrics_dir).values(), default=None)
    if newest is None:
        return []
    size = size_of(newest)
    start = max(0, size - _END_BYTES)
    lines = list(read_span(newest, start, size))
    found: list[StepRecord] = []
    for line in lines[1:] if start else lines:  # the first may lack its beginning
        record = decode_metric(line)
        if isinstance(record, StepRecord) and (not found or record.step > found[-1].step):
            found.append(record)
    return found[-RECENT:]


def _figures(steps: Sequence[StepRecord]) -> RunResults:
    gpu = [step.gpu_memory_peak_bytes for step in steps if step.gpu_memory_peak_bytes is not None]
    host = [step.host_memory_bytes for step in steps if step.host_memory_bytes is not None]
    return RunResults(
        loss=_median([step.loss for step in steps]),
        tokens_per_s=_median([step.useful_tokens_per_s_total for step in steps]),
        mfu=_median([step.mfu for step in steps if step.mfu is not None]),
        step_s=_median([step.step_s for step in steps]),
        gpu_memory_bytes=max(gpu, default=None),
        host_memory_bytes=max(host, default=None),
    )


def read_all(run: RunDirectory) -> MetricsReader:
    """Return a reader that knows all records of a run, or what could be read in 20 s. Raises OSError."""
    reader = MetricsReader(run)
    deadline = time.monotonic() + _READ_S
    while reader.poll(limit_records=100_000, limit_s=1.0).more and time.monotonic() < deadline:
        continue
    return reader


def _median(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None
