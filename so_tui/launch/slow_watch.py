"""Notice that a run is slower than its plan for a while, and find out why. No file is read here.

A moment in which the host is busy is none of it: both halves of the last minutes must be slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from so_tui.launch.slow_causes import measured_of, planned_of, ranked_causes
from so_tui.machine.types import Machine
from so_tui.plan.types import Plan
from so_tui.runs.records import MetricRecord, PhaseRecord, StepRecord
from so_tui.runs.sample import Sample
from so_tui.runs.slowdown import Slowdown

SLOWER = 1.2
"""Steps that take longer than so many planned ones are slow."""
_STILL_SLOWER = 1.1
"""The same once a run counts as slow, so that it does not change back and forth."""
WINDOW_S = 120.0
LEAST_STEPS = 10
_CHECK_S = 10.0
_FIRST_STEPS = 3
"""Records of an attempt's first steps, which compile and allocate, are left out."""
_MOST_STEPS = 500
"""Of a window; fast steps are thinned out."""


class SlowWatch:
    """Compares one attempt with its plan; finds nothing if that does not know how long a step takes."""

    def __init__(
        self, plan: Plan, machine: Machine, attempt: int, *, window_s: float = WINDOW_S
    ) -> None:
        self._planned = planned_of(plan)
        self._machine = machine
        self._attempt = attempt
        self._window_s = window_s
        self._seen = self._redone = 0
        self._undisturbed = True
        self._steps: deque[StepRecord] = deque()
        self._samples: deque[Sample] = deque()
        self._due = 0.0
        self.found: Slowdown | None = None

    def take(self, records: Iterable[MetricRecord]) -> None:
        """Take new records.

        Steps beside which a checkpoint is written are not compared, nor those that were redone because the gradient norm exceeded the
        limit: plans do not count on either.
        """
        for record in records:
            if record.attempt != self._attempt or self._planned is None:
                continue
            if isinstance(record, PhaseRecord):
                self._undisturbed = record.phase == "training" and not record.detail
            elif isinstance(record, StepRecord):
                self._seen += 1
                redone, self._redone = record.redone_steps > self._redone, record.redone_steps
                apart = (
                    not self._steps
                    or record.time - self._steps[-1].time >= self._window_s / _MOST_STEPS
                )
                if self._undisturbed and not redone and self._seen > _FIRST_STEPS and apart:
                    self._steps.append(record)

    def sample(self, sample: Sample) -> None:
        """Take a new sample of the host, and compare where that is due."""
        if self._planned is None or not self._steps:
            return
        self._samples.append(sample)
        while (
            len(self._steps) > LEAST_STEPS and sample.time - self._steps[1].time >= self._window_s
        ):
            self._steps.popleft()
        while self._samples and self._samples[0].time < self._steps[0].time - self._steps[0].step_s:
            self._samples.popleft()
        if sample.time >= self._due:
            self._due = sample.time + _CHECK_S
            self.found = self._compare()

    def _compare(self) -> Slowdown | None:
        steps, planned = tuple(self._steps), self._planned
        if (
            planned is None
            or len(steps) < LEAST_STEPS
            or steps[-1].time - steps[0].time < (1 - 2 / _MOST_STEPS) * self._window_s
        ):
            return self.found
        bound_s = (SLOWER if self.found is None else _STILL_SLOWER) * planned.step.total_s
        if not all(
            _median_s(half) > bound_s
            for half in (steps[: len(steps) // 2], steps[len(steps) // 2 :])
        ):
            return None
        measured = measured_of(steps, tuple(self._samples), self._machine, planned.binding)
        causes = ranked_causes(measured, planned)
        return Slowdown(
            step=steps[-1].step,
            step_s=measured.step_s,
            planned_s=planned.step.total_s,
            causes=causes,
        )


def _median_s(steps: Sequence[StepRecord]) -> float:
    return statistics.median(step.step_s for step in steps)
