"""Layer inputs in host memory: what plans count for them, and when they are proposed."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from so_tui.model.activations import block_input_bytes
from so_tui.plan import make_plan, recommend
from so_tui.plan.facts.choices import InputsOnHost
from so_tui.plan.facts.remedies import MemoryAdvice
from so_tui.plan.fit import Target, assess, target_of
from so_tui.plan.memory import all_terms
from so_tui.plan.memory_advice import memory_advice
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.spec import InputError, RunSpec, with_values
from tests.support.machines import x86
from tests.support.planning import facts_of, only, spec_of

H200 = x86("NVIDIA H200")
SHORT, LONG = 16_384, 524_288


def long_spec(tokens: int, **changes: str) -> RunSpec:
    one = {"gpus": "1", "train__micro_batch": "1", "train__gradient_accumulation": "1", "data__sequence_length": str(tokens)}
    return spec_of("qwen3-4b-random", **one | changes)


def target(spec: RunSpec) -> Target:
    return target_of(spec, H200)


def found_terms(kind: TermKind, **changes: str) -> list[MemoryTerm]:
    spec = long_spec(SHORT, offload__mode="superoffload", **changes)
    return [term for term in all_terms(assess(spec, target(spec)).placement) if term.kind is kind]


@pytest.mark.parametrize("policy", ["full", "attention", "selective"])
def test_inputs_leave_the_gpu_for_the_host(policy: str) -> None:
    shape = target(long_spec(SHORT)).profile.architecture
    each = SHORT * block_input_bytes(shape)
    (host,) = found_terms(TermKind.OFFLOADED_INPUTS, model__activation_checkpointing=policy, model__activation_offload="on")
    assert (host.location, host.bytes) == ("node", shape.layers * each)
    on_gpu = found_terms(TermKind.LAYER_INPUTS, model__activation_checkpointing=policy, model__activation_offload="on")
    assert [(term.phase, term.bytes) for term in on_gpu] == [("loss", each), ("backward", 2 * each)]
    given = {"model__activation_checkpointing": policy}
    stored, less = (
        sum(term.bytes for term in found_terms(TermKind.ACTIVATIONS, **given, model__activation_offload=offload))
        for offload in ("off", "on")
    )
    assert stored - less == (0 if policy == "full" else 2 * shape.layers * each)
    assert not found_terms(TermKind.OFFLOADED_INPUTS, model__activation_checkpointing=policy)


def test_they_are_proposed_where_only_they_make_a_length_fit() -> None:
    for plan in (recommend(long_spec(LONG), H200), make_plan(long_spec(LONG, offload__ratio="0.45"), H200)):
        assert (plan.fits, plan.spec.model.activation_offload) == (True, "on")
        assert only(plan.reasons, InputsOnHost).bytes > 80e9
        again = make_plan(plan.spec, H200)
        assert (again.gpu_bytes, again.host_bytes_per_node) == (plan.gpu_bytes, plan.host_bytes_per_node)
    for plan in (recommend(long_spec(SHORT), H200), make_plan(long_spec(SHORT), H200)):
        assert (plan.verdict, plan.spec.model.activation_offload) == ("fits", "auto")
        assert not facts_of(plan.reasons, InputsOnHost)


@pytest.mark.parametrize("changes", [{"model__activation_offload": "off"}, {"model__activation_checkpointing": "none"}])
def test_they_are_not_where_they_are_off_or_nothing_is_recomputed(changes: dict[str, str]) -> None:
    plan = recommend(long_spec(LONG, **changes), H200)
    assert not plan.fits
    assert plan.spec.model.activation_offload == changes.get("model__activation_offload", "auto")


def test_without_a_layer_input_there_is_nothing_to_move() -> None:
    with pytest.raises(InputError) as caught:
        long_spec(SHORT, model__activation_checkpointing="none", model__activation_offload="on")
    assert [problem.code for problem in caught.value.problems] == ["nothing-to-offload"]


def test_a_slow_bus_makes_both_passes_as_long_as_its_copies() -> None:
    spec = long_spec(SHORT, offload__mode="gpu", model__activation_checkpointing="full", model__activation_offload="on")
    fast = target(spec)
    speed = fast.resources.speed
    assert speed is not None
    slow_bus = replace(speed, d2h_bytes_per_s=1e8, h2d_bytes_per_s=2e8)
    slow_target = dataclasses.replace(fast, resources=dataclasses.replace(fast.resources, speed=slow_bus))
    slow = assess(spec, slow_target).step
    quick, without = assess(spec, fast).step, assess(with_values(spec, {"model.activation_offload": "off"}), fast).step
    assert slow is not None
    assert quick is not None
    assert quick == without
    shape = fast.profile.architecture
    moved = SHORT * block_input_bytes(shape) * shape.layers
    assert slow.backward_s == pytest.approx(moved / 2e8)
    assert slow.forward_s - quick.forward_s == pytest.approx(moved / 1e8, rel=0.2)


def test_a_run_out_of_memory_is_told_of_them() -> None:
    found = memory_advice(long_spec(SHORT, offload__mode="gpu", model__activation_checkpointing="full"), "gpu")
    assert isinstance(found, MemoryAdvice)
    assert "model.activation_offload" in {change.key for saving in found.savings for change in saving.changes}
