"""Layer inputs and attention's results in host memory: what plans count for them, and when they are
proposed.
"""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from so_tui.model.profile import attention_bytes, block_input_bytes, offloaded_bytes, profile_of
from so_tui.plan.fit import Target, assess, target_of
from so_tui.plan.gpu_memory import _all_terms
from so_tui.plan.notes import InputsOnHost, MemoryAdvice
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.remedies import _memory_advice
from so_tui.plan.search import with_policy
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.spec import InputError, RunSpec, find_preset, with_values
from tests.support.machines import superchips, x86
from tests.support.planning import facts_of, only, spec_of

H200 = x86("NVIDIA H200")
SHAPE_4B = profile_of(find_preset("qwen3-4b-random").spec.model).architecture
SHORT, LONG = 16_384, 524_288


def long_spec(tokens: int, **changes: str) -> RunSpec:
    one = {
        "gpus": "1",
        "train__micro_batch": "1",
        "train__gradient_accumulation": "1",
        "data__sequence_length": str(tokens),
    }
    return spec_of("qwen3-4b-random", **one | changes)


def target(spec: RunSpec) -> Target:
    return target_of(spec, H200)


def found_terms(kind: TermKind, **changes: str) -> list[MemoryTerm]:
    spec = long_spec(SHORT, offload__mode="superoffload", **changes)
    return [term for term in _all_terms(assess(spec, target(spec)).placement) if term.kind == kind]


@pytest.mark.parametrize("policy", ["full", "attention", "selective"])
def test_inputs_leave_the_gpu_for_the_host(policy: str) -> None:
    shape = target(long_spec(SHORT)).profile.architecture
    each = SHORT * block_input_bytes(shape)
    (host,) = found_terms(
        "offloaded-inputs",
        model__activation_checkpointing=policy,
        model__activation_offload="on",
    )
    assert (host.location, host.bytes) == ("node", shape.layers * each)
    on_gpu = found_terms(
        "layer-inputs",
        model__activation_checkpointing=policy,
        model__activation_offload="on",
    )
    assert [(term.phase, term.bytes) for term in on_gpu] == [("loss", each), ("backward", 2 * each)]
    given = {"model__activation_checkpointing": policy}
    stored, less = (
        sum(
            term.bytes
            for term in found_terms("activations", **given, model__activation_offload=offload)
        )
        for offload in ("off", "on")
    )
    results = SHORT * attention_bytes(shape) if policy == "attention" else 0
    assert stored - less == (0 if policy == "full" else 2 * shape.layers * (each + results))
    assert not found_terms("offloaded-inputs", model__activation_checkpointing=policy)


def test_attentions_results_leave_the_gpu_with_them_or_alone() -> None:
    """The GPU holds those of two layers in backward, and one in the loss."""
    shape = target(long_spec(SHORT)).profile.architecture
    each = SHORT * attention_bytes(shape)
    for offload in ("on", "attention"):
        given = {
            "model__activation_checkpointing": "attention",
            "model__activation_offload": offload,
        }
        (host,) = found_terms("offloaded-results", **given)
        assert (host.location, host.bytes) == ("node", shape.layers * each)
        on_gpu = found_terms("attention-results", **given)
        assert [(term.phase, term.bytes) for term in on_gpu] == [
            ("loss", each),
            ("backward", 2 * each),
        ]
        inputs = sum(term.bytes for term in found_terms("offloaded-inputs", **given))
        assert inputs == (SHORT * block_input_bytes(shape) * shape.layers if offload == "on" else 0)
        stored = sum(
            term.bytes for term in found_terms("activations", **given) if term.phase == "backward"
        )
        assert inputs + stored == SHORT * block_input_bytes(shape) * shape.layers
    others = (("full", "on"), ("selective", "on"), ("attention", "inputs"), ("attention", "off"))
    for policy, offload in others:
        given = {"model__activation_checkpointing": policy, "model__activation_offload": offload}
        assert not found_terms("offloaded-results", **given)


def test_layers_without_attention_keep_none_of_its_results() -> None:
    shape = replace(target(long_spec(SHORT)).profile.architecture, other_layers=27)
    model = long_spec(
        SHORT, model__activation_checkpointing="attention", model__activation_offload="attention"
    ).model
    assert offloaded_bytes(shape, model) == attention_bytes(shape) * (shape.layers - 27)


def test_they_are_recommended_where_attention_would_be_computed_again_otherwise() -> None:
    """256k tokens of the 4B shape: layer inputs and results together are more than the host has
    beside the states.
    """
    spec = long_spec(262_144)
    found = recommend(spec, H200)
    assert (
        found.verdict,
        found.spec.model.activation_checkpointing,
        found.spec.model.activation_offload,
    ) == (
        "fits",
        "attention",
        "attention",
    )
    fact = only(found.reasons, InputsOnHost)
    assert (fact.bytes, fact.exposed_s) == (0, 0)
    assert fact.results_bytes > 70e9
    assert fact.out_s is not None
    assert found.step is not None
    assert 0 < fact.out_s < found.step.forward_s
    without = recommend(with_values(spec, {"model.activation_offload": "off"}), H200)
    assert (without.verdict, without.spec.model.activation_checkpointing) == ("fits", "full")
    assert found.step_s is not None
    assert without.step_s is not None
    assert found.step_s < 0.85 * without.step_s


