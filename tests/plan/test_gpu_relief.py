"""Weights, layer inputs and attention's results in host memory, and feed-forward blocks in tiles of
tokens: what plans count for them, and when they are proposed.
"""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.ds_config import _published_config, ds_config
from so_tui.model.profile import MLP_TILE_TOKENS, ModelProfile, offloaded_bytes, profile_of
from so_tui.model.shape import architecture
from so_tui.model.sharding import live_parameters, run_ahead_parameters
from so_tui.plan.fit import Assessment, Target, assess, target_of
from so_tui.plan.gpu_memory import _all_terms
from so_tui.plan.notes import AutoMode, InputsOnHost, MlpTiled, WeightsOnHost
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.remedies import memory_advice
from so_tui.plan.search import with_policy
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.spec import RunSpec, with_values
from so_tui.spec.run_spec import ParameterBlock
from superoffload.ds_config import overrides
from tests.support.machines import superchips, x86
from tests.support.planning import H200, facts_of, long_spec, only, some, spec_of, step_of
from tests.support.problems import rejected

A100 = x86("NVIDIA A100-SXM4-40GB", gpu_mib=40_960, memory_mib=512 * 1024)
TWO = x86("NVIDIA H200", gpu_count=2)
ON_HOST = {"offload__parameters": "cpu"}


def long_run(preset: str = "qwen3-4b-random", **changes: str) -> RunSpec:
    return long_spec(4096, preset, **changes)


def assessed(mode: str = "superoffload", **changes: str) -> Assessment:
    spec = long_run(offload__mode=mode, **changes)
    return assess(spec, target_of(spec, TWO))


def where_they_are(**changes: str) -> tuple[Assessment, Assessment]:
    off = {"offload__speculation": "off"} | changes
    return assessed(offload__parameters="none", **off), assessed(**ON_HOST, **off)


def sizes_of(found: Assessment, kind: TermKind) -> list[tuple[str, int]]:
    return [
        (term.location, term.bytes) for term in _all_terms(found.placement) if term.kind == kind
    ]


def with_bus(target: Target, **rates: float) -> Target:
    speed = replace(some(target.resources.speed), **rates)
    return dataclasses.replace(target, resources=dataclasses.replace(target.resources, speed=speed))


@pytest.mark.parametrize("ratio", ["1", "0.6"])
def test_weights_leave_the_gpu_for_the_host_with_their_states(ratio: str) -> None:
    before, after = where_they_are(offload__ratio=ratio)
    layout, profile = after.placement.layout, after.target.profile
    layer = profile.largest_layer
    moved = 2 * layout.cpu_numel
    assert sizes_of(before, "weights") == [("gpu", 2 * layout.numel)]
    assert not sizes_of(before, "host-weights") + sizes_of(before, "fetched-weights")
    assert sizes_of(after, "host-weights") == [("node", moved)]
    assert sizes_of(after, "weights") == (
        [("gpu", 2 * layout.gpu_numel)] if layout.gpu_numel else []
    )
    ((place, fetched),) = sizes_of(after, "fetched-weights")
    held = run_ahead_parameters(layer, 1) + live_parameters(layer, 1) + profile.largest_parameter
    assert place == "gpu"
    assert fetched == pytest.approx(1.2 * 2 * held)
    assert moved - 1.1 * fetched < before.demand.gpu_bytes - after.demand.gpu_bytes < moved
    assert after.demand.node_bytes[0] - before.demand.node_bytes[0] == moved


def test_second_states_need_no_second_buffer() -> None:
    found = where_they_are(offload__speculation="on", train__gradient_clipping="1")
    taken = [one.bytes_of("second-states") for one in found]
    numels = [each.placement.layout.cpu_numel for each in found]
    assert taken == [14 * numels[0], 12 * numels[1]]


def test_zero_offload_keeps_all_weights_on_the_host() -> None:
    found = assessed("zerooffload", offload__ratio="0.5", **ON_HOST)
    assert sizes_of(found, "host-weights") == [("node", 2 * found.placement.layout.numel)]
    assert not sizes_of(found, "weights")


def test_each_of_several_ranks_fetches_its_shards() -> None:
    found = assessed(gpus="2", offload__ratio="1", **ON_HOST)
    layout, profile = found.placement.layout, found.target.profile
    assert sizes_of(found, "host-weights") == [("node", 2 * layout.numel)]
    share = max(live_parameters(profile.largest_layer, 2), profile.largest_parameter) / 2
    ((_, fetched),) = sizes_of(found, "fetched-weights")
    assert fetched == pytest.approx(1.2 * 2 * share, rel=1e-6)


