"""When the plan steps sub-groups before the gradient norm is known, and why not."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from so_tui.plan.fit import assess, target_of
from so_tui.plan.notes import StepsEarly
from so_tui.plan.plan import Plan, StepTime
from so_tui.plan.step_time import choose
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import only, step_of

MACHINE = x86("NVIDIA H200", cores=32, memory_mib=512 * 1024)
GIVEN = {"gpus": "1", "offload__mode": "superoffload", "offload__ratio": "0.9"}


@cache
def planned(**changes: str) -> Plan:
    return planning.planned("llama-3.1-8b", MACHINE, **GIVEN | changes)


def early(plan: Plan) -> StepsEarly:
    return only(plan.reasons, StepsEarly)


@pytest.mark.parametrize("accumulation", ["1", "4", "16"])
@pytest.mark.parametrize("fraction", ["0.1", "0.3", "0.9"])
def test_auto_is_never_slower_than_waiting_for_the_norm(fraction: str, accumulation: str) -> None:
    changes = {"train__gradient_accumulation": accumulation}
    changes["offload__cpu_adam_cores_fraction"] = fraction
    auto, off, on = (
        step_of(planned(offload__speculation=value, **changes)).total_s
        for value in ("auto", "off", "on")
    )
    assert auto <= min(off, on)


def test_second_states_that_gain_nothing_are_not_made() -> None:
    spec = planned().spec
    placement = assess(spec, target_of(spec, MACHINE)).placement
    same = StepTime(forward_s=1.0, backward_s=1.0, exposed_optimizer_s=1.0, data_s=0.0)
    found = choose(placement, lambda: 1 << 40, lambda _second: same)
    assert (found.second, found.step, found.gains_nothing) == (None, same, True)
    faster = replace(same, exposed_optimizer_s=0.9)
    found = choose(placement, lambda: 1 << 40, lambda second: faster if second else same)
    assert (bool(found.second), found.step, found.gains_nothing) == (True, faster, False)


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
    plan = planned(offload__speculation="on", offload__speculation_gib="0.0001")
    assert early(plan).why_none == "budget"
