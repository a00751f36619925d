"""Compact moments and second states in plans: what they take, when they are offered, and when the
plan steps sub-groups before the gradient norm is known.
"""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from so_tui.machine import Machine
from so_tui.model.profile import profile_of
from so_tui.plan.fit import assess, target_of
from so_tui.plan.notes import CompactStatesFit, CompactStatesOption, MoreGpusFit, StepsEarly
from so_tui.plan.plan import Plan, StepTime
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import ALIKE, SURE
from so_tui.plan.step_time import choose
from so_tui.spec import with_values
from so_tui.spec.run_spec import StatesFormat
from tests.support import planning
from tests.support.machines import superchips, x86
from tests.support.planning import (
    BIG,
    QUAD,
    bytes_of,
    facts_of,
    only,
    planned,
    recommended,
    step_of,
)

FORMATS: tuple[StatesFormat, ...] = ("fp32", "bf16-moments", "int8-moments")
H100 = "NVIDIA H100 80GB HBM3"
SHORT = x86(H100, gpu_count=2, cores=32, memory_mib=256 * 1024)
"""A host whose memory suffices for the states of models with 15 to 20 billion parameters, and not
for many second ones.
"""
SHORTER = x86(H100, gpu_count=2, cores=32, memory_mib=224 * 1024, gpu_mib=81_559)
TWO_BIG = superchips(2, node_mib=490_037, name="NVIDIA GH200 480GB")


def test_moments_and_second_states_take_what_the_format_takes() -> None:
    """Without offload the format changes nothing."""
    given = {"offload__mode": "superoffload", "offload__speculation": "on"}
    on_gpu = []
    for states, moments in zip(FORMATS, (8, 4, 2 + 2 / 128), strict=True):
        plan = planned("qwen3-4b-random", BIG, offload__states=states, **given)
        numel = profile_of(plan.spec.model).layout(1, plan.spec.offload).cpu_numel
        assert bytes_of(plan, "moments") == int(moments * numel)
        assert bytes_of(plan, "second-states") == pytest.approx((6 + moments) * numel, rel=1e-6)
        changes = {"offload__mode": "gpu", "offload__states": states}
        on_gpu.append(planned("qwen3-4b-random", BIG, **changes).breakdown)
    assert on_gpu[0] == on_gpu[1] == on_gpu[2]


@pytest.mark.parametrize(
    ("model", "gpus", "machine", "verdicts"),
    [
        ("qwen3-14b", 1, superchips(1), ("does not fit", "does not fit", "fits")),
        ("phi-4", 1, superchips(1), ("does not fit", "does not fit", "fits")),
        ("seed-oss-36b", 1, BIG, ("does not fit", "fits", "fits")),
        ("llama-3.3-70b", 2, TWO_BIG, ("does not fit", "fits", "fits")),
        ("llama-3.3-70b", 4, QUAD, ("does not fit", "does not fit", "does not fit")),
    ],
)
def test_what_fits_on_grace_hopper_parts(
    model: str, gpus: int, machine: Machine, verdicts: tuple[str, ...]
) -> None:
    """The table in docs/offload.md. The most exact format that fits is offered."""
    plans = [
        recommended(model, machine, gpus=str(gpus), offload__states=states) for states in FORMATS
    ]
    assert tuple(plan.verdict for plan in plans) == verdicts
    offered = [fact.states for fact in facts_of(plans[0].remedies, CompactStatesFit)]
    fitting = [states for states, fits in zip(FORMATS, verdicts, strict=True) if fits == "fits"]
    assert offered == fitting[:1]


def test_compact_moments_are_offered_beside_more_gpus() -> None:
    plan = recommended("qwen3-14b", QUAD, offload__states="fp32")
    offered = only(plan.remedies, CompactStatesFit)
    assert (offered.states, only(plan.remedies, MoreGpusFit).gpus) == ("int8-moments", 2)
    assert 75e9 < offered.saved_bytes < 77e9
    assert 'offload.states = "int8-moments"' in offered.message
    for other in (
        recommended("llama-3.1-8b", QUAD),
        planned("qwen3-14b", QUAD, gpus="1", offload__mode="zerooffload"),
    ):
        assert not facts_of(other.remedies, CompactStatesFit)