def test_fetching_weights_is_hidden_where_the_bus_is_fast() -> None:
    """Where it is not, they make a pass as long as they take."""
    long = {"data__sequence_length": "16384", "offload__ratio": "1"}
    before, found = where_they_are(**long)
    resting, quick = some(before.step), some(found.step)
    assert (quick.forward_s, quick.backward_s) == (resting.forward_s, resting.backward_s)
    assert quick.exposed_optimizer_s <= resting.exposed_optimizer_s, "new weights stay there"
    slow = some(found.step_with(with_bus(found.target, h2d_bytes_per_s=2e9)))
    copied_s = 2 * found.placement.layout.numel / 2e9
    assert slow.backward_s == pytest.approx(copied_s)
    assert copied_s < slow.forward_s < 1.1 * copied_s
    assert some(some(found.model).rates()).h2d_bytes == 0


def test_weights_are_moved_where_only_that_makes_a_model_fit() -> None:
    for plan in (
        recommend(long_run("qwen3-14b"), A100),
        make_plan(long_run("qwen3-14b", offload__ratio="1"), A100),
    ):
        assert (plan.fits, plan.mode, plan.spec.offload.parameters) == (True, "superoffload", "cpu")
        fact = only(plan.reasons, WeightsOnHost)
        assert fact.bytes == pytest.approx(2 * 14.77e9, rel=0.06)
        assert fact.fetched_s is not None
        again = make_plan(plan.spec, A100)
        assert again.gpu_bytes == plan.gpu_bytes
        assert again.host_bytes_per_node == plan.host_bytes_per_node
        assert plan.spec.offload.parameters == "cpu"
    for plan in (recommend(long_run(), A100), make_plan(long_run(), A100)):
        assert (plan.verdict, plan.spec.offload.parameters) == ("fits", "auto")
        assert not facts_of(plan.reasons, WeightsOnHost)
    assert recommend(long_run("qwen3-14b", offload__parameters="none"), A100).verdict == "tight"
    # They do not help where the host is short.
    small = x86("NVIDIA A100-SXM4-40GB", gpu_mib=40_960, memory_mib=128 * 1024)
    assert recommend(long_run("qwen3-14b"), small).spec.offload.parameters == "auto"


def test_auto_mode_with_weights_on_the_host_offloads() -> None:
    plan = make_plan(long_run(**ON_HOST), H200)
    assert (plan.mode, only(plan.reasons, AutoMode).why) == ("superoffload", "weights-on-host")
    assert recommend(long_run(**ON_HOST), H200).mode == "superoffload"


@pytest.mark.parametrize(
    ("mode", "offload", "moved"),
    [
        ("superoffload", "off", {"offload.parameters"}),
        ("gpu", "off", set()),
        ("gpu", "auto", {"model.activation_offload"}),
    ],
)
def test_a_run_out_of_memory_is_told_what_it_can_move(
    mode: str, offload: str, moved: set[str]
) -> None:
    policy = {"model__tiled_mlp": "off"} | given("full", offload)
    spec = long_run(offload__mode=mode, offload__ratio="1", **policy)
    savings = memory_advice(spec, "gpu").savings
    keys = {change.key for saving in savings for change in saving.changes}
    assert keys & {"offload.parameters", "model.activation_offload"} == moved


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_deepspeed_is_told_where_weights_are(gpus: str) -> None:
    given = {"gpus": gpus, "offload__mode": "superoffload"}
    plan, resting = (make_plan(long_run(**changes), TWO) for changes in (given | ON_HOST, given))
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


def test_optimizers_that_keep_weights_on_the_gpu_refuse() -> None:
    for mode in ("auto", "superoffload"):
        with rejected("parameter-offload", field="offload.parameters"):
            long_run(**ON_HOST, offload__engine="deepspeed", offload__mode=mode)
    theirs = long_run(**ON_HOST, offload__engine="deepspeed", offload__mode="zerooffload")
    assert theirs.offload.parameters == "cpu"


SHAPE = profile_of(long_spec(512).model).architecture
"""The 4B model's."""
SHORT, LONG = 16_384, 524_288
INPUT, RESULT = SHORT * SHAPE.input_bytes, SHORT * sum(SHAPE.result_bytes)
"""Bytes of a layer's, for a short sequence."""


def given(policy: str, offload: str = "auto", **changes: str) -> dict[str, str]:
    """Return what is recomputed, and what is offloaded of the rest."""
    found = {"model__activation_checkpointing": policy, "model__activation_offload": offload}
    return found | changes


def found_terms(kind: TermKind, tokens: int = SHORT, /, **changes: str) -> list[MemoryTerm]:
    spec = long_spec(tokens, offload__mode="superoffload", **changes)
    terms = _all_terms(assess(spec, target_of(spec, H200)).placement)
    return [term for term in terms if term.kind == kind]


def sizes(kind: TermKind, **changes: str) -> list[tuple[str, int]]:
    return [(term.phase or term.location, term.bytes) for term in found_terms(kind, **changes)]


