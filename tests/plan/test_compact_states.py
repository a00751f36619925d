"""Compact moments in plans: what they take, what fits with them, and when they are offered."""

from __future__ import annotations

import pytest

from so_tui.machine import Machine
from so_tui.model.profile import profile_of
from so_tui.plan.notes import CompactStatesFit, FasterStates, MoreGpusFit
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import ALIKE, SURE
from so_tui.spec import with_values
from so_tui.spec.run_spec import StatesFormat
from tests.support.machines import superchips, x86
from tests.support.planning import BIG, QUAD, bytes_of, facts_of, only, planned, recommended

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
    assert (
        offered
        == [states for states, fits in zip(FORMATS, verdicts, strict=True) if fits == "fits"][:1]
    )


def test_it_is_offered_beside_more_gpus() -> None:
    """And not where the run fits."""
    plan = recommended("qwen3-14b", QUAD)
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
    faster = only(plan.warnings, FasterStates)
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
    assert not facts_of(bf16.warnings, FasterStates)


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
    assert not facts_of(recommended(model, SHORT, **changes).warnings, FasterStates)
