"""Layer inputs and attention's results in host memory: what plans count for them, and when they are
proposed.
"""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from so_tui.model.profile import offloaded_bytes, profile_of
from so_tui.plan.fit import assess, target_of
from so_tui.plan.gpu_memory import _all_terms
from so_tui.plan.notes import InputsOnHost
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.remedies import memory_advice
from so_tui.plan.search import with_policy
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.spec import with_values
from tests.support.machines import superchips
from tests.support.planning import H200, facts_of, long_spec, only, step_of
from tests.support.problems import rejected

SHAPE = profile_of(long_spec(512).model).architecture
"""Of the 4B shape."""
SHORT, LONG = 16_384, 524_288
INPUT, RESULT = SHORT * SHAPE.input_bytes, SHORT * sum(SHAPE.result_bytes)
"""Bytes of a layer's, for a short sequence."""


def given(policy: str, offload: str = "auto", **changes: str) -> dict[str, str]:
    """Return what is recomputed, and what is offloaded of the rest."""
    found = {"model__activation_checkpointing": policy, "model__activation_offload": offload}
    return found | changes


def found_terms(kind: TermKind, **changes: str) -> list[MemoryTerm]:
    spec = long_spec(SHORT, offload__mode="superoffload", **changes)
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


@pytest.mark.parametrize(
    ("policy", "offload"),
    [("full", "on"), ("selective", "on"), ("attention", "inputs"), ("attention", "off")],
)
def test_attentions_results_stay_otherwise(policy: str, offload: str) -> None:
    assert not found_terms("offloaded-results", **given(policy, offload))


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


@pytest.mark.parametrize(
    ("key", "value"), [("activation_offload", "inputs"), ("activation_checkpointing", "full")]
)
def test_recommendation_keeps_what_is_set(key: str, value: str) -> None:
    found = recommend(long_spec(262_144, **{f"model__{key}": value}), H200).spec.model
    assert getattr(found, key) == value
    assert (found.activation_checkpointing, found.activation_offload) != ("attention", "on")


def test_attention_alone_on_the_host_means_its_policy() -> None:
    plan = make_plan(long_spec(SHORT, model__activation_offload="attention"), H200)
    assert plan.spec.model.activation_checkpointing == "attention"
    less = with_policy(plan.spec, "full").model
    assert (less.activation_checkpointing, less.activation_offload) == ("full", "auto")


@pytest.mark.parametrize(
    ("policy", "offload"),
    [("full", "attention"), ("selective", "attention"), ("none", "attention"), ("none", "on")],
)
def test_what_no_policy_keeps_cannot_be_moved(policy: str, offload: str) -> None:
    with rejected("nothing-to-offload"):
        long_spec(SHORT, **given(policy, offload))


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
    for key, value in (("activation_offload", "off"), ("activation_checkpointing", "none")):
        refused = recommend(long_spec(LONG, **{f"model__{key}": value}), H200)
        assert (refused.fits, getattr(refused.spec.model, key)) == (False, value)


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_a_slow_bus_makes_both_passes_as_long_as_its_copies(policy: str) -> None:
    spec = long_spec(SHORT, **given(policy, "on", offload__mode="gpu"))
    fast = target_of(spec, H200)
    assert fast.resources.speed is not None
    speed = replace(fast.resources.speed, d2h_bytes_per_s=1e8, h2d_bytes_per_s=2e8)
    slow = dataclasses.replace(fast, resources=dataclasses.replace(fast.resources, speed=speed))
    without = with_values(spec, {"model.activation_offload": "off"})
    held, quick, resting = (
        assess(one, on).step for one, on in ((spec, slow), (spec, fast), (without, fast))
    )
    assert held is not None
    assert quick is not None
    assert quick == resting
    moved = SHAPE.layers * (INPUT + (RESULT if policy == "attention" else 0))
    assert held.backward_s == pytest.approx(moved / 2e8)
    assert held.forward_s - quick.forward_s == pytest.approx(moved / 1e8, rel=0.2)


def test_a_run_out_of_memory_is_told_of_them() -> None:
    spec = long_spec(SHORT, **given("full", offload__mode="gpu"))
    savings = memory_advice(spec, "gpu").savings
    keys = {change.key for saving in savings for change in saving.changes}
    assert "model.activation_offload" in keys