@pytest.mark.parametrize("policy", ["full", "attention", "selective"])
def test_inputs_leave_the_gpu_for_the_host(policy: str) -> None:
    """The GPU holds those of two layers in backward, and one in the loss."""
    moved = given(policy, "on")
    (host,) = found_terms("offloaded-inputs", **moved)
    assert (host.location, host.bytes) == ("node", SHAPE.layers * INPUT)
    assert sizes("layer-inputs", **moved) == [("loss", INPUT), ("backward", 2 * INPUT)]
    stored, less = (
        sum(term.bytes for term in found_terms("activations", **changes))
        for changes in (given(policy, "off"), moved)
    )
    results = RESULT if policy == "attention" else 0
    assert stored - less == (0 if policy == "full" else 2 * SHAPE.layers * (INPUT + results))
    assert not found_terms("offloaded-inputs", **given(policy))
    assert bool(found_terms("offloaded-results", **moved)) == (policy == "attention")


@pytest.mark.parametrize("offload", ["on", "attention"])
def test_attentions_results_leave_the_gpu_with_them_or_alone(offload: str) -> None:
    moved = given("attention", offload)
    (host,) = found_terms("offloaded-results", **moved)
    assert (host.location, host.bytes) == ("node", SHAPE.layers * RESULT)
    assert sizes("attention-results", **moved) == [("loss", RESULT), ("backward", 2 * RESULT)]
    inputs = sum(term.bytes for term in found_terms("offloaded-inputs", **moved))
    every = SHAPE.layers * INPUT
    assert inputs == (every if offload == "on" else 0)
    stored = [size for phase, size in sizes("activations", **moved) if phase == "backward"]
    assert inputs + sum(stored) == every
    # Layers without attention keep none of its results.
    few = replace(SHAPE, other_layers=27)
    alone = long_spec(SHORT, **given("attention", "attention")).model
    assert offloaded_bytes(few, alone) == sum(SHAPE.result_bytes) * (SHAPE.layers - 27)


def chosen(plan: Plan) -> tuple[str, str, str]:
    model = plan.spec.model
    return plan.verdict, model.activation_checkpointing, model.activation_offload


def test_results_are_moved_instead_of_computed_again() -> None:
    """256k tokens of the 4B shape: layer inputs and results together are more than the host has
    beside the states. With more memory, layer inputs follow.
    """
    found = recommend(long_spec(262_144), H200)
    assert chosen(found) == ("fits", "attention", "attention")
    fact = only(found.reasons, InputsOnHost)
    assert (fact.bytes, fact.exposed_s) == (0, 0)
    assert fact.results_bytes > 70e9
    assert 0 < (fact.out_s or 0) < step_of(found).forward_s
    without = recommend(long_spec(262_144, model__activation_offload="off"), H200)
    assert chosen(without)[:2] == ("fits", "full")
    assert step_of(found).total_s < 0.85 * step_of(without).total_s
    more = recommend(long_spec(LONG), superchips(1, node_mib=480_000))
    assert chosen(more) == ("fits", "attention", "on")
    fact = only(more.reasons, InputsOnHost)
    assert fact.results_bytes / fact.bytes == pytest.approx(RESULT / INPUT)


def test_attention_alone_on_the_host_means_its_policy() -> None:
    plan = make_plan(long_spec(SHORT, model__activation_offload="attention"), H200)
    assert plan.spec.model.activation_checkpointing == "attention"
    less = with_policy(plan.spec, "full").model
    assert (less.activation_checkpointing, less.activation_offload) == ("full", "auto")


@pytest.mark.parametrize(("policy", "offload"), [("full", "attention"), ("none", "on")])
def test_what_no_policy_keeps_cannot_be_moved(policy: str, offload: str) -> None:
    with rejected("nothing-to-offload"):
        long_spec(SHORT, **given(policy, offload))


def test_inputs_are_moved_where_only_that_makes_a_length_fit() -> None:
    for plan in (
        recommend(long_spec(LONG), H200),
        make_plan(long_spec(LONG, offload__ratio="0.45"), H200),
    ):
        assert (plan.fits, plan.spec.model.activation_offload) == (True, "on")
        assert only(plan.reasons, InputsOnHost).bytes > 80e9
        assert make_plan(plan.spec, H200).gpu_bytes == plan.gpu_bytes
    for plan in (recommend(long_spec(SHORT), H200), make_plan(long_spec(SHORT), H200)):
        assert (plan.verdict, plan.spec.model.activation_offload) == ("fits", "auto")
        assert not facts_of(plan.reasons, InputsOnHost)
    for key, value in (("activation_offload", "off"), ("activation_checkpointing", "none")):
        refused = recommend(long_spec(LONG, **{f"model__{key}": value}), H200)
        assert (refused.fits, getattr(refused.spec.model, key)) == (False, value)


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_a_slow_bus_makes_both_passes_as_long_as_its_copies(policy: str) -> None:
    spec = long_spec(SHORT, **given(policy, "on", offload__mode="gpu"))
    fast = target_of(spec, H200)
    slow = with_bus(fast, d2h_bytes_per_s=1e8, h2d_bytes_per_s=2e8)
    without = with_values(spec, {"model.activation_offload": "off"})
    held, quick, resting = (
        some(assess(one, on).step) for one, on in ((spec, slow), (spec, fast), (without, fast))
    )
    assert quick == resting
    moved = SHAPE.layers * (INPUT + (RESULT if policy == "attention" else 0))
    assert held.backward_s == pytest.approx(moved / 2e8)
    assert held.forward_s - quick.forward_s == pytest.approx(moved / 1e8, rel=0.2)


