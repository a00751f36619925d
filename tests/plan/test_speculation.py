"""When the plan steps sub-groups before the gradient norm is known, and why not."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from so_tui.plan.fit import assess, target_of
from so_tui.plan.notes import StepsEarly
from so_tui.plan.plan import Plan, StepTime
from so_tui.plan.planner import make_plan
from so_tui.plan.step_time import choose
from tests.support.machines import x86
from tests.support.planning import spec_of, step_of

MACHINE = x86("NVIDIA H200", gpu_count=1, cores=32, memory_mib=512 * 1024)


@cache
def planned(**changes: str) -> Plan:
    return make_plan(
        spec_of(
            "llama-3.1-8b", gpus="1", offload__mode="superoffload", offload__ratio="0.9", **changes
        ),
        MACHINE,
    )


def early(plan: Plan) -> StepsEarly:
    return next(fact for fact in plan.reasons if isinstance(fact, StepsEarly))


@pytest.mark.parametrize("accumulation", ["1", "4", "16"])
@pytest.mark.parametrize("fraction", ["0.1", "0.3", "0.9"])
def test_auto_is_never_slower_than_waiting_for_the_norm(fraction: str, accumulation: str) -> None:
    changes = {
        "offload__cpu_adam_cores_fraction": fraction,
        "train__gradient_accumulation": accumulation,
    }
    steps = [planned(offload__speculation=value, **changes).step for value in ("auto", "off", "on")]
    auto, off, on = (step.total_s if step else 0.0 for step in steps)
    assert auto <= min(off, on)


def test_second_states_that_gain_nothing_are_not_made() -> None:
    spec = planned().spec
    placement = assess(spec, target_of(spec, MACHINE)).placement
    same = StepTime(forward_s=1.0, backward_s=1.0, exposed_optimizer_s=1.0, data_s=0.0)
    found = choose(placement, lambda: 1 << 40, lambda _second: same)
    assert (found.second, found.step, found.gains_nothing) == (None, same, True)
    faster = replace(same, exposed_optimizer_s=0.9)
    found = choose(placement, lambda: 1 << 40, lambda second: faster if second else same)
    assert found.second is not None
    assert (found.step, found.gains_nothing) == (faster, False)


def test_fewer_second_states_are_faster_where_adam_is_long() -> None:
    """What backward cannot hide is stepped in place, at a higher rate."""
    short = {"data__sequence_length": "1024", "train__micro_batch": "1"}
    short["offload__cpu_adam_cores_fraction"] = "0.5"
    auto, everything = planned(**short), planned(offload__speculation="on", **short)
    assert step_of(auto).total_s < 0.98 * step_of(everything).total_s
    assert 0.1 < early(auto).share < 0.8
    given = str(auto.optional.second_states_bytes / 2**30)
    again = planned(offload__speculation="on", offload__speculation_gib=given, **short)
    assert early(again).share == early(auto).share


def test_a_budget_below_one_sub_group_is_told_from_a_full_host() -> None:
    assert (
        early(planned(offload__speculation="on", offload__speculation_gib="0.0001")).why_none
        == "budget"
    )
