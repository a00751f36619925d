"""The step model against steps measured on H200 hosts with PCIe: Qwen3 4B shape, 4 x 4096 tokens,
whole layers repeated.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.model.profile import profile_of
from so_tui.plan.fit import assess, target_of
from so_tui.plan.notes import FasterAttention
from so_tui.plan.placement import Placement
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import AttentionRate, Speed, _rate_at, constants, published_speed
from so_tui.plan.step_time import StepModel, _arrivals, _Pass, _Update, _weight_wait_s
from so_tui.plan.workload import Workload
from so_tui.spec import load_catalog, with_values
from tests.support.machines import x86
from tests.support.planning import facts_of, only, step_of

SPEC = load_catalog().presets["qwen3-4b-random"].spec
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
CLIPPED = OURS | {"train__gradient_clipping": "1"}
EARLY = CLIPPED | {"offload__speculation": "on"}
SMALL = {"offload__sub_group_size": "100000000"}
EIGHT = {"train__gradient_accumulation": "8"}
ONE_H200 = x86("NVIDIA H200", gpu_count=1, cores=16, memory_mib=512 * 1024)


def planned(gpus: int = 1, cores: int = 16, /, **changes: str) -> Plan:
    base = {
        "gpus": str(gpus),
        "model.activation_checkpointing": "full",
        "model.kernels": "plain",
        "offload.ratio": "0.9",
        "offload.sub_group_size": "400000000",
        "offload.speculation": "off",
        "train.gradient_clipping": "0",
    }
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return make_plan(
        with_values(SPEC, base | given),
        x86("NVIDIA H200", gpu_count=gpus, cores=cores, memory_mib=512 * 1024),
    )


def exposed_s(gpus: int = 1, cores: int = 16, /, **changes: str) -> float:
    return step_of(planned(gpus, cores, **changes)).exposed_optimizer_s


@pytest.mark.parametrize(
    ("gpus", "cores", "changes", "measured_s"),
    [
        (1, 16, GPU, 1.69),
        (1, 16, OURS, 1.71),
        (1, 16, CLIPPED, 2.24),
        (1, 16, EARLY, 1.77),
        (1, 16, CLIPPED | {"offload__engine": "deepspeed"}, 7.13),
        (1, 16, OURS | EIGHT, 13.26),
        (1, 16, GPU | EIGHT, 13.14),
        (1, 64, OURS, 1.70),
        (2, 64, GPU, 1.62),
        (2, 64, OURS, 1.74),
        (2, 32, GPU, 1.66),
        (2, 32, OURS | SMALL, 1.68),
        (2, 32, EARLY | SMALL, 1.72),
        (4, 64, GPU, 1.62),
        (4, 64, OURS, 1.86),
    ],
)
def test_measured_steps_are_met(
    gpus: int, cores: int, changes: dict[str, str], measured_s: float
) -> None:
    """``zerooffload`` took 5.09 s there, which is missed (benchmarks/planner.md)."""
    assert planned(gpus, cores, **changes).step_s == pytest.approx(measured_s, rel=0.15)


PACKED = Workload(attended_tokens=300, trained_share=0.92, useful_share=1.0)


@pytest.mark.parametrize(
    ("kernels", "kept", "micro_batch", "measured_s", "measured_gib"),
    [
        ("plain", "full", "4", 1.60, 69.3),
        ("auto", "full", "4", 1.18, 69.1),
        ("auto", "selective", "4", 0.97, 102.7),
        ("auto", "none", "2", None, 93.7),
    ],
)
def test_packed_rows_are_met(
    kernels: str, kept: str, micro_batch: str, measured_s: float | None, measured_gib: float
) -> None:
    """benchmarks/results/speed-h200.jsonl: no offload, packed Alpaca rows. The last waited for its
    host, not for the GPU.
    """
    changes = {
        "gpus": "1",
        "offload.mode": "gpu",
        "offload.sub_group_size": "400000000",
        "model.kernels": kernels,
        "model.activation_checkpointing": kept,
    }
    plan = make_plan(
        with_values(SPEC, changes | {"train.micro_batch": micro_batch}),
        x86("NVIDIA H200"),
        workload=PACKED,
    )
    assert plan.gpu_reserved_bytes / 2**30 == pytest.approx(measured_gib, rel=0.025)
    if measured_s is not None:
        assert plan.step_s == pytest.approx(measured_s, rel=0.15)


@pytest.mark.parametrize(("states", "measured_s"), [("bf16-moments", 1.19), ("int8-moments", 1.29)])
def test_steps_with_compact_moments_are_met(states: str, measured_s: float) -> None:
    """benchmarks/results/whole-program-h200.json: packed Alpaca rows, everything saved, norms
    within the limit, second states for all.
    """
    changes = {
        "gpus": "1",
        "offload.mode": "superoffload",
        "offload.states": states,
        "offload.speculation": "on",
    }
    changes["model.activation_checkpointing"] = "none"
    machine = x86("NVIDIA H200", gpu_count=1, cores=16, memory_mib=251 * 1024)
    assert make_plan(with_values(SPEC, changes), machine, workload=PACKED).step_s == pytest.approx(
        measured_s, rel=0.15
    )


@pytest.mark.parametrize(
    ("gpus", "cores", "measured_s"), [(1, 16, 0.10), (1, 64, 0.065), (2, 64, 0.171), (4, 64, 0.262)]
)
def test_what_adam_leaves_exposed_is_met(gpus: int, cores: int, measured_s: float) -> None:
    """The sub-group whose gradient comes last is the one that the next forward wants first."""
    assert exposed_s(gpus, cores, **OURS) == pytest.approx(measured_s, abs=0.05)


def test_clipping_holds_adam_back_until_the_norm_is_known() -> None:
    assert 0.3 < exposed_s(**CLIPPED) - exposed_s(**OURS) < 0.6


def test_speculation_need_not_wait_for_the_norm() -> None:
    """offload-h200.json: 0.10 s for sub-groups of 400 million parameters, 0.03 s for 100 million.
    The norm itself costs some 0.05 s.
    """
    for changes, measured_s in ((EARLY, 0.10), (EARLY | SMALL, 0.03)):
        assert exposed_s(**changes) == pytest.approx(measured_s + 0.05, abs=0.04)


def test_what_cannot_speculate_is_stepped_beside_forward() -> None:
    """Second states for a share of what is offloaded: the more, the shorter the wait."""
    exposed = [exposed_s(**EARLY, offload__speculation_gib=str(gib)) for gib in (1, 15, 30, 47)]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > 2 * exposed[-1]


def test_ranks_that_share_memory_slow_adam() -> None:
    """CPU Adam of two ranks at half the rate each. DeepSpeed's optimizer is slower by what its
    kernel moves, ours by nearly all it does; it loses less by sharing, since beside a forward it
    never has its whole rate.
    """
    undisturbed = replace(
        published(), adam=((16, 120e9), (32, 240e9)), node_bytes_per_s=1e12, adam_together=()
    )
    together = replace(undisturbed, adam_together=((2, 60e9),))
    machine = x86("NVIDIA H200", gpu_count=2, cores=32, memory_mib=512 * 1024)

    def waits_s(speed: Speed, changes: dict[str, str]) -> float:
        base = {"gpus": "2", "model.activation_checkpointing": "full", "offload.ratio": "1.0"}
        base |= {"offload.speculation": "off", "offload.sub_group_size": "400000000"}
        spec = with_values(SPEC, base | changes)
        target = target_of(spec, machine, probed=False)
        resources = dataclasses.replace(target.resources, speed=speed)
        step = assess(spec, dataclasses.replace(target, resources=resources)).step
        assert step is not None
        ours = spec.offload.mode == "superoffload"
        return step.exposed_optimizer_s + (step.forward_s if ours else 0.0)

    ours = {"offload.mode": "superoffload", "train.micro_batch": "1"}
    theirs = {"offload.mode": "zerooffload"}
    assert 1.3 < waits_s(together, ours) / waits_s(undisturbed, ours) < 1.6
    assert 1.2 < waits_s(together, theirs) / waits_s(undisturbed, theirs) < 1.4


def test_copies_of_zerooffload_hide_behind_the_gpu_only() -> None:
    """Not behind Python: every gradient in bf16 for its partition, and in fp32 for the
    optimizer's, at the link's rate.
    """

    def backward_s(mode: str, **changes: str) -> float:
        return step_of(planned(offload__mode=mode, offload__ratio="1.0", **changes)).backward_s

    busy = {"train__micro_batch": "8"}
    assert backward_s("zerooffload", **busy) == backward_s("gpu", **busy)
    idle = {"train__micro_batch": "1", "data__sequence_length": "512"}
    copies_s = 6 * SPEC.model.parameter_count / published().d2h_bytes_per_s
    longer_s = backward_s("zerooffload", **idle) - backward_s("gpu", **idle)
    assert longer_s == pytest.approx(copies_s, rel=0.01)


def published() -> Speed:
    found = published_speed("NVIDIA H200")
    assert found is not None
    return found


def test_weights_are_waited_for_one_sub_group_at_a_time() -> None:
    def wait_s(adam_s: float, *ready_s: float) -> float:
        """Of equal parts of a model whose forward takes 1 s."""
        updates = [
            _Update(part / len(ready_s), ready, adam_s, 0) for part, ready in enumerate(ready_s)
        ]
        return _weight_wait_s(updates, 1e30, 0.0, forward_s=1.0, forward_begins_s=0.0)

    # Held back: 1 s each. Forward waits 1 s for the first half, computes it for 0.5 s, waits 0.5 s
    # for the second.
    assert wait_s(1.0, 0.0, 0.0) == pytest.approx(1.5)
    # Beside a backward of 2 s: the second half is complete 1 s before its end and stepped by then,
    # the first at the end.
    assert wait_s(1.0, 0.0, -1.0) == pytest.approx(1.0)
    assert wait_s(1e-9, 0.0, -1.0) == pytest.approx(0.0, abs=1e-6)


def test_the_worker_takes_what_forward_uses_first() -> None:
    """Of four quarters that are ready 0.5 s after each other and take 1 s each, the last to come
    and the first to be used overtakes.
    """
    quarters = [
        _Update(0.75, -1.5, 1.0, 0),
        _Update(0.5, -1.0, 1.0, 0),
        _Update(0.25, -0.5, 1.0, 0),
        _Update(0.0, 0.0, 1.0, 0),
    ]
    found = dict(_arrivals(quarters, 1e30, 0.0))
    assert found == {0.75: -0.5, 0.25: 0.5, 0.0: 1.5, 0.5: 2.5}


def test_repeating_less_is_faster() -> None:
    full, selective, none = (
        step_of(planned(**GPU, model__activation_checkpointing=kept)).total_s
        for kept in ("full", "selective", "none")
    )
    assert full > selective > none


def test_what_is_computed_anew_is_launched_anew() -> None:
    """Where layers are too small to keep a GPU busy, Python is what repeating them costs: once more
    a forward's.
    """
    small = GPU | {"train__micro_batch": "1", "data__sequence_length": "512"}
    none, selective, full = (
        step_of(planned(**small, model__activation_checkpointing=policy)).backward_s
        for policy in ("none", "selective", "full")
    )
    forward_s = (
        constants().step.forward_launches_per_layer
        * published().layer_launch_overhead_s
        * SPEC.model.config["num_hidden_layers"]
    )
    assert full == selective == pytest.approx(none + forward_s)


def test_gathering_takes_from_what_computes() -> None:
    use = constants().step

    def pass_of(sequence_length: str, gather_s: float) -> _Pass:
        spec = with_values(
            SPEC,
            {"data.sequence_length": sequence_length, "model.activation_checkpointing": "none"},
        )
        profile, ranks = profile_of(spec.model), 2 if gather_s else 1
        placement = Placement(
            spec=spec,
            profile=profile,
            layout=profile.layout(ranks, spec.offload),
            local_ranks=ranks,
        )
        speed = (
            replace(published(), peer_bytes_per_s=profile.parameters / gather_s)
            if gather_s
            else published()
        )
        model = StepModel(placement=placement, speed=speed)
        assert model.all_gather_s == pytest.approx(gather_s)
        return model.one_pass

    without, beside = pass_of("4096", 0.0), pass_of("4096", 0.01)
    assert beside.forward_s - without.forward_s == pytest.approx(use.all_gather_share * 0.01)
    assert beside.backward_s - without.backward_s == pytest.approx(2 * use.all_gather_share * 0.01)
    waiting, also = pass_of("128", 0.001), pass_of("128", 0.01)
    assert waiting == also
    assert waiting.forward_s > pass_of("128", 0.0).forward_s, "gathering has its own Python"
    slow = pass_of("128", 10.0)
    assert slow.forward_s > 10
    assert slow.backward_s >= 20


def test_short_documents_and_untrained_tokens_cost_less() -> None:
    spec = with_values(
        SPEC, {"gpus": "1", "offload.mode": "gpu", "model.activation_checkpointing": "full"}
    )
    whole = make_plan(spec, x86("NVIDIA H200"))
    packed = make_plan(
        spec,
        x86("NVIDIA H200"),
        workload=Workload(attended_tokens=200, trained_share=0.4, useful_share=0.97),
    )
    assert (packed.step_s or 0) < 0.95 * (whole.step_s or 0)
    assert packed.useful_tokens_per_s_total == pytest.approx(
        0.97 * packed.tokens_per_step / (packed.step_s or 1)
    )


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
    speed = replace(
        ONE, layer_launch_overhead_s=2.0, layer_launch_overhead_by_ranks=((2, 1.9), (4, 3.0))
    )
    taken = [speed.layer_launch_overhead_of(ranks) for ranks in (1, 2, 3, 4, 8)]
    assert taken == [2.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA GH200 480GB", "GH200 480GB"),
        ("NVIDIA GH200 120GB", "GH200 120GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
    ],
)
def test_shipped_rates_say_that_they_are_published(name: str, word: str) -> None:
    speed = published_speed(name)
    assert speed is not None
    assert speed.source.startswith("published")
    assert word in speed.source


def test_parts_add_up_to_the_step() -> None:
    plan = planned(**OURS)
    assert plan.step_s == step_of(plan).total_s
    assert plan.useful_tokens_per_s_total == plan.tokens_per_step / step_of(plan).total_s


def test_more_offload_is_hardly_ever_faster_with_clipping() -> None:
    steps = [
        step_of(planned(**CLIPPED | {"offload__ratio": f"{ratio / 10}"})).total_s
        for ratio in range(11)
    ]
    # Within what the GPU's own share of the step gives back.
    assert all(after > 0.97 * before for before, after in pairwise(steps))
    assert steps[-1] > 1.1 * steps[0]


def test_accumulation_spreads_the_optimizer_over_more_tokens() -> None:
    one, eight = (planned(**changes) for changes in (OURS, OURS | EIGHT))
    assert (eight.useful_tokens_per_s_total or 0) > (one.useful_tokens_per_s_total or 0)


def long(length: int, /, **changes: str) -> Plan:
    """A plan of one document a sequence, on an H200 with flash-attn 4."""
    base = {
        "gpus": "1",
        "offload.mode": "superoffload",
        "offload.ratio": "0.9",
        "train.gradient_clipping": "0",
    }
    base |= {
        "train.micro_batch": str(max(1, 16_384 // length)),
        "data.sequence_length": str(length),
    }
    machine = x86("NVIDIA H200", gpu_count=1, cores=16, memory_mib=512 * 1024)
    machine = replace(machine, software=replace(machine.software, flash_attn_4="4.0.0b36"))
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return make_plan(
        with_values(SPEC, base | given), machine, workload=Workload(attended_tokens=float(length))
    )


@pytest.mark.parametrize(
    ("length", "attention", "policy", "measured_s"),
    [
        (4_096, "auto", "full", 1.211),
        (4_096, "torch-flash", "full", 1.281),
        (65_536, "auto", "full", 12.85),
        (65_536, "torch-flash", "full", 20.87),
        (65_536, "auto", "attention", 10.74),
    ],
)
def test_long_documents_are_planned_by_backend(
    length: int, attention: str, policy: str, measured_s: float
) -> None:
    """Measured on H200s: benchmarks/results/attention-h200.json."""
    found = long(length, model__attention=attention, model__activation_checkpointing=policy)
    assert found.step_s == pytest.approx(measured_s, rel=0.05)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LONG = [
    row
    for name in ("length-h200", "length-h200-x2")
    for row in json.loads((RESULTS / f"{name}.json").read_text())
]


def planned_row(row: dict[str, Any]) -> Plan:
    """Plan what a row measured, at published rates."""
    values = dict(change.split("=", 1) for change in row["set"]) | {
        "data.sequence_length": str(row["sequence_length"])
    }
    values |= row.get("chosen", {}) | {
        "model.activation_checkpointing": row["policy"],
        "model.attention": row["backend"],
    }
    values |= {
        "offload.mode": "superoffload",
        "offload.ratio": values.get("offload.ratio", "0.9"),
        "train.gradient_clipping": "0",
    }
    values |= {"train.gradient_accumulation": "1"}
    spec = with_values(
        load_catalog().presets[row["preset"]].spec,
        {"gpus": str(row["gpus"]), "train.micro_batch": "1"} | values,
    )
    machine = x86(
        "NVIDIA H200",
        gpu_count=row["gpus"],
        cores=16 * row["gpus"],
        memory_mib=125 * 1024 * row["gpus"],
    )
    machine = replace(machine, software=replace(machine.software, flash_attn_4="4.0.0b36"))
    return make_plan(spec, machine, workload=Workload(attended_tokens=float(row["document"])))


def named(row: dict[str, Any]) -> str:
    return (
        f"{row['preset']}-{row['gpus']}-{row['sequence_length']}-{row['document']}-{row['backend']}"
    )


@pytest.mark.parametrize("row", LONG, ids=named)
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
    parts = {
        "forward": step.forward_s - row["forward_s"],
        "backward": step.backward_s - row["backward_s"],
    }
    if (row["sequence_length"], row["document"]) != (8192, 8192):
        parts["optimizer"] = step.exposed_optimizer_s - row["optimizer_s"]
        parts["step"] = step.total_s - row["step_s"]
    most_s = (0.05 if row["gpus"] == 1 else 0.06) * row["step_s"]
    assert {name: error for name, error in parts.items() if abs(error) > most_s} == {}


def test_keeping_attention_is_chosen_for_long_documents() -> None:
    assert long(65_536).spec.model.activation_checkpointing == "attention"


def test_a_faster_backend_is_named_where_it_would_gain() -> None:
    short, long = (
        make_plan(
            with_values(
                SPEC, {"gpus": "1", "data.sequence_length": length} | {"train.micro_batch": "1"}
            ),
            ONE_H200,
        )
        for length in ("2048", "32768")
    )
    assert not facts_of(short.warnings, FasterAttention)
    named = only(long.warnings, FasterAttention)
    assert (named.backend, named.used) == ("flash-attn-4", "torch-flash")
    assert named.step_s < 0.9 * named.given_step_s


def test_padding_takes_no_time_where_attention_takes_boundaries() -> None:
    spec = with_values(
        SPEC, {"gpus": "1", "offload.mode": "gpu", "model.activation_checkpointing": "full"}
    )
    whole = Workload(attended_tokens=300, trained_share=0.3)
    third = replace(whole, useful_share=1 / 3)
    forward = {
        name: [
            step_of(
                make_plan(with_values(spec, {"model.attention": name}), ONE_H200, workload=data)
            ).forward_s
            for data in (third, whole)
        ]
        for name in ("torch-flash", "sdpa")
    }
    assert forward["torch-flash"][0] < 0.6 * forward["torch-flash"][1]
    assert forward["sdpa"][0] == forward["sdpa"][1] > forward["torch-flash"][1]


def test_rows_with_a_mask_are_as_wide_as_the_longest() -> None:
    """Of their micro-batch."""
    changes = {"gpus": "1", "model.attention": "sdpa", "data.packing": "false"}
    changes |= {"model.activation_checkpointing": "full", "train.micro_batch": "4"}
    data = Workload(useful_share=0.2, row_shares=((1, 0.2), (2, 0.3), (8, 0.5)))
    assert [data.row_share(size) for size in (1, 2, 4, 8, 16)] == [0.2, 0.3, 0.5, 0.5, 1.0]
    narrow, wide = (
        step_of(make_plan(with_values(SPEC, changes), ONE_H200, workload=known)).backward_s
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
