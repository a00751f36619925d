"""The step model against steps measured on one H200 host (16 cores, PCIe): Qwen3 4B shape, 4 x 4096 tokens, 13 cores for Adam."""

from __future__ import annotations

import pytest

from so_tui.plan import make_plan
from so_tui.plan.speed import speed_of
from so_tui.plan.types import Plan
from so_tui.spec import load_catalog, with_values

from .machines import superchips, x86

SPEC = load_catalog().presets["qwen3-4b-random"].spec
H200 = x86("NVIDIA H200")


def planned(**changes: str) -> Plan:
    base = {"gpus": "1", "train.micro_batch": "4", "data.sequence_length": "4096", "offload.cpu_adam_cores_fraction": "0.82"}
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return make_plan(with_values(SPEC, base | given), H200)


@pytest.mark.parametrize(
    ("changes", "measured_s"),
    [
        ({"offload__mode": "gpu"}, 1.66),
        ({"offload__mode": "superoffload", "offload__engine": "deepspeed", "offload__ratio": "0.9"}, 6.1),
        ({"offload__mode": "superoffload", "offload__engine": "deepspeed", "offload__ratio": "0.9", "train__gradient_clipping": "0"}, 4.7),
        ({"offload__mode": "zerooffload", "offload__ratio": "0.9"}, 4.45),
        ({"offload__mode": "superoffload", "offload__ratio": "0.9", "train__gradient_clipping": "0"}, 2.13),
    ],
)
def test_measured_steps_are_met(changes: dict[str, str], measured_s: float) -> None:
    assert planned(**changes).step_s == pytest.approx(measured_s, rel=0.15)


def test_parts_add_up_to_the_step() -> None:
    plan = planned(offload__mode="superoffload")
    assert plan.step is not None
    assert plan.step_s == plan.step.total_s
    assert plan.useful_tokens_per_s_total == plan.tokens_per_step / plan.step.total_s


def test_more_offload_is_never_faster() -> None:
    steps = [planned(offload__mode="superoffload", offload__ratio=f"{ratio / 10}").step_s or 0.0 for ratio in range(11)]
    assert steps == sorted(steps)


def test_accumulation_spreads_the_optimizer_over_more_tokens() -> None:
    one, eight = (planned(offload__mode="superoffload", train__gradient_accumulation=count) for count in ("1", "8"))
    assert (eight.useful_tokens_per_s_total or 0) > (one.useful_tokens_per_s_total or 0)


def test_unknown_hardware_has_no_prediction() -> None:
    assert speed_of("Voodoo 3dfx") is None
    assert make_plan(with_values(SPEC, {"gpus": "1"}), x86("Voodoo 3dfx")).step_s is None
    assert make_plan(load_catalog().presets["tiny"].spec, x86()).step_s is None


def test_grace_hopper_predictions_say_where_they_come_from() -> None:
    plan = make_plan(with_values(SPEC, {"gpus": "1"}), superchips(1))
    assert plan.step_s is not None
    assert "published" in plan.speed_source
