"""Verdicts, shortages and remedies on machines people have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine
from so_tui.plan import notes
from so_tui.plan.fit import _Demand, _judge, best, target_of
from so_tui.plan.planner import make_plan, plan_table, recommend
from so_tui.plan.resources import Supply
from so_tui.plan.workload import Workload
from tests.support.machines import x86
from tests.support.planning import (
    BIG,
    CATALOG,
    CPU_ONLY,
    H200,
    QUAD,
    begun_with,
    facts_of,
    only,
    planned,
    recommended,
    some,
    spec_of,
)
from tests.support.problems import rejected

GIB = 2**30
OFFLOADED = {"gpus": "1", "offload__mode": "superoffload"}
DEEPSPEED = {"offload__engine": "deepspeed"}


def test_llama_70b_does_not_fit_small_parts() -> None:
    plan = recommended("llama-3.3-70b", QUAD, gpus="4")
    assert (plan.fits, plan.verdict, plan.recommended) == (False, "does not fit", False)
    assert plan.possible
    assert isinstance(plan.reasons[0], notes.Shortage)
    larger, more = plan.remedies
    assert isinstance(larger, notes.LargerHostFits)
    assert larger.host_bytes == 480_000_000_000
    assert more == notes.MoreMachinesFit(machines=2, gpus=8)
    assert [reason for reason in plan.reasons if reason in plan.remedies] == [larger, more]


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("train__tokens_per_step", 10**12),
        ("offload__speculation_gib", 10**6),
        ("checkpoint__copies_gib", 10**6),
    ],
)
def test_sizes_have_bounds_within_which_a_plan_counts(key: str, largest: int) -> None:
    plan = planned("llama-3.1-8b", QUAD, **OFFLOADED | {"gpus": "4", key: str(largest)})
    assert plan.fits
    assert plan.model_tflops_per_gpu
    with rejected("out-of-range"):
        spec_of("llama-3.1-8b", **{key: f"{largest}0"})


def test_several_nodes_share_a_model() -> None:
    plan, alone = (planned("llama-3.3-70b", QUAD, nodes=nodes, gpus="4") for nodes in ("2", "1"))
    assert (plan.gpus, len(plan.binding)) == (8, 4)
    assert plan.tokens_per_step == 2 * alone.tokens_per_step
    assert (plan.fits, alone.fits) == (True, False)
    assert plan.gpu_bytes < alone.gpu_bytes
    assert plan.host_bytes_per_node[0] < 0.6 * alone.host_bytes_per_node[0]


def test_too_little_host_memory_is_named() -> None:
    plan = recommended("qwen3-14b", QUAD, offload__states="fp32")
    needs, has = plan.host_bytes_per_node[0], plan.host_capacity_bytes_per_node[0]
    assert plan.shortage == notes.Shortage(
        needs=needs, has=has, fatal=True, pool="node", nodes=(0,)
    )
    assert (plan.fits, plan.reasons[0]) == (False, plan.shortage)
    assert needs > has
    assert only(plan.remedies, notes.MoreGpusFit).gpus == 2


def test_auto_takes_the_gpu_when_everything_fits_there() -> None:
    """And keeps the ratio it was given where it offloads."""
    plan = planned("qwen3-4b-random", H200, gpus="1")
    assert (plan.mode, plan.verdict, plan.spec.offload.mode) == ("gpu", "fits", "gpu")
    assert only(plan.reasons, notes.AutoMode) == notes.AutoMode(mode="gpu", why="fits-on-gpu")
    offloaded = planned("qwen3-14b", BIG, gpus="1", offload__ratio="0.85")
    assert (offloaded.mode, offloaded.ratio) == ("superoffload", 0.85)


@pytest.mark.parametrize("mode", ["auto", "zerooffload"])
def test_deepspeeds_engine_without_a_gpu_is_its_zero_offload(mode: str) -> None:
    spec = spec_of("tiny", offload__mode=mode, **DEEPSPEED)
    for plan in (make_plan(spec, CPU_ONLY), recommend(spec, CPU_ONLY)):
        assert plan.fits
        assert plan.mode == plan.spec.offload.mode == "zerooffload"


def test_tiny_fits_without_a_gpu() -> None:
    plan = planned("tiny", CPU_ONLY)
    assert (plan.fits, plan.mode) == (True, "superoffload")
    assert (plan.gpu_bytes, plan.gpu_capacity_bytes) == (0, None)
    assert [rank.gpu for rank in plan.binding] == [None, None]
    assert set(plan.host_bytes_per_node) == {0}


MI300A = x86("AMD Instinct MI300A")  # with memory of its own
HALF = replace(QUAD, gpus=(replace(QUAD.gpus[0], mig=True), QUAD.gpus[1]))


@pytest.mark.parametrize(
    ("changes", "machine", "blocker"),
    [
        ({"gpus": "5"}, CPU_ONLY, notes.TooFewCores(machine=CPU_ONLY.label, asked=5, cores=4)),
        ({"gpus": "2"}, BIG, notes.TooFewGpus(machine=BIG.label, asked=2, present=1)),
        (
            {"gpus": "[3]"},
            BIG,
            notes.NoSuchGpu(machine=BIG.label, asked=(3,), missing=3, present=(0,)),
        ),
        ({"gpus": "2"}, HALF, notes.TooFewGpus(machine=HALF.label, asked=2, present=1, split=(0,))),
        (
            {"gpus": "[0]"},
            HALF,
            notes.NoSuchGpu(machine=HALF.label, asked=(0,), missing=0, present=(1,), split=(0,)),
        ),
        ({"offload__mode": "gpu"}, CPU_ONLY, notes.ModeNeedsGpu(machine=CPU_ONLY.label)),
        (OFFLOADED | DEEPSPEED, CPU_ONLY, notes.EngineNeedsGpu()),
        ({"gpus": "1"}, MI300A, notes.AmdGpu(gpu=0, name="AMD Instinct MI300A")),
    ],
)
def test_blocked_plan_says_why(
    changes: dict[str, str], machine: Machine, blocker: notes.Fact
) -> None:
    plan = planned("tiny", machine, **changes)
    assert (plan.fits, plan.possible, plan.step_s) == (False, False, None)
    assert plan.verdict == "does not fit"
    assert plan.reasons[0] == blocker


def test_table_has_no_fitting_cell_of_too_many_gpus() -> None:
    rows = plan_table(list(CATALOG.presets.values()), QUAD, (5, 8))
    assert not any(cell.fits or cell.possible for row in rows for cell in row.cells.values())


def test_deepspeeds_engine_is_warned_about_when_it_clips() -> None:
    warned, own = (
        planned("qwen3-14b", BIG, **OFFLOADED | engine).warnings for engine in (DEEPSPEED, {})
    )
    assert (only(warned, notes.ClippingWaits).seconds or 0) > 0
    assert not facts_of(own, notes.ClippingWaits)


def test_recomputing_is_chosen_and_can_be_a_remedy() -> None:
    name, none = "qwen3-4b-random", {"model__activation_checkpointing": "none"}
    small = x86("NVIDIA H100 80GB HBM3", gpu_mib=81_559)
    for machine, chosen in ((H200, "none"), (small, "selective")):
        plan = planned(name, machine, **OFFLOADED)
        assert plan.spec.model.activation_checkpointing == chosen
    refused = planned(name, x86("NVIDIA H100 80GB HBM3", gpu_mib=40_000), **OFFLOADED | none)
    assert not refused.fits
    full = notes.Change("model.activation_checkpointing", "none", "full")
    assert only(refused.remedies, notes.FitsHere).changes == (full,)


def test_all_gpus_of_a_machine_are_a_remedy() -> None:
    three = x86("NVIDIA A100", gpu_count=3, cores=48, memory_mib=384 * 1024, gpu_mib=17_920)
    one, two, all_of_them = (
        recommended("llama-3.1-8b", three, gpus=gpus, offload__parameters="none")
        for gpus in ("1", "2", "3")
    )
    assert (two.fits, all_of_them.fits) == (False, True)
    assert only(one.remedies, notes.MoreGpusFit).gpus == 3


def test_a_needless_ratio_is_priced() -> None:
    plan = recommended("qwen3-4b-random", H200, offload__ratio="1.0", **OFFLOADED)
    faster = only(plan.warnings, notes.FasterWithout)
    assert faster.step_s < faster.given_step_s == plan.step_s
    assert plan.ratio == 1.0
    assert {"offload.ratio"} <= {change.key for change in faster.changes} <= set(plan.spec.fixed)
    free = recommended("qwen3-4b-random", H200)
    assert free.step_s == pytest.approx(faster.step_s, rel=0.01)
    assert not facts_of(free.warnings, notes.FasterWithout)


def test_the_ratio_proposed_does_not_depend_on_the_given_mode() -> None:
    """ZeRO-Offload counts sub-groups, and what is proposed in its place does not."""
    machine = named_machine("gb200-4")
    sizes = {"gpus": "1", "model__activation_checkpointing": "selective"}
    proposed = {
        best(spec, target_of(spec, machine)).spec.offload.ratio
        for mode in ("zerooffload", "superoffload")
        for spec in [begun_with("gpt-oss-20b", offload__mode=mode, **sizes)]
    }
    assert len(proposed) == 1


def test_a_memory_limit_of_the_session_counts() -> None:
    """That of all nodes together."""
    demand = _Demand(gpu_bytes=0, node_bytes={0: 60 * GIB, 1: 50 * GIB}, shm_bytes=0)
    has = dict.fromkeys((0, 1), 200 * GIB)
    supply = Supply(gpu_bytes=None, node_bytes=has, shm_bytes=None, limit_bytes=100 * GIB)
    verdict, (shortage,) = _judge(demand, supply)
    assert (verdict, shortage.pool, shortage.needs) == ("does not fit", "limit", 110 * GIB)


def test_memory_of_nodes_that_a_cpuset_leaves_out_does_not_count() -> None:
    """A job with GPUs 0 and 1 whose cpuset has memory of node 1 only: both ranks' states come from
    there.
    """
    changes = OFFLOADED | {"gpus": "2", "offload__speculation": "off"}
    whole, part = (
        planned("qwen3-14b", machine, **changes)
        for machine in (QUAD, replace(QUAD, allowed_memory_nodes=(1,)))
    )
    assert part.host_bytes_per_node == {1: sum(whole.host_bytes_per_node.values())}
    assert part.host_capacity_bytes_per_node == {1: whole.host_capacity_bytes_per_node[1]}
    assert (whole.fits, part.fits) == (True, False)
    assert some(part.shortage).nodes == (1,)


def test_rank_takes_memory_from_the_nearest_node() -> None:
    distances = ((10, 40, 20, 40), (40, 10, 40, 20), (20, 40, 10, 40), (40, 20, 40, 10))
    nodes = tuple(
        replace(node, distances=row) for node, row in zip(QUAD.cpu_nodes, distances, strict=True)
    )
    job = replace(QUAD, numa_nodes=nodes, allowed_memory_nodes=(0, 1))
    plan = planned("llama-3.1-8b", job, **OFFLOADED | {"gpus": "4"})
    once = sum(term.bytes for term in plan.breakdown if term.location == "node" and term.rank == 0)
    # Ranks 0 and 2, ranks 1 and 3.
    assert set(plan.host_bytes_per_node) == {0, 1}
    assert plan.host_bytes_per_node[0] - plan.host_bytes_per_node[1] == once


def test_ranks_that_share_a_node_add_up_there() -> None:
    two = planned("qwen3-4b-random", x86("NVIDIA H200", gpu_count=2), **OFFLOADED | {"gpus": "2"})
    each, once = (
        sum(term.bytes for term in two.breakdown if (term.location, term.rank) == ("node", rank))
        for rank in (None, 0)
    )
    assert two.host_bytes_per_node == {0: 2 * each + once}


def test_nothing_is_recommended_for_gpus_of_unknown_memory() -> None:
    unknown = replace(BIG, gpus=(replace(BIG.gpus[0], memory_total_bytes=None),))
    for name in ("tiny", "qwen3-14b"):
        plan = recommended(name, unknown)
        assert (plan.verdict, plan.recommended) == ("tight", False)
        assert (plan.mode, plan.ratio) == ("superoffload", 1.0)
        assert facts_of(plan.warnings, notes.GpuMemoryUnknown)
        assert not facts_of(plan.reasons, notes.AllOnGpu)
        auto = only(planned(name, unknown, gpus="1").reasons, notes.AutoMode)
        assert auto.why == "gpu-memory-unknown"
    rows = plan_table(list(CATALOG.presets.values()), unknown)
    assert not any(plan.recommended for row in rows for plan in row.cells.values())


def test_tight_without_offload_is_planned_at_last() -> None:
    """Between the two margins of the GPU, with a host too small for the states: closer than any
    offload.
    """
    nodes = tuple(
        replace(node, memory_total_bytes=16 * GIB) if node.kind == "cpu" else node
        for node in BIG.numa_nodes
    )
    gpu = replace(BIG.gpus[0], memory_total_bytes=71 * GIB)
    spec = spec_of("qwen3-4b-random", gpus="1")
    found = best(spec, target_of(spec, replace(BIG, gpus=(gpu,), numa_nodes=nodes)))
    assert (found.spec.offload.mode, found.verdict) == ("gpu", "tight")


def test_what_padding_costs_is_said_with_the_reason_for_it() -> None:
    spec = spec_of("qwen3-14b", data__packing="false")
    # With boundaries padding is not computed.
    assert not facts_of(make_plan(spec, BIG).warnings, notes.PackingOff)
    masked = planned("qwen3-14b", BIG, data__packing="false", model__attention="sdpa")
    assert only(masked.warnings, notes.PackingOff) == notes.PackingOff(
        padding_share=None, mixing=()
    )
    chunked = spec.model.config | {"layer_types": ["chunked_attention", "full_attention"] * 20}
    spec = replace(spec, model=replace(spec.model, config=chunked))
    found = only(
        make_plan(spec, BIG, workload=Workload(useful_share=0.25)).warnings, notes.PackingOff
    )
    assert found == notes.PackingOff(padding_share=0.75, mixing=("chunked_attention",))


@pytest.mark.parametrize(("length", "warned"), [(40_960, False), (65_536, True)])
def test_sequences_beyond_positions_are_pointed_out(length: int, warned: bool) -> None:
    changes = {"data__sequence_length": str(length), "train__micro_batch": "1"}
    found = facts_of(planned("qwen3-14b", BIG, **changes).warnings, notes.BeyondPositions)
    assert found == (
        [notes.BeyondPositions(sequence_length=65_536, positions=40_960)] if warned else []
    )


def test_dropout_that_nothing_applies_is_named() -> None:
    config = {"attn_pdrop": 0.2, "hidden_dropout": 0.0, "classifier_dropout": 0.1}
    seed_oss = only(planned("seed-oss-36b", BIG).warnings, notes.DropoutOff)
    assert [each.key for each in seed_oss.found] == ["attention_dropout", "residual_dropout"]
    assert not facts_of(planned("qwen3-14b", BIG).warnings, notes.DropoutOff)
    spec = spec_of("qwen3-14b")
    spec = replace(spec, model=replace(spec.model, config=spec.model.config | config))
    fact = only(make_plan(spec, BIG).warnings, notes.DropoutOff)
    assert fact == notes.DropoutOff(found=(notes.Dropout("attn_pdrop", 0.2),))
    assert "attn_pdrop = 0.2" in fact.message