@pytest.mark.parametrize(
    ("model", "seconds"), [("phi-4", (4.69, 3.61)), ("qwen3-14b", (4.72, 3.63))]
)
def test_most_exact_of_faster_formats_is_offered(model: str, seconds: tuple[float, float]) -> None:
    """The seconds in docs/offload.md."""
    plan = recommended(model, SHORTER)
    assert plan.spec.offload.states == "fp32"
    faster = only(plan.warnings, CompactStatesOption)
    assert faster.given_step_s == plan.step_s
    assert (round(faster.given_step_s, 2), round(faster.step_s, 2)) == seconds
    assert faster.given_step_s >= (1 + SURE) * faster.step_s
    assert faster.early_share > faster.given_early_share
    bf16, int8 = (
        make_plan(with_values(plan.spec, {"offload.states": states}), SHORTER)
        for states in FORMATS[1:]
    )
    assert (bf16.verdict, faster.states, faster.step_s) == ("fits", "bf16-moments", bf16.step_s)
    assert (int8.step_s or 0) < faster.step_s < (1 + ALIKE) * (int8.step_s or 0)
    assert not facts_of(bf16.warnings, CompactStatesOption)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen3-14b", {}),  # little of a step waits for the optimizer
        ("phi-4", {"train__gradient_clipping": "0"}),
        ("phi-4", {"offload__engine": "deepspeed"}),
        ("seed-oss-36b", {}),  # does not fit as it is: see the remedies
    ],
)
def test_states_are_not_offered_without_speed(model: str, changes: dict[str, str]) -> None:
    assert not facts_of(recommended(model, SHORT, **changes).warnings, CompactStatesOption)


MACHINE = x86("NVIDIA H200", cores=32, memory_mib=512 * 1024)
GIVEN = {"gpus": "1", "offload__mode": "superoffload", "offload__ratio": "0.9"}


@cache
def llama(**changes: str) -> Plan:
    return planning.planned("llama-3.1-8b", MACHINE, **GIVEN | changes)


def early(plan: Plan) -> StepsEarly:
    return only(plan.reasons, StepsEarly)


@pytest.mark.parametrize("accumulation", ["1", "4", "16"])
@pytest.mark.parametrize("fraction", ["0.1", "0.3", "0.9"])
def test_auto_is_never_slower_than_waiting_for_the_norm(fraction: str, accumulation: str) -> None:
    changes = {"train__gradient_accumulation": accumulation}
    changes["offload__cpu_adam_cores_fraction"] = fraction
    auto, off, on = (
        step_of(llama(offload__speculation=value, **changes)).total_s
        for value in ("auto", "off", "on")
    )
    assert auto <= min(off, on)


def test_second_states_that_gain_nothing_are_not_made() -> None:
    spec = llama().spec
    placement = assess(spec, target_of(spec, MACHINE)).placement
    same = StepTime(forward_s=1.0, backward_s=1.0, exposed_optimizer_s=1.0, data_s=0.0)
    assert choose(placement, lambda: 1 << 40, lambda _second: same) == (None, same, True)
    faster = replace(same, exposed_optimizer_s=0.9)
    second, *found = choose(placement, lambda: 1 << 40, lambda each: faster if each else same)
    assert (bool(second), *found) == (True, faster, False)


def test_fewer_second_states_are_faster_where_adam_is_long() -> None:
    """Sub-groups that backward cannot hide are stepped in place, at a higher rate."""
    short = {"data__sequence_length": "1024", "train__micro_batch": "1"}
    short["offload__cpu_adam_cores_fraction"] = "0.5"
    auto, everything = llama(**short), llama(offload__speculation="on", **short)
    assert step_of(auto).total_s < 0.98 * step_of(everything).total_s
    assert 0.1 < early(auto).share < 0.8
    given = str(auto.optional.second_states_bytes / 2**30)
    again = llama(offload__speculation="on", offload__speculation_gib=given, **short)
    assert early(again).share == early(auto).share


def test_a_budget_below_one_sub_group_is_told_from_a_full_host() -> None:
    plan = llama(offload__speculation="on", offload__speculation_gib="0.0001")
    assert early(plan).why_none == "budget"
