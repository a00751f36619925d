"""What a run and its hosts did at the cursor: the record of its step, and the samples that were taken during it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from so_tui.runs import RunReader
from so_tui.runs.records import StepRecord
from so_tui.runs.rollup import roll_up
from so_tui.runs.sample import Sample

Position = tuple[float, float]
"""Step and time of the cursor."""
_STEPS_BACK = 50
"""How far the last recorded step may lie before the cursor: a run may record only some of its steps."""
_REACHES_S = (1.5, 15.0, 90.0, 900.0)
"""How long after a step the sample may end that covers it; older samples are kept as means of 10 s, 1 min and 10 min."""
_SAME_S = 0.01
"""Within this of its end, the cursor stands on a step; elsewhere, on a moment."""
_EVERY_ROW = 1_000_000


@dataclass(frozen=True, slots=True)
class Inspected:
    """What is known of one position."""

    position: Position
    step: StepRecord | None
    samples: Mapping[str, Sample]
    """Means of each host during the step."""


class Inspector:
    """Reads one position of a run, once. For one thread."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._found: Inspected | None = None

    def read(self, position: Position | None) -> Inspected | None:
        """Return what is known of a position; None for no position. Raises OSError."""
        if position is None:
            self._found = None
        elif self._found is None or self._found.position != position or not self._found.samples:
            self._found = self._read(position)
        return self._found

    def _read(self, position: Position) -> Inspected:
        step, time = position
        last = deque(self._reader.metrics.steps(step - _STEPS_BACK, step), maxlen=1)
        record = last[0] if last else None
        begin = end = time
        if record is not None and abs(record.time - time) < _SAME_S:
            begin = record.time - record.step_s
        samples = {
            host: sample
            for host in self._reader.hosts
            if (sample := self._during(host, begin, end)) is not None
        }
        return Inspected(position, record, samples)

    def _during(self, host: str, begin: float, end: float) -> Sample | None:
        """Return the mean of the samples that overlap a time; None where there is none."""
        for reach_s in _REACHES_S:
            found = self._reader.sample_history(host, begin, end + reach_s, _EVERY_ROW)
            rows = [row for row in found if row.mean.time - row.mean.interval_s <= end]
            if rows:
                return roll_up(rows).mean
        return None
