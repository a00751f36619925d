"""What to change after memory ran out, with the plan's own figures."""

from __future__ import annotations

import re

import pytest
from so_tui.plan.relief import less_gpu_memory, less_host_memory
from so_tui.plan.verdict import gib

from so_tui.plan import make_plan
from so_tui.spec import RunSpec, load_catalog, with_values
from tests.support.machines import superchips

CATALOG = load_catalog()


def spec_of(**changes: str) -> RunSpec:
    return with_values(CATALOG.presets["qwen3-14b"].spec, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("advised", "changes"),
    [
        (
            r"train\.micro_batch 4 -> 2 with train\.gradient_accumulation 2",
            {"train__micro_batch": "2", "train__gradient_accumulation": "2"},
        ),
        (r"offload\.ratio 0\.6 -> 0\.8", {"offload__ratio": "0.8"}),
        (r"model\.activation_checkpointing none -> full", {"model__activation_checkpointing": "full"}),
    ],
)
def test_what_is_promised_is_what_the_plan_would_show(advised: str, changes: dict[str, str]) -> None:
    given = {
        "offload__mode": "superoffload",
        "offload__ratio": "0.6",
        "gpus": "2",
        "train__micro_batch": "4",
        "model__activation_checkpointing": "none",
    }
    machine = superchips(4)
    saved = make_plan(spec_of(**given), machine).gpu_bytes - make_plan(spec_of(**(given | changes)), machine).gpu_bytes
    assert re.search(f"{advised} needs {re.escape(gib(saved))} less on each GPU", less_gpu_memory(spec_of(**given)))


def test_a_target_of_tokens_needs_no_other_accumulation() -> None:
    advice = less_gpu_memory(spec_of(offload__mode="superoffload", train__micro_batch="4", train__tokens_per_step="131072"))
    assert "train.micro_batch 4 -> 2 needs" in advice


def test_the_host_is_relieved_by_the_gpu() -> None:
    assert re.match(
        r"offload\.ratio 0\.9 -> 0\.7 needs \S+ GiB less of host memory a rank", less_host_memory(spec_of(offload__mode="superoffload"))
    )


def test_where_nothing_helps_or_nothing_is_known_more_machine_does() -> None:
    assert "more GPUs" in less_host_memory(spec_of(offload__mode="gpu"))
    unknown = with_values(CATALOG.presets["tiny"].spec, {"offload.mode": "superoffload", "model.config.hidden_size": "512"})
    assert "more GPUs" in less_gpu_memory(unknown)
