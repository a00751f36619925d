"""How often to save a checkpoint, and the memory that a plan gives to copies of states, from which
checkpoints are written while training goes on.
"""

from __future__ import annotations

import math

import pytest

from so_tui.machine.types import Machine
from so_tui.model.profile import profile_of
from so_tui.model.sharding import copied, copy_bytes
from so_tui.plan.notes import CheckpointInterval, SavesBehind
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.reasons import GPU_HOURS_BETWEEN_FAILURES, _best_interval_s
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import BIG, CPU_ONLY, QUAD, bytes_of, facts_of, only

UNCLIPPED = {"train__gradient_clipping": "0"}
"""So that no second states take the memory first."""


def host(memory_gib: int) -> Machine:
    return x86("NVIDIA H200", cores=32, memory_mib=memory_gib * 1024)


def planned(memory_gib: int, **changes: str) -> Plan:
    given = {"gpus": "1", "offload__mode": "superoffload", "offload__ratio": "0.9"}
    given |= {"checkpoint__every_steps": "100"}
    return planning.planned("llama-3.1-8b", host(memory_gib), **given | changes)


def behind(plan: Plan) -> SavesBehind:
    return only(plan.reasons, SavesBehind)


@pytest.mark.parametrize(
    ("states", "moments", "decoded"), [("fp32", 8.0, 0), ("int8-moments", 2 + 2 / 128, 8)]
)
def test_all_states_are_copied_where_there_is_room(
    states: str, moments: float, decoded: int
) -> None:
    """And memory is planned for moments that are decoded for the disk."""
    plan = planned(1024, offload__states=states)
    layout, size = (
        profile_of(plan.spec.model).layout(1, plan.spec.offload),
        bytes_of(plan, "copies"),
    )
    expected = (4 + moments) * layout.cpu_numel + 12 * layout.gpu_numel
    assert size == plan.optional.copies_bytes == pytest.approx(expected, rel=1e-9)
    assert behind(plan) == SavesBehind(share=1.0, bytes=size)
    assert plan.host_optional_bytes == bytes_of(plan, "second-states") + size
    whole = planned(1024, offload__states=states, offload__ratio="1")
    largest = max(group.numel for group in layout.sub_groups)
    assert bytes_of(whole, "saving") == decoded * largest


def test_second_states_come_first_and_hold_copies_too() -> None:
    plan = planned(250)
    assert plan.fits
    # States on the GPU have copies of their own; the others are in second states.
    assert behind(plan).share == 1.0
    assert 0 < behind(plan).bytes < behind(planned(1024)).bytes


def test_full_host_holds_fewer_copies_or_none() -> None:
    plans = [planned(gib, **UNCLIPPED) for gib in (150, 170, 200)]
    shares = [behind(plan).share for plan in plans]
    assert 0 <= shares[0] < shares[1] < shares[2] <= 1
    assert plans[1].verdict == "fits"
    given = planned(1024, checkpoint__copies_gib="10", **UNCLIPPED)
    assert 0 < bytes_of(given, "copies") <= 10 * 2**30


def test_a_later_attempt_gets_what_its_host_has_then() -> None:
    """What a plan gives to copies and second states is no limit of the run's: it may be resumed on
    a larger host.
    """
    before = planned(170)
    given = planned(170, offload__speculation_gib="3", checkpoint__copies_gib="2")
    assert before.optional.second_states_bytes > 0
    assert make_plan(before.spec, host(1024)).optional == planned(1024).optional
    limited = make_plan(given.spec, host(1024)).optional
    assert (limited.second_states_bytes, limited.copies_bytes <= 2 * 2**30) == (3 * 2**30, True)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint__every_steps": "0"},
        {"checkpoint__background": "false"},
        {"offload__engine": "deepspeed"},
        {"offload__mode": "zerooffload"},
    ],
)
def test_runs_that_write_nothing_behind_their_training_get_none(change: dict[str, str]) -> None:
    plan = planned(1024, **change)
    assert not facts_of(plan.reasons, SavesBehind)
    assert bytes_of(plan, "copies") == plan.optional.copies_bytes == 0


def test_engine_chooses_the_same_copies_from_its_budget() -> None:
    sizes = [copy_bytes("int8-moments") * numel for numel in (300, 1000, 50, 700, 20)]
    for budget in range(0, 22_000, 100):
        chosen = copied(sizes, (1, 3), budget)
        assert copied(sizes, (1, 3), sum(sizes[index] for index in chosen)) == chosen


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
    return only(planning.planned("llama-3.1-8b", machine, **changes).reasons, CheckpointInterval)


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


@pytest.mark.parametrize(
    ("machine", "changes"), [(BIG, {}), (CPU_ONLY, {"slurm__partition": "gh"})]
)
def test_a_short_run_needs_no_advice(machine: Machine, changes: dict[str, str]) -> None:
    assert not facts_of(planning.planned("tiny", machine, **changes).reasons, CheckpointInterval)