def test_with_more_host_memory_layer_inputs_follow_where_that_makes_it_fit() -> None:
    found = recommend(long_spec(LONG), superchips(1, node_mib=480_000))
    assert (
        found.verdict,
        found.spec.model.activation_checkpointing,
        found.spec.model.activation_offload,
    ) == ("fits", "attention", "on")
    fact = only(found.reasons, InputsOnHost)
    assert fact.results_bytes / fact.bytes == pytest.approx(
        attention_bytes(SHAPE_4B) / block_input_bytes(SHAPE_4B)
    )


@pytest.mark.parametrize(
    "changes",
    [{"model__activation_offload": "inputs"}, {"model__activation_checkpointing": "full"}],
)
def test_what_is_set_stays_set(changes: dict[str, str]) -> None:
    found = recommend(long_spec(262_144, **changes), H200).spec.model
    for key, value in changes.items():
        assert getattr(found, key.removeprefix("model__")) == value
    assert (found.activation_checkpointing, found.activation_offload) != ("attention", "on")


def test_attention_alone_on_the_host_means_the_policy_that_keeps_it() -> None:
    plan = make_plan(long_spec(SHORT, model__activation_offload="attention"), H200)
    assert plan.spec.model.activation_checkpointing == "attention"
    for other in ("full", "selective", "none"):
        with pytest.raises(InputError) as caught:
            long_spec(
                SHORT, model__activation_checkpointing=other, model__activation_offload="attention"
            )
        assert [problem.code for problem in caught.value.problems] == ["nothing-to-offload"]
    less = with_policy(plan.spec, "full").model
    assert (less.activation_checkpointing, less.activation_offload) == ("full", "auto")


def test_they_are_proposed_where_only_they_make_a_length_fit() -> None:
    for plan in (
        recommend(long_spec(LONG), H200),
        make_plan(long_spec(LONG, offload__ratio="0.45"), H200),
    ):
        assert (plan.fits, plan.spec.model.activation_offload) == (True, "on")
        assert only(plan.reasons, InputsOnHost).bytes > 80e9
        again = make_plan(plan.spec, H200)
        assert (again.gpu_bytes, again.host_bytes_per_node) == (
            plan.gpu_bytes,
            plan.host_bytes_per_node,
        )
    for plan in (recommend(long_spec(SHORT), H200), make_plan(long_spec(SHORT), H200)):
        assert (plan.verdict, plan.spec.model.activation_offload) == ("fits", "auto")
        assert not facts_of(plan.reasons, InputsOnHost)


@pytest.mark.parametrize(
    "changes", [{"model__activation_offload": "off"}, {"model__activation_checkpointing": "none"}]
)
def test_they_are_not_where_they_are_off_or_nothing_is_recomputed(changes: dict[str, str]) -> None:
    plan = recommend(long_spec(LONG, **changes), H200)
    assert not plan.fits
    assert plan.spec.model.activation_offload == changes.get("model__activation_offload", "auto")


def test_without_a_layer_input_there_is_nothing_to_move() -> None:
    with pytest.raises(InputError) as caught:
        long_spec(SHORT, model__activation_checkpointing="none", model__activation_offload="on")
    assert [problem.code for problem in caught.value.problems] == ["nothing-to-offload"]


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_a_slow_bus_makes_both_passes_as_long_as_its_copies(policy: str) -> None:
    spec = long_spec(
        SHORT,
        offload__mode="gpu",
        model__activation_checkpointing=policy,
        model__activation_offload="on",
    )
    fast = target(spec)
    speed = fast.resources.speed
    assert speed is not None
    slow_bus = replace(speed, d2h_bytes_per_s=1e8, h2d_bytes_per_s=2e8)
    slow_target = dataclasses.replace(
        fast, resources=dataclasses.replace(fast.resources, speed=slow_bus)
    )
    slow = assess(spec, slow_target).step
    quick, without = (
        assess(spec, fast).step,
        assess(with_values(spec, {"model.activation_offload": "off"}), fast).step,
    )
    assert slow is not None
    assert quick is not None
    assert quick == without
    shape = fast.profile.architecture
    each = block_input_bytes(shape) + (attention_bytes(shape) if policy == "attention" else 0)
    moved = SHORT * each * shape.layers
    assert slow.backward_s == pytest.approx(moved / 2e8)
    assert slow.forward_s - quick.forward_s == pytest.approx(moved / 1e8, rel=0.2)


def test_a_run_out_of_memory_is_told_of_them() -> None:
    found = _memory_advice(
        long_spec(SHORT, offload__mode="gpu", model__activation_checkpointing="full"), "gpu"
    )
    assert isinstance(found, MemoryAdvice)
    assert "model.activation_offload" in {
        change.key for saving in found.savings for change in saving.changes
    }
