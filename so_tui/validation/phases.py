"""Where the time of a training part went, from the records and the state of its run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from so_tui.runs.records import MetricRecord, PhaseRecord, StepRecord
from so_tui.validation.report import PhaseSeconds

_STAGES = ("imports", "ranks", "data", "weights", "optimizer")


def phase_seconds(
    records: Sequence[MetricRecord], begun: float, started: float, ended: float, over: float
) -> PhaseSeconds:
    """Return the seconds of each phase of a run; 0 for one that it did not record. Times are in seconds since the epoch.

    Args:
        records: All records of the run.
        begun: When its planning began.
        started: When its supervisor took over.
        ended: When the last of its processes had ended.
        over: When nothing was left of it.
    """
    steps = [record.time for record in records if isinstance(record, StepRecord)]
    stages = _stages(
        [record for record in records if isinstance(record, PhaseRecord)],
        steps[0] if steps else ended,
    )
    first, last = (steps[0], steps[-1]) if steps else (ended, ended)
    return PhaseSeconds(
        preparation_s=max(0.0, started - begun),
        launcher_s=max(0.0, min([*(start for start, _ in stages.values()), first]) - started),
        **{f"{name}_s": _length(stages, name) for name in _STAGES},
        first_step_s=_length(stages, "training"),
        steps_s=last - first,
        end_s=max(0.0, ended - last),
        cleaning_s=max(0.0, over - ended),
    )


def _stages(phases: Sequence[PhaseRecord], first_step: float) -> dict[str, tuple[float, float]]:
    """Return begin and end of each stage before the first step."""
    begins: dict[str, float] = {}
    for record in phases:
        if (name := record.stage or record.phase) in (*_STAGES, "training"):
            begins.setdefault(name, record.time)
    ends = [*begins.values(), first_step][1:]
    return {name: (begin, end) for (name, begin), end in zip(begins.items(), ends, strict=True)}


def _length(stages: Mapping[str, tuple[float, float]], name: str) -> float:
    begin, end = stages.get(name, (0.0, 0.0))
    return max(0.0, end - begin)
