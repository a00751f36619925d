"""When the plan steps sub-groups before the gradient norm is known, and why not."""

from __future__ import annotations

from functools import cache

import pytest

from so_tui.plan import make_plan
from so_tui.plan.facts import StepsEarly
from so_tui.plan.types import Plan
from tests.support.machines import x86
from tests.support.planning import spec_of

MACHINE = x86("NVIDIA H200", gpu_count=1, cores=32, memory_mib=512 * 1024)


@cache
def planned(**changes: str) -> Plan:
    return make_plan(spec_of("llama-3.1-8b", gpus="1", offload__mode="superoffload", offload__ratio="0.9", **changes), MACHINE)


def early(plan: Plan) -> StepsEarly:
    return next(fact for fact in plan.reasons if isinstance(fact, StepsEarly))


@pytest.mark.parametrize("accumulation", ["1", "4", "16"])
@pytest.mark.parametrize("fraction", ["0.1", "0.3", "0.9"])
def test_auto_is_never_slower_than_waiting_for_the_norm(fraction: str, accumulation: str) -> None:
    changes = {"offload__cpu_adam_cores_fraction": fraction, "train__gradient_accumulation": accumulation}
    steps = [planned(offload__speculation=value, **changes).step for value in ("auto", "off", "on")]
    auto, off, on = (step.total_s if step else 0.0 for step in steps)
    assert auto == min(off, on)


def test_second_states_that_gain_nothing_are_not_made() -> None:
    few_cores = {"offload__cpu_adam_cores_fraction": "0.1", "train__gradient_accumulation": "4"}
    plan = planned(**few_cores)
    fact = early(plan)
    assert (fact.share, fact.bytes, fact.why_none) == (0.0, 0, "slower")
    assert plan.optional.second_states_bytes == plan.spec.offload.speculation_gib == 0
    assert plan.host_optional_bytes == 0
    assert early(planned(offload__speculation="on", **few_cores)).share == 1


def test_a_budget_below_one_sub_group_is_told_from_a_full_host() -> None:
    assert early(planned(offload__speculation="on", offload__speculation_gib="0.0001")).why_none == "budget"