TILED_TOKENS = 131_072
FULL = {"offload__mode": "superoffload", "model__activation_checkpointing": "full"}
PLAIN = {"model__kernels": "plain"}
HIDDEN, FEED_FORWARD = 2560, 9728
"""The 4B model's."""


def block_bytes(tokens: int, tiled: str, **changes: str) -> int:
    terms = found_terms("block-working-set", tokens, model__tiled_mlp=tiled, **changes)
    return sum(term.bytes for term in terms)


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_block_grows_with_the_tile(policy: str) -> None:
    """A tile of norms holds less than one of the feed-forward block, which takes 12 f instead of 10
    f bytes a token.
    """
    given = {"model__activation_checkpointing": policy}
    once, whole = (block_bytes(TILED_TOKENS, value, **given) for value in ("on", "off"))
    assert once < 0.65 * whole
    assert once < block_bytes(2 * TILED_TOKENS, "on", **given) < 2 * once
    small = [block_bytes(MLP_TILE_TOKENS, value, **given) for value in ("on", "off")]
    assert small[0] == small[1]
    tiled_norms, norms = (
        block_bytes(TILED_TOKENS, value, **PLAIN | given) for value in ("on", "off")
    )
    assert norms - whole > TILED_TOKENS * 14 * HIDDEN
    assert tiled_norms - once == MLP_TILE_TOKENS * 2 * FEED_FORWARD


def test_larger_tile_of_norms_counts() -> None:
    config = spec_of("qwen3-4b-random").model.config
    shape = architecture(config | {"intermediate_size": HIDDEN})
    tiles = [ModelProfile((), shape, fused, False).tile_bytes for fused in (False, True)]
    assert tiles == [28 * HIDDEN, 10 * HIDDEN]


def added_s(spec: RunSpec) -> tuple[float, float]:
    """Return how much longer backward is with tiles, and how long it is without."""
    tiled, whole = (
        step_of(make_plan(replace(spec, model=replace(spec.model, tiled_mlp=value)), H200))
        for value in ("on", "off")
    )
    assert tiled.forward_s == whole.forward_s
    return tiled.backward_s - whole.backward_s, whole.backward_s


def test_tiles_cost_a_product_in_backward_and_again_the_norms() -> None:
    """Those of several kernels; three products where a norm follows the block."""
    given = long_spec(TILED_TOKENS, **FULL)
    added, backward_s = added_s(given)
    assert 0 < added < 0.03 * backward_s
    assert 1.2 < added_s(long_spec(TILED_TOKENS, **FULL | PLAIN))[0] / added < 3
    renamed = msgspec.json.encode(given.model.parameters).replace(
        b"post_attention_layernorm", b"post_feedforward_layernorm"
    )
    followed = msgspec.json.decode(renamed, type=tuple[ParameterBlock, ...])
    other = replace(given, model=replace(given.model, parameters=followed))
    assert added_s(other)[0] == pytest.approx(3 * added)


def test_tiles_are_proposed_where_only_they_make_a_length_fit() -> None:
    long = recommend(long_spec(524_288), H200)
    assert (long.verdict, only(long.reasons, MlpTiled).tile_tokens) == ("fits", MLP_TILE_TOKENS)
    assert facts_of(long.reasons, InputsOnHost)
    stays = {"model__activation_offload": "off", "model__tiled_mlp": "off"}
    assert recommend(long_spec(524_288, **stays), H200).verdict == "does not fit"
    short = recommend(long_spec(16_384), H200)
    assert (short.verdict, short.spec.model.tiled_mlp) == ("fits", "auto")


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("qwen3-30b-a3b", {}), ("qwen3-4b-random", {"model__activation_checkpointing": "selective"})],
)
def test_nothing_to_cut_without_a_dense_block(preset: str, changes: dict[str, str]) -> None:
    with rejected("nothing-to-tile"):
        long_spec(TILED_TOKENS, preset, model__tiled_mlp="on", **changes)
    assert recommend(long_spec(1_048_576, preset, **changes), H200).spec.model.tiled_mlp == "auto"
