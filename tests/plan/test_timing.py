"""The step model against steps measured on H200 hosts with PCIe: Qwen3 4B shape, 4 x 4096 tokens,
whole layers repeated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.machine import Machine
from so_tui.model.profile import profile_of
from so_tui.plan.notes import FasterAttention
from so_tui.plan.placement import Placement
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import AttentionRate, Speed, _rate_at, constants, published_speed
from so_tui.plan.step_time import StepModel, _arrivals, _Pass, _Update, _weight_wait_s
from so_tui.plan.workload import Workload
from so_tui.spec import with_values
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import facts_of, only, spec_of, step_of

QWEN = "qwen3-4b-random"
SPEC = spec_of(QWEN)
ONE = Speed(
    matrix_flops=1,
    hbm_bytes_per_s=1,
    d2h_bytes_per_s=1,
    h2d_bytes_per_s=1,
    pageable_d2h_bytes_per_s=1,
    peer_bytes_per_s=1,
    layer_launch_overhead_s=1,
    adam=(),
    node_bytes_per_s=1,
    source="",
)
GPU = {"offload__mode": "gpu"}
OURS = {"offload__mode": "superoffload"}
ZERO = {"offload__mode": "zerooffload"}
CLIPPED = OURS | {"train__gradient_clipping": "1"}
EARLY = CLIPPED | {"offload__speculation": "on"}
UNCLIPPED = {"train__gradient_clipping": "0"}
SMALL = {"offload__sub_group_size": "100000000"}
EIGHT = {"train__gradient_accumulation": "8"}
FULL = {"gpus": "1", "model__activation_checkpointing": "full"}
TINY_PASSES = {"train__micro_batch": "1", "data__sequence_length": "512"}
MEASURED = (
    FULL
    | UNCLIPPED
    | {
        "model__kernels": "plain",
        "offload__ratio": "0.9",
        "offload__sub_group_size": "400000000",
        "offload__speculation": "off",
    }
)


def host(gpus: int = 1, cores: int = 16, memory_gib: int = 512, **software: str) -> Machine:
    machine = x86("NVIDIA H200", gpu_count=gpus, cores=cores, memory_mib=memory_gib * 1024)
    return replace(machine, software=replace(machine.software, **software))


FLASH_4 = {"flash_attn_4": "4.0.0b36"}


def planned(gpus: int = 1, cores: int = 16, /, **changes: str) -> Plan:
    given = MEASURED | {"gpus": str(gpus)} | changes
    return planning.planned(QWEN, host(gpus, cores), **given)


def step_s(plan: Plan) -> float:
    return step_of(plan).total_s


def exposed_s(gpus: int = 1, cores: int = 16, /, **changes: str) -> float:
    return step_of(planned(gpus, cores, **changes)).exposed_optimizer_s


@pytest.mark.parametrize(
    ("gpus", "cores", "changes", "measured_s", "exposed"),
    [
        (1, 16, OURS, 1.71, 0.10),
        (1, 16, CLIPPED, 2.24, None),
        (1, 16, EARLY, 1.77, None),
        (1, 16, CLIPPED | {"offload__engine": "deepspeed"}, 7.13, None),
        (1, 16, OURS | EIGHT, 13.26, None),
        (1, 64, OURS, 1.70, 0.065),
        (2, 64, OURS, 1.74, 0.171),
        (2, 32, OURS | SMALL, 1.68, None),
        (2, 32, EARLY | SMALL, 1.72, None),
        (4, 64, GPU, 1.62, None),
        (4, 64, OURS, 1.86, 0.262),
    ],
)
def test_measured_steps_are_met(
    gpus: int, cores: int, changes: dict[str, str], measured_s: float, exposed: float | None
) -> None:
    """``zerooffload`` took 5.09 s there, which is missed (benchmarks/planner.md). Of what Adam
    leaves exposed: the sub-group whose gradient comes last is the one that the next forward wants
    first.
    """
    plan = planned(gpus, cores, **changes)
    assert plan.step_s == step_s(plan) == pytest.approx(measured_s, rel=0.15)
    found_s = step_of(plan).exposed_optimizer_s
    assert exposed is None or found_s == pytest.approx(exposed, abs=0.05)


PACKED = Workload(attended_tokens=300, trained_share=0.92, useful_share=1.0)


@pytest.mark.parametrize(("states", "measured_s"), [("bf16-moments", 1.19), ("int8-moments", 1.29)])
def test_steps_with_compact_moments_are_met(states: str, measured_s: float) -> None:
    """benchmarks/results/whole-program-h200.json: packed Alpaca rows, everything saved, norms
    within the limit, second states for all.
    """
    changes = OURS | {"offload__states": states, "offload__speculation": "on"}
    changes |= {"gpus": "1", "model__activation_checkpointing": "none"}
    plan = planning.planned(QWEN, host(memory_gib=251), PACKED, **changes)
    assert plan.step_s == pytest.approx(measured_s, rel=0.15)


def test_second_states_for_more_shorten_the_wait() -> None:
    """Of what is offloaded. Without any, Adam waits for the norm."""
    exposed = [exposed_s(**EARLY, offload__speculation_gib=str(gib)) for gib in (1, 15, 30, 47)]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > 2 * exposed[-1]
    assert 0.3 < exposed_s(**CLIPPED) - exposed_s(**OURS) < 0.6


def published() -> Speed:
    found = published_speed("NVIDIA H200")
    assert found is not None
    return found


def test_copies_of_zerooffload_hide_behind_the_gpu_only() -> None:
    """Not behind Python: every gradient in bf16 for its partition, and in fp32 for the
    optimizer's, at the link's rate.
    """

    def longer_s(**changes: str) -> float:
        theirs, gpu = (
            step_of(planned(offload__ratio="1.0", **mode, **changes)).backward_s
            for mode in (ZERO, GPU)
        )
        return theirs - gpu

    assert longer_s(train__micro_batch="8") == 0
    copies_s = 6 * SPEC.model.parameter_count / published().d2h_bytes_per_s
    assert longer_s(**TINY_PASSES) == pytest.approx(copies_s, rel=0.01)


@pytest.mark.parametrize(
    ("adam_s", "ready_s", "waited_s"),
    [
        # Held back: 1 s each. Forward waits 1 s for the first half, computes it for 0.5 s, waits
        # 0.5 s for the second.
        (1.0, (0.0, 0.0), 1.5),
        # Beside a backward of 2 s: the second half is complete 1 s before its end and stepped by
        # then, the first at the end.
        (1.0, (0.0, -1.0), 1.0),
        (1e-9, (0.0, -1.0), 0.0),
    ],
)
def test_weights_are_waited_for_one_sub_group_at_a_time(
    adam_s: float, ready_s: tuple[float, ...], waited_s: float
) -> None:
    """Of equal parts of a model whose forward takes 1 s."""
    parts = [_Update(part / len(ready_s), ready, adam_s, 0) for part, ready in enumerate(ready_s)]
    found = _weight_wait_s(parts, 1e30, 0.0, forward_s=1.0, forward_begins_s=0.0)
    assert found == pytest.approx(waited_s, abs=1e-6)


def test_the_worker_takes_what_forward_uses_first() -> None:
    """Of four quarters that are ready 0.5 s after each other and take 1 s each, the last to come
    and the first to be used overtakes.
    """
    quarters = [_Update(part, -2 * part, 1.0, 0) for part in (0.75, 0.5, 0.25, 0.0)]
    found = dict(_arrivals(quarters, 1e30, 0.0))
    assert found == {0.75: -0.5, 0.25: 0.5, 0.0: 1.5, 0.5: 2.5}


def test_what_is_computed_anew_is_launched_anew() -> None:
    """Where layers are too small to keep a GPU busy, Python is what repeating them costs: once more
    a forward's. Elsewhere less repetition is faster.
    """
    small, large = (
        [
            step_of(planned(**GPU | sizes, model__activation_checkpointing=policy))
            for policy in ("none", "selective", "full")
        ]
        for sizes in (TINY_PASSES, {})
    )
    assert large[0].total_s < large[1].total_s < large[2].total_s
    none, selective, full = (step.backward_s for step in small)
    launches = constants().step.forward_launches_per_layer
    layers = SPEC.model.config["num_hidden_layers"]
    forward_s = launches * published().layer_launch_overhead_s * layers
    assert full == selective == pytest.approx(none + forward_s)


def test_gathering_takes_from_what_computes() -> None:
    def pass_of(sequence_length: str, gather_s: float) -> _Pass:
        changes = {"data__sequence_length": sequence_length}
        spec = spec_of(QWEN, model__activation_checkpointing="none", **changes)
        profile, ranks, speed = profile_of(spec.model), 1, published()
        if gather_s:
            ranks, speed = 2, replace(speed, peer_bytes_per_s=profile.parameters / gather_s)
        layout = profile.layout(ranks, spec.offload)
        placement = Placement(spec=spec, profile=profile, layout=layout, local_ranks=ranks)
        model = StepModel(placement=placement, speed=speed)
        assert model.all_gather_s == pytest.approx(gather_s)
        return model.one_pass

    share_s = constants().step.all_gather_share * 0.01
    without, beside = pass_of("4096", 0.0), pass_of("4096", 0.01)
    assert beside.forward_s - without.forward_s == pytest.approx(share_s)
    assert beside.backward_s - without.backward_s == pytest.approx(2 * share_s)
    waiting, slow = pass_of("128", 0.001), pass_of("128", 10.0)
    assert waiting == pass_of("128", 0.01)
    assert waiting.forward_s > pass_of("128", 0.0).forward_s, "gathering has its own Python"
    assert slow.forward_s > 10
    assert slow.backward_s >= 20


def test_short_documents_and_untrained_tokens_cost_less() -> None:
    short = Workload(attended_tokens=200, trained_share=0.4, useful_share=0.97)
    whole, packed = (planning.planned(QWEN, host(), data, **FULL | GPU) for data in (None, short))
    assert step_s(packed) < 0.95 * step_s(whole)
    useful = 0.97 * packed.tokens_per_step / step_s(packed)
    assert packed.useful_tokens_per_s_total == pytest.approx(useful)


def test_adam_rates_lie_on_lines_between_what_was_measured() -> None:
    speed = replace(ONE, adam=((2, 20.0), (10, 60.0)), node_bytes_per_s=100.0)
    rates = [speed.adam_bytes_per_s(cores, 1) for cores in (1, 2, 6, 10, 40)]
    assert rates == [10.0, 20.0, 40.0, 60.0, 60.0]
    assert speed.adam_bytes_per_s(10, 4) == 15.0  # what 40 cores have together, by four
    assert speed.adam_bytes_per_s(2, 2) == 15.0
    assert replace(speed, node_bytes_per_s=40.0).adam_bytes_per_s(10, 4) == 10.0
    together = replace(speed, adam_together=((2, 14.0), (4, 12.0)))
    rates = [together.adam_bytes_per_s(10, ranks) for ranks in (1, 2, 3, 4)]
    assert rates == [60.0, 14.0, 14.0, 12.0]


def test_ranks_that_wait_take_as_long_as_the_slowest() -> None:
    by_ranks = ((2, 1.9), (4, 3.0))
    speed = replace(ONE, layer_launch_overhead_s=2.0, layer_launch_overhead_by_ranks=by_ranks)
    taken = [speed.layer_launch_overhead_of(ranks) for ranks in (1, 2, 3, 4, 8)]
    assert taken == [2.0, 2.0, 2.0, 3.0, 3.0]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LONG = [
    row
    for name in ("length-h200", "length-h200-x2")
    for row in json.loads((RESULTS / f"{name}.json").read_text())
]


def planned_row(row: dict[str, Any]) -> Plan:
    """Plan what a row measured, at published rates."""
    values = {"gpus": str(row["gpus"]), "train.micro_batch": "1", "offload.ratio": "0.9"}
    values |= dict(change.split("=", 1) for change in row["set"]) | row.get("chosen", {})
    values |= {
        "data.sequence_length": str(row["sequence_length"]),
        "model.activation_checkpointing": row["policy"],
        "model.attention": row["backend"],
        "offload.mode": "superoffload",
        "train.gradient_clipping": "0",
        "train.gradient_accumulation": "1",
    }
    machine = host(row["gpus"], 16 * row["gpus"], 125 * row["gpus"], **FLASH_4)
    data = Workload(attended_tokens=float(row["document"]))
    return make_plan(with_values(spec_of(row["preset"]), values), machine, workload=data)


IDS = ("preset", "gpus", "sequence_length", "document", "backend")


@pytest.mark.parametrize("row", LONG, ids=lambda row: "-".join(str(row[key]) for key in IDS))
def test_memory_and_steps_of_long_sequences_are_planned(row: dict[str, Any]) -> None:
    """Memory as torch reserved it: nothing is planned too small by more than 1 %, and where weights
    are on the GPU too large by more than 5 %. Each part of a step is within 5 % of the step, but
    for one row, whose Adam was 14 % slower than that of the same model with other documents; where
    two GPUs share a sequence, within 6 %.
    """
    plan, measured = planned_row(row), row["gpu_reserved_gib"] * 2**30
    more = 0.12 if plan.spec.offload.parameters == "cpu" else 0.05
    assert -0.01 * measured < plan.gpu_reserved_bytes - measured < more * measured
    step = step_of(plan)
    off = {
        "forward": step.forward_s - row["forward_s"],
        "backward": step.backward_s - row["backward_s"],
    }
    if (row["sequence_length"], row["document"]) != (8192, 8192):
        off["optimizer"] = step.exposed_optimizer_s - row["optimizer_s"]
        off["step"] = step.total_s - row["step_s"]
    most_s = (0.05 if row["gpus"] == 1 else 0.06) * row["step_s"]
    assert {name: error for name, error in off.items() if abs(error) > most_s} == {}


def test_a_faster_backend_is_named_where_it_would_gain() -> None:
    short, long = (
        planning.planned(
            QWEN, host(), gpus="1", data__sequence_length=length, train__micro_batch="1"
        ).warnings
        for length in ("2048", "32768")
    )
    assert not facts_of(short, FasterAttention)
    named = only(long, FasterAttention)
    assert (named.backend, named.used) == ("flash-attn-4", "torch-flash")
    assert named.step_s < 0.9 * named.given_step_s


def test_padding_takes_no_time_where_attention_takes_boundaries() -> None:
    whole = Workload(attended_tokens=300, trained_share=0.3)
    boundaries, mask = (
        [
            step_of(
                planning.planned(QWEN, host(), data, model__attention=name, **FULL | GPU)
            ).forward_s
            for data in (replace(whole, useful_share=1 / 3), whole)
        ]
        for name in ("torch-flash", "sdpa")
    )
    assert boundaries[0] < 0.6 * boundaries[1]
    assert mask[0] == mask[1] > boundaries[1]


def test_rows_with_a_mask_are_as_wide_as_the_longest() -> None:
    """Of their micro-batch."""
    changes = FULL | {"model__attention": "sdpa", "data__packing": "false"}
    data = Workload(useful_share=0.2, row_shares=((1, 0.2), (2, 0.3), (8, 0.5)))
    assert [data.row_share(size) for size in (1, 2, 4, 8, 16)] == [0.2, 0.3, 0.5, 0.5, 1.0]
    narrow, wide = (
        step_of(planning.planned(QWEN, host(), known, train__micro_batch="4", **changes)).backward_s
        for known in (data, Workload(useful_share=0.2))
    )
    assert narrow < 0.6 * wide


def test_rates_between_measured_lengths() -> None:
    rates = (
        AttentionRate(document=1_000, forward=2.0, backward=1.0),
        AttentionRate(document=4_000, forward=4.0, backward=3.0),
    )
    found = [_rate_at(rates, length).forward for length in (10, 1_000, 2_000, 4_000, 9_000)]
    assert found == pytest.approx([2.0, 2.0, 3.0, 4.0, 4.0])
    own = replace(ONE, matrix_flops=100.0, attention={"torch-flash": rates})
    assert own.attention_at("torch-flash", 4_000).forward == 4.0
    assert own.attention_at("flash-attn-4", 65_536).forward == pytest.approx(97.7)
