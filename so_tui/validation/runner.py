"""Runs measurements one after the other, as many as fit into the time, and writes the report after each."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from so_tui.spec.errors import SoTuiError, first_line
from so_tui.validation.report import Outcome, Report, Result

_LOG = logging.getLogger(__name__)
OVERRUN_S = 60.0
"""What a part may take beyond three times its estimate, or beyond the time of all parts, before it is given up."""
_LONG_S = 10.0
"""From what estimate on a part tells how fast this machine is."""


class Tell(Protocol):
    """Receives what is being measured, and the share of all measurements' estimated time that is over."""

    def __call__(self, text: str, share: float) -> None: ...


class Measure(Protocol):
    """Measures, telling in words what it does. Gives up after ``limit_s`` seconds, and ends what it started. May raise anything."""

    def __call__(self, tell: Callable[[str], None], limit_s: float, /) -> Result: ...


@dataclass(frozen=True)
class Measurement:
    """One part of a report."""

    key: str
    title: str
    estimate_s: float
    """About how long it takes."""
    measure: Measure

    @property
    def pending(self) -> Outcome:
        return Outcome(key=self.key, title=self.title, estimate_s=self.estimate_s)


def planned(report: Report, measurements: Sequence[Measurement]) -> Report:
    """Return the report with an outcome for each of the measurements; those of an earlier one are retained."""
    known = {outcome.key: outcome for outcome in report.outcomes}
    return replace(
        report,
        outcomes=tuple(
            known.get(measurement.key, measurement.pending) for measurement in measurements
        ),
    )


def run(
    report: Report,
    measurements: Sequence[Measurement],
    seconds: float,
    write: Callable[[Report], None],
    tell: Tell,
) -> Report:
    """Measure what the report lacks.

    Measurements are in the order of their importance. One that does not fit into what is left of the time, judged by how long those before
    it took, is left out, and a shorter one after it is tried. One that fails, or takes much longer than its estimate, says so in the
    report, and the next one follows. What failed is tried again by the next run.

    Args:
        report: What was measured before.
        measurements: What to measure.
        seconds: How long all of it may take.
        write: Saves the report; called after each measurement, and before the first.
        tell: Shows progress.

    Returns:
        The report as it was written last.

    Raises:
        KeyboardInterrupt: The user stopped; what was measured until then is written.
    """
    report = planned(report, measurements)
    write(report)
    deadline = time.monotonic() + seconds
    whole_s = sum(measurement.estimate_s for measurement in measurements) or 1.0
    over_s = 0.0
    for measurement, outcome in zip(measurements, report.outcomes, strict=True):
        if outcome.state != "measured":
            share = over_s / whole_s
            tell(measurement.title, share)
            outcome = _outcome(
                measurement,
                pace(report.outcomes),
                deadline,
                lambda text, share=share: tell(text, share),  # type: ignore[misc]
            )
            report = report.with_outcome(outcome)
            write(report)
        over_s += measurement.estimate_s
    tell("done", 1.0)
    return report


def pace(outcomes: Sequence[Outcome]) -> float:
    """Return how long measurements take here as a share of their estimates: the median of the long ones so far; 1 before there is any."""
    return statistics.median(
        [
            found.seconds / found.estimate_s
            for found in outcomes
            if found.seconds and found.state == "measured" and found.estimate_s >= _LONG_S
        ]
        or [1.0]
    )


def _outcome(
    measurement: Measurement, pace: float, deadline: float, tell: Callable[[str], None]
) -> Outcome:
    left_s, expected_s = deadline - time.monotonic(), pace * measurement.estimate_s
    if expected_s > left_s:
        reason = f"takes about {expected_s:,.0f} s, and {max(0.0, left_s):,.0f} s were left"
        return replace(measurement.pending, state="left-out", reason=reason)
    begun, limit_s = time.monotonic(), min(3 * measurement.estimate_s, left_s) + OVERRUN_S
    try:
        result = measurement.measure(tell, limit_s)
    except Exception as error:  # noqa: BLE001 - whatever stands in the way of one part is in the report, and the others go on
        _LOG.info("%s failed", measurement.key, exc_info=True)
        seconds = time.monotonic() - begun
        reason = (
            str(error)
            if isinstance(error, SoTuiError)
            else f"{type(error).__name__}: {first_line(error)}"
        )
        return replace(
            measurement.pending,
            state="timed-out" if seconds >= limit_s else "failed",
            reason=reason,
            seconds=seconds,
        )
    return replace(
        measurement.pending, state="measured", result=result, seconds=time.monotonic() - begun
    )
