"""Recommended settings, and the reasons for them."""

from __future__ import annotations

from operator import attrgetter

import pytest
from msgspec.structs import replace

from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine
from so_tui.plan.fit import RATIOS, target_of
from so_tui.plan.notes import (
    AdamCoresChosen,
    CheckpointingChosen,
    FasterRatio,
    LargerSteps,
    MemoryNeeded,
    MicroBatchChosen,
    MoreGpusKeepMargin,
    NextBest,
    NoNextBest,
    Preference,
    SmallestRatio,
    StepsEarly,
    TokensReached,
)
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.rates import ALIKE, Calibrated, clearly_faster
from so_tui.plan.resources import resources_of
from so_tui.plan.search import best_settings
from so_tui.plan.workload import Seen, Workload, _path_of, remember
from so_tui.spec import with_values
from tests.support.machines import x86
from tests.support.planning import (
    BIG,
    CATALOG,
    H200,
    QUAD,
    begun_with,
    facts_of,
    only,
    planned,
    recommended,
    some,
    source_of,
    spec_of,
)

H100 = x86("NVIDIA H100 80GB HBM3", gpu_mib=81_559)
FOUR_H100 = x86(
    "NVIDIA H100 80GB HBM3", gpu_mib=81_559, memory_mib=512 * 1024, gpu_count=4, cores=112
)
EVERY_PRESET = pytest.mark.parametrize("name", list(CATALOG.presets))
DATA = Workload(attended_tokens=200.0, trained_share=0.5)


def rate_of(plan: Plan) -> float:
    return plan.useful_tokens_per_s_total or 0.0


def figures_of(plan: Plan) -> tuple[int, float | None, int]:
    return plan.gpu_bytes, plan.step_s, plan.tokens_per_step


def at_ratio(plan: Plan, machine: Machine, ratio: float, **changes: str) -> Plan:
    """Return the settings of a plan at another ratio, with second states as there is room."""
    changed = {"offload.speculation": "auto", "offload.speculation_gib": "0"} | changes
    changed |= {"offload.parameters": "none", "offload.ratio": f"{ratio:.2f}"}
    return make_plan(with_values(plan.spec, changed), machine)


