"""What came of a run, in the few figures by which runs are sorted and compared."""

from __future__ import annotations

import math
import time
from statistics import median

from msgspec import Struct

from so_tui.runs.directory import RunDirectory
from so_tui.runs.metrics import MetricsReader

RECENT = 20
"""Steps whose median a figure is: one slow step says nothing of a run."""
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
    steps = reader.recent(RECENT)
    evaluations = reader.evaluations
    gpu = [step.gpu_memory_peak_bytes for step in steps if step.gpu_memory_peak_bytes is not None]
    host = [step.host_memory_bytes for step in steps if step.host_memory_bytes is not None]
    return RunResults(
        loss=_median([step.loss for step in steps]),
        evaluation_loss=evaluations[-1].loss if evaluations and math.isfinite(evaluations[-1].loss) else None,
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
