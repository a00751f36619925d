"""Compact moments in plans: what they take, what fits with them, and when they are offered."""

from __future__ import annotations

import pytest

from so_tui.machine import Machine
from so_tui.model.profile import profile_of
from so_tui.plan.notes import CompactStatesFit, FasterStates, MoreGpusFit
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.rates import ALIKE, SURE
from so_tui.spec import with_values
from so_tui.spec.run_spec import StatesFormat
from tests.support.machines import superchips, x86
from tests.support.planning import BIG, QUAD, facts_of, only, spec_of

FORMATS: tuple[StatesFormat, ...] = ("fp32", "bf16-moments", "int8-moments")
SHORT = x86("NVIDIA H100 80GB HBM3", gpu_count=2, cores=32, memory_mib=256 * 1024)
"""A host whose memory suffices for the states of models with 15 to 20 billion parameters, and not
for many second ones.
"""
SHORTER = x86("NVIDIA H100 80GB HBM3", gpu_count=2, cores=32, memory_mib=224 * 1024, gpu_mib=81_559)
TWO_BIG = superchips(2, node_mib=490_037, name="NVIDIA GH200 480GB")


def test_moments_and_second_states_take_what_the_format_takes() -> None:
    given = {"offload__mode": "superoffload", "offload__speculation": "on"}
    spec = spec_of("qwen3-4b-random", **given)
    numel = profile_of(spec.model).layout(1, spec.offload).cpu_numel
    for states, moments in zip(FORMATS, (8, 4, 2 + 2 / 128), strict=True):
        plan = make_plan(with_values(spec, {"offload.states": states}), BIG)
        found = {term.kind: term.bytes for term in plan.breakdown if term.location == "node"}
        assert found["moments"] == int(moments * numel)
        assert found["second-states"] == pytest.approx((6 + moments) * numel, rel=1e-6)


def test_without_offload_the_format_changes_nothing() -> None:
    plans = [
        make_plan(spec_of("qwen3-4b-random", offload__mode="gpu", offload__states=states), BIG)
        for states in FORMATS
    ]
    assert plans[0].breakdown == plans[1].breakdown == plans[2].breakdown


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
    """The table in docs/offload.md."""
    found = [
        recommend(spec_of(model, gpus=str(gpus), offload__states=states), machine, gpus)
        for states in FORMATS
    ]
    assert tuple(plan.verdict for plan in found) == verdicts


def test_most_exact_format_that_fits_is_offered() -> None:
    plan = recommend(spec_of("seed-oss-36b", gpus="1"), BIG, 1)
    assert plan.verdict == "does not fit"
    offered = only(plan.remedies, CompactStatesFit)
    assert offered.states == "bf16-moments"
    assert 120e9 < offered.saved_bytes < 160e9
    assert 'offload.states = "bf16-moments"' in offered.message


def test_it_is_offered_beside_more_gpus() -> None:
    """And not where the run fits or could not."""
    plan = recommend(spec_of("qwen3-14b", gpus="1"), QUAD, 1)
    assert only(plan.remedies, CompactStatesFit).states == "int8-moments"
    assert only(plan.remedies, MoreGpusFit).gpus == 2
    for other in (
        recommend(spec_of("llama-3.1-8b", gpus="1"), QUAD, 1),
        recommend(spec_of("llama-3.3-70b", gpus="4"), QUAD, 4),
        make_plan(spec_of("qwen3-14b", gpus="1", offload__mode="zerooffload"), QUAD),
    ):
        assert not facts_of(other.remedies, CompactStatesFit)


@pytest.mark.parametrize(
    ("model", "seconds"), [("phi-4", (4.69, 3.61)), ("qwen3-14b", (4.72, 3.63))]
)
def test_faster_states_are_offered(model: str, seconds: tuple[float, float]) -> None:
    """The seconds in docs/offload.md."""
    plan = recommend(spec_of(model, gpus="1"), SHORTER, 1)
    assert plan.spec.offload.states == "fp32"
    faster = only(plan.warnings, FasterStates)
    assert faster.given_step_s == plan.step_s
    assert (round(faster.given_step_s, 2), round(faster.step_s, 2)) == seconds
    assert faster.given_step_s >= (1 + SURE) * faster.step_s
    assert faster.early_share > faster.given_early_share
    as_offered = make_plan(with_values(plan.spec, {"offload.states": faster.states}), SHORTER)
    assert (as_offered.verdict, as_offered.step_s) == ("fits", faster.step_s)
    assert not facts_of(as_offered.warnings, FasterStates)
    assert f'offload.states = "{faster.states}"' in faster.message


def test_most_exact_of_formats_about_as_fast_is_offered() -> None:
    plan = recommend(spec_of("phi-4", gpus="1"), SHORTER, 1)
    bf16, int8 = (
        make_plan(with_values(plan.spec, {"offload.states": states}), SHORTER).step_s or 0.0
        for states in FORMATS[1:]
    )
    assert int8 < bf16 < (1 + ALIKE) * int8
    assert only(plan.warnings, FasterStates).states == "bf16-moments"


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen3-14b", {}),  # little of a step waits for the optimizer
        ("phi-4", {"offload__speculation": "off"}),
        ("phi-4", {"train__gradient_clipping": "0"}),
        ("phi-4", {"offload__engine": "deepspeed"}),
        ("seed-oss-36b", {}),  # does not fit as it is: see the remedies
    ],
)
def test_states_are_not_offered_without_speed(model: str, changes: dict[str, str]) -> None:
    plan = recommend(spec_of(model, gpus="1", **changes), SHORT, 1)
    assert not facts_of(plan.warnings, FasterStates)
