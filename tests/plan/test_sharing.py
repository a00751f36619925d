"""Ranks that share sequences, and several hosts: what plans count for them, when they are proposed,
what is refused, and what the network between hosts costs.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine, Network
from so_tui.plan.fit import target_of
from so_tui.plan.notes import AcrossHosts, FitsHere, SequencesNotShareable, SequencesShared
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.resources import exchanged_bytes, more_sharing
from so_tui.spec import RunSpec, problems_in, spec_tree
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import CPU_ONLY, QUAD, facts_of, only, planned, spec_of, step_of
from tests.support.problems import rejected
from tests.support.trees import smallest

H200S = x86("NVIDIA H200", gpu_count=4, cores=64, memory_mib=512 * 1024)
LONG = 1_048_576


def long_spec(tokens: int, gpus: int = 2, ranks: int = 1, **changes: str) -> RunSpec:
    given = {"offload__mode": "superoffload", "model__activation_checkpointing": "full"}
    given |= {"gpus": str(gpus), "train__sequence_parallel": str(ranks)}
    return planning.long_spec(tokens, **given | changes)


def test_a_step_trains_half_the_sequences_and_waits() -> None:
    """For the exchange. Key heads are sent to every rank where there are fewer."""
    shared, whole = (make_plan(long_spec(65_536, ranks=ranks), H200S) for ranks in (2, 1))
    assert 2 * shared.tokens_per_step == whole.tokens_per_step
    assert 0.5 < step_of(shared).total_s / step_of(whole).total_s < 0.7
    shape = target_of(long_spec(65_536), H200S).profile.architecture
    # 32 heads and 8 key heads of 128
    assert exchanged_bytes(shape, 4) == 4 * (4096 + 1024) * 3 / 4
    assert exchanged_bytes(shape, 16) == 4 * (4096 + 2048) * 15 / 16


def test_sharing_is_recommended_where_only_it_fits() -> None:
    given = replace(long_spec(LONG, gpus=4), fixed=("gpus",))
    plan = recommend(given, H200S)
    assert (plan.fits, plan.tokens_per_step) == (True, 4 * LONG)
    shared = only(plan.reasons, SequencesShared)
    assert plan.spec.train.sequence_parallel == shared.ranks > shared.given == 1
    assert make_plan(plan.spec, H200S).gpu_bytes == plan.gpu_bytes
    assert not facts_of(recommend(long_spec(65_536, gpus=4), H200S).reasons, SequencesShared)


def test_sharing_is_a_remedy_with_the_tokens_of_a_step_unchanged() -> None:
    plan = make_plan(long_spec(LONG, gpus=4), H200S)
    assert not plan.fits
    changes = {change.key: change.after for change in only(plan.remedies, FitsHere).changes}
    assert changes["train.sequence_parallel"] == changes["train.gradient_accumulation"]


def test_only_ranks_that_divide_the_heads_are_tried() -> None:
    phi = spec_of("phi-4", gpus="8")  # 40 heads, 10 key heads
    for given, ranks in ((long_spec(LONG, gpus=12), [2, 4]), (phi, [2])):
        assert [spec.train.sequence_parallel for spec in more_sharing(given)] == ranks


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phi-4", {"train__sequence_parallel": "4"}),
        ("qwen3-4b-random", {"model__attention": "sdpa"}),
    ],
)
def test_what_cannot_share_is_refused(name: str, changes: dict[str, str]) -> None:
    plan = planned(name, H200S, **{"gpus": "4", "train__sequence_parallel": "2"} | changes)
    assert not plan.possible
    assert only(plan.reasons, SequencesNotShareable).ranks in (2, 4)
    alone = planned("tiny", CPU_ONLY, gpus="2", train__sequence_parallel="2")
    assert facts_of(alone.reasons, SequencesNotShareable), "nothing can without a GPU"


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", "conv"])
def test_layers_that_see_a_part_are_refused(kind: str) -> None:
    """Recurrences and convolutions carry state from token to token, chunks are counted from the
    start of a row.
    """
    given = long_spec(LONG, data__packing="false")
    config = given.model.config | {"layer_types": ["full_attention", kind]}
    hybrid = replace(given, model=replace(given.model, config=config))
    assert list(more_sharing(given))
    assert not list(more_sharing(hybrid))
    shared = spec_tree(replace(hybrid, train=replace(hybrid.train, sequence_parallel=2)))
    assert [problem.code for problem in problems_in(shared)] == ["sequence-parallel-layers"]


def test_the_length_that_a_spec_leaves_out_counts_too() -> None:
    tree = smallest(gpus=3, train={"sequence_parallel": 3})
    assert [problem.code for problem in problems_in(tree)] == ["sequence-parallel-length"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"gpus": "3"}, "sequence-parallel-gpus"),
        ({"gpus": "0,1,2"}, "sequence-parallel-gpus"),
        ({"gpus": "2", "data__sequence_length": "4095"}, "sequence-parallel-length"),
        ({"gpus": "2", "train__router_loss_coefficient": "0.001"}, "sequence-parallel-router"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_its_key(changes: dict[str, str], code: str) -> None:
    with rejected(code):
        spec_of("qwen3-30b-a3b", **{"train__sequence_parallel": "2"} | changes)


def with_network(gbit_per_s: float) -> Machine:
    return replace(QUAD, network=Network(gbit_per_s=gbit_per_s, source="a test"))


def across(machine: Machine, **changes: str) -> Plan:
    given = {"gpus": "4", "nodes": "2", "offload__mode": "superoffload"}
    return planning.planned("qwen3-14b", machine, **given | changes)


def test_weights_travel_twice_and_gradients_once() -> None:
    plan = across(QUAD, train__micro_batch="1", train__gradient_accumulation="2")
    fact, parameters = only(plan.reasons, AcrossHosts), plan.spec.model.parameter_count
    assert (fact.machines, fact.ranks) == (2, 8)
    assert fact.bytes_per_step == pytest.approx(2 * 3 * 2 * parameters * 7 / 8, rel=1e-3)
    assert not facts_of(across(QUAD, nodes="1").reasons, AcrossHosts)


def test_slower_network_sets_the_pace() -> None:
    fast, slow = across(with_network(8000)), across(with_network(100))
    alone, held_up = (only(plan.reasons, AcrossHosts) for plan in (fast, slow))
    assert alone.longer_s == 0
    assert held_up.seconds == pytest.approx(held_up.bytes_per_step / (0.9 * 100e9 / 8))
    assert slow.step_s == pytest.approx((fast.step_s or 0) + (held_up.longer_s or 0))
    slowest = across(with_network(10))
    once_s = (only(slowest.reasons, AcrossHosts).seconds or 0.0) / 3
    step = step_of(slowest)
    assert step.forward_s >= once_s
    assert step.backward_s >= 2 * once_s


def test_only_adapters_of_gpus_that_take_part_carry() -> None:
    four, one = (
        planning.planned("llama-3.1-8b", with_network(100), gpus=gpus, nodes=nodes)
        for gpus, nodes in (("4", "2"), ("1", "8"))
    )
    seconds = [only(plan.reasons, AcrossHosts).seconds or 0.0 for plan in (four, one)]
    assert seconds[1] == pytest.approx(4 * seconds[0])


def test_an_unknown_network_is_assumed_and_said_to_be() -> None:
    fact = only(across(QUAD).reasons, AcrossHosts)
    assert (fact.network.gbit_per_s, fact.network.source) == (800, "")
    assert "assumed" in fact.message
    vista = planning.planned("tiny", named_machine("gh200-120"), gpus="1", nodes="2")
    assert "NDR" in only(vista.reasons, AcrossHosts).message
