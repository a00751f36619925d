"""Weights in host memory: what plans count for them, and when they are proposed."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from so_tui.launch.ds_config import _published_config, ds_config
from so_tui.model.sharding import live_parameters, run_ahead_parameters
from so_tui.plan.fit import Assessment, assess, target_of
from so_tui.plan.gpu_memory import _all_terms
from so_tui.plan.notes import AutoMode, WeightsOnHost
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.remedies import memory_advice
from so_tui.plan.show import settings_of
from so_tui.plan.terms import TermKind
from so_tui.spec import RunSpec
from superoffload.ds_config import overrides
from tests.support.machines import x86
from tests.support.planning import H200, facts_of, long_spec, only
from tests.support.problems import rejected

A100 = x86("NVIDIA A100-SXM4-40GB", gpu_mib=40_960, memory_mib=512 * 1024)
TWO = x86("NVIDIA H200", gpu_count=2)
ON_HOST = {"offload__parameters": "cpu"}


def run(preset: str = "qwen3-4b-random", **changes: str) -> RunSpec:
    return long_spec(4096, preset, **changes)


def assessed(mode: str = "superoffload", **changes: str) -> Assessment:
    spec = run(offload__mode=mode, **changes)
    return assess(spec, target_of(spec, TWO))


def where_they_are(**changes: str) -> tuple[Assessment, Assessment]:
    """Return the same settings with weights on the GPU and on the host."""
    off = {"offload__speculation": "off"} | changes
    return assessed(offload__parameters="none", **off), assessed(**ON_HOST, **off)


def sizes(found: Assessment, kind: TermKind) -> list[tuple[str, int]]:
    return [
        (term.location, term.bytes) for term in _all_terms(found.placement) if term.kind == kind
    ]


@pytest.mark.parametrize("ratio", ["1", "0.6"])
def test_weights_leave_the_gpu_for_the_host_with_their_states(ratio: str) -> None:
    before, after = where_they_are(offload__ratio=ratio)
    layout, profile = after.layout, after.target.profile
    layer = profile.largest_layer
    moved = 2 * layout.cpu_numel
    assert sizes(before, "weights") == [("gpu", 2 * layout.numel)]
    assert not sizes(before, "host-weights") + sizes(before, "fetched-weights")
    assert sizes(after, "host-weights") == [("node", moved)]
    assert sizes(after, "weights") == ([("gpu", 2 * layout.gpu_numel)] if layout.gpu_numel else [])
    ((place, fetched),) = sizes(after, "fetched-weights")
    held = run_ahead_parameters(layer, 1) + live_parameters(layer, 1) + profile.largest_parameter
    assert place == "gpu"
    assert fetched == pytest.approx(1.2 * 2 * held)
    assert moved - 1.1 * fetched < before.demand.gpu_bytes - after.demand.gpu_bytes < moved
    assert after.demand.node_bytes[0] - before.demand.node_bytes[0] == moved


def test_second_states_need_no_second_buffer() -> None:
    found = where_they_are(offload__speculation="on", train__gradient_clipping="1")
    taken = [one.bytes_of("second-states") for one in found]
    assert taken == [14 * found[0].layout.cpu_numel, 12 * found[1].layout.cpu_numel]


def test_zero_offload_keeps_all_weights_there() -> None:
    found = assessed("zerooffload", offload__ratio="0.5", **ON_HOST)
    assert sizes(found, "host-weights") == [("node", 2 * found.layout.numel)]
    assert not sizes(found, "weights")


def test_each_of_several_ranks_fetches_its_shards() -> None:
    found = assessed(gpus="2", offload__ratio="1", **ON_HOST)
    layout, profile = found.layout, found.target.profile
    assert sizes(found, "host-weights") == [("node", 2 * layout.numel)]
    share = max(live_parameters(profile.largest_layer, 2), profile.largest_parameter) / 2
    ((_, fetched),) = sizes(found, "fetched-weights")
    assert fetched == pytest.approx(1.2 * 2 * share, rel=1e-6)


def test_copies_are_hidden_where_the_bus_is_fast() -> None:
    """Where it is not, they make a pass as long as they take."""
    long = {"data__sequence_length": "16384", "offload__ratio": "1"}
    before, found = where_they_are(**long)
    resting, quick, speed = before.step, found.step, found.target.resources.speed
    assert resting is not None
    assert quick is not None
    assert speed is not None
    assert (quick.forward_s, quick.backward_s) == (resting.forward_s, resting.backward_s)
    assert quick.exposed_optimizer_s <= resting.exposed_optimizer_s, "new weights stay there"
    slow_bus = replace(speed, h2d_bytes_per_s=2e9)
    resources = dataclasses.replace(found.target.resources, speed=slow_bus)
    slow = found.step_with(dataclasses.replace(found.target, resources=resources))
    assert slow is not None
    copied_s = 2 * found.layout.numel / 2e9
    assert slow.backward_s == pytest.approx(copied_s)
    assert copied_s < slow.forward_s < 1.1 * copied_s
    rates = found.model.rates() if found.model else None
    assert rates is not None
    assert rates.h2d_bytes == 0


def test_they_are_proposed_where_only_they_make_a_model_fit() -> None:
    for plan in (
        recommend(run("qwen3-14b"), A100),
        make_plan(run("qwen3-14b", offload__ratio="1"), A100),
    ):
        assert (plan.fits, plan.mode, plan.spec.offload.parameters) == (True, "superoffload", "cpu")
        fact = only(plan.reasons, WeightsOnHost)
        assert fact.bytes == pytest.approx(2 * 14.77e9, rel=0.06)
        assert fact.fetched_s is not None
        again = make_plan(plan.spec, A100)
        assert (again.gpu_bytes, again.host_bytes_per_node) == (
            plan.gpu_bytes,
            plan.host_bytes_per_node,
        )
        assert settings_of(plan.spec)["offload.parameters"] == "cpu"
    for plan in (recommend(run(), A100), make_plan(run(), A100)):
        assert (plan.verdict, plan.spec.offload.parameters) == ("fits", "auto")
        assert not facts_of(plan.reasons, WeightsOnHost)
    assert recommend(run("qwen3-14b", offload__parameters="none"), A100).verdict == "tight"
    # They do not help where the host is short.
    small = x86("NVIDIA A100-SXM4-40GB", gpu_mib=40_960, memory_mib=128 * 1024)
    assert recommend(run("qwen3-14b"), small).spec.offload.parameters == "auto"


def test_auto_mode_with_them_offloads() -> None:
    plan = make_plan(run(**ON_HOST), H200)
    assert (plan.mode, only(plan.reasons, AutoMode).why) == ("superoffload", "weights-on-host")
    assert recommend(run(**ON_HOST), H200).mode == "superoffload"


@pytest.mark.parametrize(("mode", "proposed"), [("superoffload", True), ("gpu", False)])
def test_a_run_out_of_memory_is_told_of_them_if_it_offloads(mode: str, proposed: bool) -> None:
    given = {"model__activation_offload": "off", "model__tiled_mlp": "off", "offload__ratio": "1"}
    savings = memory_advice(run(offload__mode=mode, **given), "gpu").savings
    keys = {change.key for saving in savings for change in saving.changes}
    assert ("offload.parameters" in keys) == proposed


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_deepspeed_is_told_where_weights_are(gpus: str) -> None:
    given = {"gpus": gpus, "offload__mode": "superoffload"}
    plan, resting = (make_plan(run(**changes), TWO) for changes in (given | ON_HOST, given))
    layer = target_of(plan.spec, TWO).profile.largest_layer
    published = _published_config(plan)["zero_optimization"]
    assert published["offload_param"] == {"device": "cpu", "pin_memory": True}
    config = ds_config(plan)
    zero = config["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    pinned = "zero_optimization.offload_param.pin_memory"
    assert pinned in {override.key for override in overrides(config)}
    assert zero["stage3_prefetch_bucket_size"] == layer
    assert zero["stage3_max_live_parameters"] == live_parameters(layer, int(gpus))
    assert 2 * layer < zero["stage3_max_reuse_distance"] < 1e9
    unmoved = ds_config(resting)["zero_optimization"]
    assert not {"offload_param", "stage3_max_reuse_distance"} & unmoved.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"offload__mode": "gpu"},
        {"offload__engine": "deepspeed"},
        {"offload__engine": "deepspeed", "offload__mode": "superoffload"},
    ],
)
def test_optimizers_that_keep_weights_on_the_gpu_refuse(changes: dict[str, str]) -> None:
    with rejected("parameter-offload", field="offload.parameters"):
        run(**ON_HOST, **changes)
    theirs = run(**ON_HOST, offload__engine="deepspeed", offload__mode="zerooffload")
    assert theirs.offload.parameters == "cpu"