def test_ratio_is_the_smallest_that_keeps_the_margin() -> None:
    """Or a larger one that is faster, because Adam on the host is hidden."""
    plan = recommended("qwen3-14b", BIG)
    faster = only(plan.reasons, FasterRatio)
    assert (faster.ratio, faster.step_s) == (plan.ratio, plan.step_s)
    assert faster.step_s < faster.smallest_step_s
    stays = {"model.activation_offload": "off"}
    smallest, less = (
        at_ratio(plan, BIG, ratio, **stays).verdict
        for ratio in (faster.smallest_ratio, faster.smallest_ratio - 0.05)
    )
    assert (plan.verdict, smallest) == ("fits", "fits")
    assert less != "fits"
    held_back = recommended(
        "qwen3-14b", BIG, offload__speculation="off", model__activation_offload="off"
    )
    assert only(held_back.reasons, SmallestRatio).ratio == held_back.ratio == faster.smallest_ratio


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    ("preset", "machine", "micro_batch"),
    [("qwen3-14b", "h200-8", "2"), ("phi-4", "gh200-480", "4"), ("llama-3.1-8b", "h200-8", "8")],
)
def test_ratio_is_the_fastest_or_leaves_adam_time(
    preset: str, machine: str, micro_batch: str, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too small, and the GPU steps more itself; too large, and backward no longer hides Adam."""
    host = named_machine(machine)
    if measured:
        published = some(resources_of(host, 1, 0.9).speed)
        known = replace(published, calibrated=Calibrated(date="2026-11-22T10:00:00+00:00"))
        monkeypatch.setattr("so_tui.plan.resources.speed_of", lambda *_: known)
    plan = recommended(preset, host, train__micro_batch=micro_batch)
    plans = {ratio: at_ratio(plan, host, ratio) for ratio in RATIOS}
    steps = {ratio: one.step_s for ratio, one in plans.items() if one.verdict == "fits"}
    seconds = {ratio: step_s for ratio, step_s in steps.items() if step_s is not None}
    assert len(seconds) > 1
    assert some(plan.step_s) <= (1.002 if measured else 1.03) * min(seconds.values())
    assert measured or plan.ratio <= min(seconds, key=lambda ratio: seconds[ratio])


def test_a_recommendation_explains_choices_and_the_next_best() -> None:
    plan = recommend(begun_with("llama-3.1-8b", gpus="4", train__micro_batch="8"), QUAD)
    expected = [MemoryNeeded, FasterRatio, CheckpointingChosen, MicroBatchChosen, AdamCoresChosen]
    assert [type(reason) for reason in plan.reasons] == [*expected, NextBest, StepsEarly]
    assert only(plan.reasons, FasterRatio).ratio == plan.ratio
    assert only(plan.reasons, NextBest).slower > 0
    alone = {"train__micro_batch": "1", "model__activation_checkpointing": "full"}
    only_one = recommended("tiny", QUAD, **alone)
    assert only_one.recommended
    assert only(only_one.reasons, NoNextBest).fits


@EVERY_PRESET
@pytest.mark.parametrize("machine", [QUAD, H100], ids=["quad", "h100"])
def test_nothing_is_recommended_that_the_margin_cannot_hold(name: str, machine: Machine) -> None:
    plan = recommended(name, machine)
    if plan.recommended:
        assert plan.gpu_bytes <= 0.92 * (plan.gpu_capacity_bytes or 0)
        for node, needs in plan.host_bytes_per_node.items():
            assert needs <= 0.94 * plan.host_capacity_bytes_per_node[node]
        as_run = make_plan(plan.spec, machine)
        assert (as_run.verdict, figures_of(as_run)) == ("fits", figures_of(plan))


def test_a_target_of_tokens_reaches_figures_and_reasons() -> None:
    aimed = planned("qwen3-4b-random", H200, gpus="1", train__tokens_per_step="100000")
    steps = aimed.spec.gradient_accumulation_steps
    assert steps > 1
    given = {"gpus": "1", "train__gradient_accumulation": str(steps)}
    assert figures_of(aimed) == figures_of(planned("qwen3-4b-random", H200, **given))
    reached = only(aimed.reasons, TokensReached)
    assert (reached.target, reached.accumulation) == (100_000, steps)
    assert reached.tokens == aimed.tokens_per_step
    large = {"train__tokens_per_step": "131072", "train__micro_batch": "64"}
    halved = recommend(begun_with("qwen3-4b-random", gpus="1", **large), BIG)
    assert halved.spec.train.micro_batch < 64
    assert halved.tokens_per_step == 131_072


def test_waiting_for_the_optimizer_is_priced_in_tokens_of_a_step() -> None:
    held_back = {"offload__speculation": "off"}
    waiting = recommended("gpt-oss-20b", BIG, **held_back)
    priced = only(waiting.warnings, LargerSteps)
    assert priced.key == "train.tokens_per_step"
    held_back["train__tokens_per_step"] = str(priced.value)
    larger = recommended("gpt-oss-20b", BIG, **held_back)
    assert larger.tokens_per_step == priced.tokens
    assert priced.faster == pytest.approx(rate_of(larger) / rate_of(waiting), rel=0.05)
    assert not facts_of(recommended("qwen3-4b-random", H200).warnings, LargerSteps)


@EVERY_PRESET
@pytest.mark.parametrize("machine", [QUAD, FOUR_H100], ids=["quad", "h100"])
def test_what_is_recommended_is_about_as_fast_as_the_fastest(name: str, machine: Machine) -> None:
    for gpus in (1, 4):
        spec = replace(CATALOG.presets[name].spec, gpus=gpus)
        chosen, tried, _ = best_settings(spec, target_of(spec, machine))
        fitting = [found for found in tried if found.verdict == "fits"]
        if not fitting or not chosen.step:
            continue
        fastest = max(fitting, key=attrgetter("rate"))
        assert not clearly_faster(fastest.rate, chosen.rate)
        kept = spec.train.micro_batch
        mine, theirs = (
            (found.mode != "gpu", found.spec.train.micro_batch != kept, not found.roomy)
            for found in (chosen, fastest)
        )
        assert fastest.rate <= chosen.rate or mine < theirs


@pytest.mark.parametrize(
    ("preset", "machine", "gpus", "micro_batch", "why"),
    [
        ("phi-4", QUAD, "4", 4, "no-offload"),
        ("qwen3-4b-random", FOUR_H100, "1", 4, "given-micro-batch"),
        ("llama-3.1-8b", FOUR_H100, "4", 2, "memory"),
    ],
)
def test_preference_among_alike_is_said(
    preset: str, machine: Machine, gpus: str, micro_batch: int, why: Preference
) -> None:
    given = begun_with(preset, gpus=gpus, train__micro_batch=str(micro_batch))
    plan = recommend(given, machine)
    other = only(plan.reasons, NextBest)
    assert (other.alike, other.chosen_for) == (True, why)
    assert -ALIKE <= other.slower < 0
    differs = {
        "no-offload": (plan.mode, other.mode) == ("gpu", "superoffload"),
        "given-micro-batch": plan.spec.train.micro_batch == micro_batch != other.micro_batch,
        "memory": other.more_gpu_bytes > 0.08 * (plan.gpu_capacity_bytes or 0),
    }
    assert differs[why]


def test_a_larger_micro_batch_is_tried_for_summed_gradients() -> None:
    """Summing takes 4 B a parameter of the host: one micro-batch fits where two of half the size do
    not.
    """
    roomy = recommended("qwen3-30b-a3b", BIG, train__micro_batch="4")
    summed = {"train__micro_batch": "1", "train__gradient_accumulation": "4"}
    given = begun_with("qwen3-30b-a3b", gpus="1", **summed)
    cut, again = make_plan(given, BIG), recommend(given, BIG)
    assert (roomy.recommended, cut.fits, again.recommended) == (True, False, True)
    assert again.spec.gradient_accumulation_steps == 1
    assert rate_of(again) > 0.97 * rate_of(roomy)


def test_what_is_tight_says_how_many_gpus_keep_the_margin() -> None:
    nodes = tuple(replace(node, memory_total_bytes=118 * 2**30) for node in QUAD.numa_nodes)
    narrow = replace(QUAD, numa_nodes=nodes)
    plans = [
        recommended(name, narrow, gpus=count, offload__states="fp32")
        for name in CATALOG.presets
        for count in ("1", "2")
    ]
    tight = [plan for plan in plans if plan.verdict == "tight"]
    assert tight
    for plan in tight:
        gpus = only(plan.warnings, MoreGpusKeepMargin).gpus
        assert recommended(plan.preset, narrow, gpus=str(gpus)).recommended


def test_what_was_seen_of_the_data_is_what_a_plan_reckons_with() -> None:
    spec = spec_of("qwen3-14b", gpus="4")
    whole = make_plan(spec, QUAD)
    assert source_of(whole).workload is None
    remember(spec, Seen(fingerprint="a", workload=DATA))
    packed = make_plan(spec, QUAD)
    assert source_of(packed).workload == source_of(recommend(spec, QUAD)).workload == DATA
    assert (packed.step_s or 0) < 0.97 * (whole.step_s or 0)
    other = make_plan(replace(spec, data=replace(spec.data, loss="all")), QUAD)
    assert other.step_s == whole.step_s, "other data, or cut in another way"
    _path_of(spec).write_text("{")
    assert make_plan(spec, QUAD).step_s == whole.step_s


def test_the_spec_of_a_plan_is_what_will_run() -> None:
    plan = planned("llama-3.1-8b", QUAD, gpus="2")
    assert (plan.spec.gpus, plan.spec.offload.mode) == (2, plan.mode)
    assert [rank.gpu for rank in plan.binding] == [0, 1]
    assert [rank.numa_node for rank in plan.binding] == [0, 1]
