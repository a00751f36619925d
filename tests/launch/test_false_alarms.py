"""Ordinary noise of real hardware is no slowdown, for hours; the same noise around slower steps is
one.

The noise is that of the steps which ``benchmarks/results`` has one by one: of our engine, of others
and without offload, on hosts with one to four H100 or H200. Steps alone decide whether a run counts
as slow; samples of its host only explain it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.false_alarms import slow_moments, with_step_time
from so_tui.launch.supervisor.slowness import SlowWatch
from so_tui.runs.records import Slowdown
from tests.launch.test_slow_causes import MACHINE, plan, sample
from tests.support.records import step_record

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = (
    "compare-h200",
    "whole-program-h200",
    "offload-h200",
    "offload-h200-x2",
    "offload-h200-x4",
    "offload-h100-x2",
)
LEAST_WARMUP = 2
HOUR_S = 3600.0
PLANNED_S = 3.0


def measured_runs() -> Iterator[list[float]]:
    """Yield the steps after the warm-up of each run, as multiples of their median, in their
    order.
    """
    for name in NAMES:
        found: Any = json.loads((RESULTS / f"{name}.json").read_text())
        for row in found if isinstance(found, list) else found["rows"]:
            steps = [step["step_s"] for step in row.get("steps", ()) if isinstance(step, dict)][
                max(LEAST_WARMUP, row.get("warmup", 0)) :
            ]
            if len(steps) > 2:
                yield [step_s / median(steps) for step_s in steps]


RUNS = list(measured_runs())


def said(usual_s: float, hours: int, seed: int) -> list[Slowdown]:
    """Return what a watch says while steps usually take so many seconds, with the noise of runs
    drawn at random, one after the other.
    """
    chance, watching, now, step = (
        random.Random(seed),
        SlowWatch(plan(PLANNED_S), MACHINE, attempt=1),
        0.0,
        0,
    )
    found: list[Slowdown] = []
    while now < hours * HOUR_S:
        for noise in chance.choice(RUNS):
            step, now = step + 1, now + usual_s * noise
            watching.take([step_record(step, time=1e9 + now, step_s=usual_s * noise)])
            watching.sample(sample(now))
            if watching.found is not None:
                found.append(watching.found)
    return found


@pytest.mark.parametrize("off", [0.9, 1.1])
def test_ten_hours_of_ordinary_noise_raise_no_alarm(off: float) -> None:
    assert said(off * PLANNED_S, hours=10, seed=19) == []


def test_steps_that_take_a_third_longer_do() -> None:
    assert said(1.33 * PLANNED_S, hours=1, seed=19)


def test_a_recorded_run_tells_again_when_it_was_slow() -> None:
    """``benchmarks/false_alarms.py`` reads runs that have no time of a step in their plan."""
    usual = [
        step_record(step, time=1e9 + step, step_s=1.0, forward_s=0.4, backward_s=0.4, data_s=0.0)
        for step in range(1, 301)
    ]
    slow = [
        replace(record, step=300 + record.step, time=record.time + 300, step_s=1.5)
        for record in usual
    ]
    records, samples = [*usual, *slow], [sample(float(second)) for second in range(1, 601)]
    known = with_step_time(replace(plan(PLANNED_S), step=None), records)
    assert known.step is not None
    assert known.step.total_s == pytest.approx(1.0)
    assert with_step_time(plan(PLANNED_S), records) == plan(PLANNED_S)
    assert list(slow_moments(known, MACHINE, 1, usual, samples)) == []
    (alarm,) = slow_moments(known, MACHINE, 1, records, samples)
    assert 1e9 + 300 + 90 <= alarm.time <= 1e9 + 300 + 120, (
        "most steps of both halves of two minutes must be slow"
    )
