"""How often to save a checkpoint."""

from __future__ import annotations

import math

import pytest

from so_tui.machine.types import Machine
from so_tui.plan.notes import CheckpointInterval
from so_tui.plan.reasons import GPU_HOURS_BETWEEN_FAILURES, _best_interval_s
from tests.support.planning import BIG, CPU_ONLY, QUAD, facts_of, only, planned

DAY = 86_400.0


def expected_s(interval_s: float, cost_s: float, failure_s: float) -> float:
    """Return the expected seconds for each second of work, without those of restarts (Daly 2006,
    equation 13).
    """
    return failure_s * (math.exp((interval_s + cost_s) / failure_s) - 1) / interval_s


@pytest.mark.parametrize(
    ("cost_s", "failure_s"), [(1, DAY), (60, DAY), (600, DAY), (600, 100 * DAY), (3600, DAY)]
)
def test_no_other_interval_costs_noticeably_less(cost_s: float, failure_s: float) -> None:
    best = expected_s(_best_interval_s(cost_s, failure_s), cost_s, failure_s)
    others = (expected_s(failure_s * 1.02**power, cost_s, failure_s) for power in range(-600, 100))
    assert best <= min(others) * 1.001
    assert _best_interval_s(3 * failure_s, failure_s) == failure_s, "once in a failure"


def interval_of(machine: Machine, **changes: str) -> CheckpointInterval:
    return only(planned("llama-3.1-8b", machine, **changes).reasons, CheckpointInterval)


def test_more_gpus_fail_more_often() -> None:
    one, eight = (
        interval_of(QUAD, gpus="4", nodes=nodes, checkpoint__background="false")
        for nodes in ("2", "16")
    )
    assert (one.gpus, eight.gpus) == (8, 64)
    assert one.failure_hours == pytest.approx(GPU_HOURS_BETWEEN_FAILURES / 8)
    assert eight.failure_hours == pytest.approx(one.failure_hours / 8)
    assert eight.minutes < one.minutes


def test_checkpoints_behind_training_are_saved_more_often() -> None:
    """Since they hold it up less."""
    behind, before = (
        interval_of(BIG, slurm__partition="gh", checkpoint__background=background)
        for background in ("true", "false")
    )
    assert behind.pause_s < 0.1 * before.pause_s
    assert behind.minutes < before.minutes


def test_the_settings_own_interval_is_compared() -> None:
    none, minutes, steps = (
        interval_of(BIG, slurm__partition="gh", **changes)
        for changes in ({}, {"checkpoint__every_minutes": "30"}, {"checkpoint__every_steps": "100"})
    )
    assert (none.given_minutes, minutes.given_minutes, bool(steps.given_minutes)) == (
        None,
        30,
        True,
    )
    told = ["checkpoint.every_minutes" in fact.message for fact in (none, steps)]
    assert told == [True, False]


@pytest.mark.parametrize(
    ("machine", "changes"), [(BIG, {}), (CPU_ONLY, {"slurm__partition": "gh"})]
)
def test_a_short_run_needs_no_advice(machine: Machine, changes: dict[str, str]) -> None:
    assert not facts_of(planned("tiny", machine, **changes).reasons, CheckpointInterval)
