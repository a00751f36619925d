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
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.remedies import _memory_advice
from so_tui.plan.search import with_policy
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.spec import RunSpec, find_preset, with_values
from tests.support.machines import superchips, x86
from tests.support.planning import facts_of, long_spec, only, step_of
from tests.support.problems import rejected

H200 = x86("NVIDIA H200")
SHAPE_4B = profile_of(find_preset("qwen3-4b-random").spec.model).architecture
SHORT, LONG = 16_384, 524_288


def target(spec: RunSpec) -> Target:
    return target_of(spec, H200)


def found_terms(kind: TermKind, **changes: str) -> list[MemoryTerm]:
    spec = long_spec(SHORT, offload__mode="superoffload", **changes)
    return [term for term in _all_terms(assess(spec, target(spec)).placement) if term.kind == kind]


@pytest.mark.parametrize("policy", ["full", "attention", "selective"])
def test_inputs_leave_the_gpu_for_the_host(policy: str) -> None:
    shape = target(long_spec(SHORT)).profile.architecture
    each = SHORT * block_input_bytes(shape)
    given = {"model__activation_checkpointing": policy}
    moved = given | {"model__activation_offload": "on"}
    (host,) = found_terms("offloaded-inputs", **moved)
    assert (host.location, host.bytes) == ("node", shape.layers * each)
    on_gpu = found_terms("layer-inputs", **moved)
    assert [(term.phase, term.bytes) for term in on_gpu] == [("loss", each), ("backward", 2 * each)]
    stored, less = (
        sum(term.bytes for term in found_terms("activations", **changes))
        for changes in (given | {"model__activation_offload": "off"}, moved)
    )
    results = SHORT * attention_bytes(shape) if policy == "attention" else 0
    assert stored - less == (0 if policy == "full" else 2 * shape.layers * (each + results))
    assert not found_terms("offloaded-inputs", **given)


@pytest.mark.parametrize("offload", ["on", "attention"])
def test_attentions_results_leave_the_gpu_with_them_or_alone(offload: str) -> None:
    """The GPU holds those of two layers in backward, and one in the loss."""
    shape = target(long_spec(SHORT)).profile.architecture
    each = SHORT * attention_bytes(shape)
    given = {"model__activation_checkpointing": "attention", "model__activation_offload": offload}
    (host,) = found_terms("offloaded-results", **given)
    assert (host.location, host.bytes) == ("node", shape.layers * each)
    on_gpu = found_terms("attention-results", **given)
    assert [(term.phase, term.bytes) for term in on_gpu] == [("loss", each), ("backward", 2 * each)]
    inputs = sum(term.bytes for term in found_terms("offloaded-inputs", **given))
    every = SHORT * block_input_bytes(shape) * shape.layers
    assert inputs == (every if offload == "on" else 0)
    stored = found_terms("activations", **given)
    assert inputs + sum(term.bytes for term in stored if term.phase == "backward") == every


@pytest.mark.parametrize(
    ("policy", "offload"),
    [("full", "on"), ("selective", "on"), ("attention", "inputs"), ("attention", "off")],
)
def test_attentions_results_stay_otherwise(policy: str, offload: str) -> None:
    given = {"model__activation_checkpointing": policy, "model__activation_offload": offload}
    assert not found_terms("offloaded-results", **given)


def test_layers_without_attention_keep_none_of_its_results() -> None:
    shape = replace(target(long_spec(SHORT)).profile.architecture, other_layers=27)
    model = long_spec(
        SHORT, model__activation_checkpointing="attention", model__activation_offload="attention"
    ).model
    assert offloaded_bytes(shape, model) == attention_bytes(shape) * (shape.layers - 27)


def chosen(plan: Plan) -> tuple[str, str, str]:
    model = plan.spec.model
    return plan.verdict, model.activation_checkpointing, model.activation_offload


def test_results_are_moved_instead_of_computed_again() -> None:
    """256k tokens of the 4B shape: layer inputs and results together are more than the host has
    beside the states.
    """
    spec = long_spec(262_144)
    found = recommend(spec, H200)
    assert chosen(found) == ("fits", "attention", "attention")
    fact = only(found.reasons, InputsOnHost)
    assert (fact.bytes, fact.exposed_s) == (0, 0)
    assert fact.results_bytes > 70e9
    assert 0 < (fact.out_s or 0) < step_of(found).forward_s
    without = recommend(with_values(spec, {"model.activation_offload": "off"}), H200)
    assert chosen(without)[:2] == ("fits", "full")
    assert step_of(found).total_s < 0.85 * step_of(without).total_s


def test_layer_inputs_follow_where_the_host_has_more_memory() -> None:
    found = recommend(long_spec(LONG), superchips(1, node_mib=480_000))
    assert chosen(found) == ("fits", "attention", "on")
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
    given = {"model__activation_checkpointing": policy, "model__activation_offload": offload}
    with rejected("nothing-to-offload"):
        long_spec(SHORT, **given)


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
def test_inputs_stay_where_off_or_nothing_is_recomputed(changes: dict[str, str]) -> None:
    plan = recommend(long_spec(LONG, **changes), H200)
    assert not plan.fits
    assert plan.spec.model.activation_offload == changes.get("model__activation_offload", "auto")


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_a_slow_bus_makes_both_passes_as_long_as_its_copies(policy: str) -> None:
    given = {"offload__mode": "gpu", "model__activation_checkpointing": policy}
    spec = long_spec(SHORT, model__activation_offload="on", **given)
    fast = target(spec)
    assert fast.resources.speed is not None
    speed = replace(fast.resources.speed, d2h_bytes_per_s=1e8, h2d_bytes_per_s=2e8)
    resources = dataclasses.replace(fast.resources, speed=speed)
    slow, quick, without = (
        assess(one, on).step
        for one, on in (
            (spec, dataclasses.replace(fast, resources=resources)),
            (spec, fast),
            (with_values(spec, {"model.activation_offload": "off"}), fast),
        )
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
