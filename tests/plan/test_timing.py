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
from so_tui.plan.notes import FasterAttention
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import AttentionRate, _rate_at, constants, published_speed
from so_tui.plan.workload import Workload
from so_tui.spec import with_values
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import facts_of, only, spec_of, step_of

QWEN = "qwen3-4b-random"
H200: Any = published_speed("NVIDIA H200")
GPU = {"offload__mode": "gpu"}
OURS = {"offload__mode": "superoffload"}
FULL = {"gpus": "1", "model__activation_checkpointing": "full"}
TINY_PASSES = {"train__micro_batch": "1", "data__sequence_length": "512"}
FLASH_4 = {"flash_attn_4": "4.0.0b36"}


def host(gpus: int = 1, cores: int = 16, memory_gib: int = 512, **software: str) -> Machine:
    machine = x86("NVIDIA H200", gpu_count=gpus, cores=cores, memory_mib=memory_gib * 1024)
    return replace(machine, software=replace(machine.software, **software))


def planned(**changes: str) -> Plan:
    return planning.planned(QWEN, host(), **FULL | {"model__kernels": "plain"} | changes)


def step_s(plan: Plan) -> float:
    return step_of(plan).total_s


def test_steps_of_deepspeeds_superoffload_are_met() -> None:
    """Those of others are met in test_measured.py."""
    changes = {"offload__sub_group_size": "400000000", "train__gradient_clipping": "1"}
    plan = planned(offload__engine="deepspeed", offload__ratio="0.9", **OURS | changes)
    assert plan.step_s == step_s(plan) == pytest.approx(7.13, rel=0.15)


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


def test_what_is_computed_anew_is_launched_anew() -> None:
    """Where layers are too small to keep a GPU busy, Python is what repeating them costs: once more
    a forward's.
    """
    none, selective, full = (
        step_of(planned(**GPU | TINY_PASSES, model__activation_checkpointing=policy)).backward_s
        for policy in ("none", "selective", "full")
    )
    launches = constants().step.forward_launches_per_layer
    layers = spec_of(QWEN).model.config["num_hidden_layers"]
    forward_s = launches * H200.layer_launch_overhead_s * layers
    assert full == selective == pytest.approx(none + forward_s)


def test_short_documents_and_untrained_tokens_cost_less() -> None:
    short = Workload(attended_tokens=200, trained_share=0.4, useful_share=0.97)
    whole, packed = (planning.planned(QWEN, host(), data, **FULL | GPU) for data in (None, short))
    assert step_s(packed) < 0.95 * step_s(whole)
    useful = 0.97 * packed.tokens_per_step / step_s(packed)
    assert packed.useful_tokens_per_s_total == pytest.approx(useful)


def test_adam_rates_lie_on_lines_between_what_was_measured() -> None:
    speed = replace(H200, adam=((2, 20.0), (10, 60.0)), adam_together=(), node_bytes_per_s=100.0)
    rates = [speed.adam_bytes_per_s(cores, 1) for cores in (1, 2, 6, 10, 40)]
    assert rates == [10.0, 20.0, 40.0, 60.0, 60.0]
    assert speed.adam_bytes_per_s(10, 4) == 15.0  # what 40 cores have together, by four
    assert speed.adam_bytes_per_s(2, 2) == 15.0
    assert replace(speed, node_bytes_per_s=40.0).adam_bytes_per_s(10, 4) == 10.0
    together = replace(speed, adam_together=((2, 14.0), (4, 12.0)))
    rates = [together.adam_bytes_per_s(10, ranks) for ranks in (1, 2, 3, 4)]
    assert rates == [60.0, 14.0, 14.0, 12.0]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LONG = [
    row
    for name in ("length-h200", "length-h200-x2")
    for row in json.loads((RESULTS / f"{name}.json").read_text())
]


def planned_row(row: dict[str, Any]) -> Plan:
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
    own = replace(H200, matrix_flops=100.0, attention={"torch-flash": rates})
    assert own.attention_at("torch-flash", 4_000).forward == 4.0
    assert own.attention_at("flash-attn-4", 65_536).forward == pytest.approx(97.7)
