"""Changes of a spec that need less memory, with the plan's own figures."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.machine.known import named_machine
from so_tui.model.profile import profile_of
from so_tui.plan.notes import Change, FitsHere, MemoryAdvice
from so_tui.plan.plan import OptionalMemory
from so_tui.plan.planner import make_plan
from so_tui.plan.remedies import memory_advice
from so_tui.spec import RunSpec, with_values
from tests.support.machines import x86
from tests.support.planning import CATALOG, QUAD, only, spec_of

GIVEN = {"offload__mode": "superoffload"}
OURS = spec_of("qwen3-14b", **GIVEN)
LLAMA, QWEN = "llama-3.1-8b", "qwen3-4b-random"


def changes_in(advice: MemoryAdvice) -> list[tuple[Change, ...]]:
    return [saving.changes for saving in advice.savings]


def followed(spec: RunSpec, advice: FitsHere) -> RunSpec:
    return with_values(spec, {change.key: str(change.after) for change in advice.changes})


@pytest.mark.parametrize(
    ("preset", "machine", "length", "recomputed", "mode", "tiles", "named"),
    [
        (LLAMA, "gh200-480", 32_768, "auto", "auto", "auto", "micro_batch accumulation"),
        (LLAMA, "gh200-480", 32_768, "none", "auto", "auto", "checkpointing micro_batch"),
        (LLAMA, "gh200-480", 32_768, "full", "gpu", "off", "mode ratio micro_batch"),
        (LLAMA, "gh200-120", 131_072, "none", "auto", "off", "checkpointing sequence_length"),
        (QWEN, "h200-8", 32_768, "none", "gpu", "auto", "mode checkpointing tiled_mlp"),
    ],
)
def test_advice_fits_when_followed_literally(
    preset: str, machine: str, length: int, recomputed: str, mode: str, tiles: str, named: str
) -> None:
    given = {"gpus": "1", "train__micro_batch": "32", "data__sequence_length": str(length)}
    given |= {"offload__mode": mode, "model__tiled_mlp": tiles}
    spec = spec_of(preset, model__activation_checkpointing=recomputed, **given)
    refused = make_plan(spec, named_machine(machine))
    assert not refused.fits
    advice = only(refused.remedies, FitsHere)
    assert make_plan(followed(spec, advice), named_machine(machine)).fits
    keys = " ".join(change.key for change in advice.changes)
    assert all(word in keys for word in named.split()), keys
    assert "model" not in keys or recomputed != "auto", "what a plan decides itself"


def test_savings_are_those_of_the_plan() -> None:
    given = GIVEN | {"offload__ratio": "0.6", "gpus": "2", "train__micro_batch": "4"}
    given |= {"model__activation_checkpointing": "none"}
    spec = spec_of("qwen3-14b", **given)
    before, savings = make_plan(spec, QUAD), memory_advice(spec, "gpu").savings
    assert len(savings) > 2
    for saving in savings:
        changed = {change.key: str(change.after) for change in saving.changes}
        after = make_plan(with_values(spec, changed), QUAD)
        assert saving.saves_bytes == before.gpu_bytes - after.gpu_bytes, changed


def test_a_target_of_tokens_needs_no_other_accumulation() -> None:
    given = GIVEN | {"train__micro_batch": "4", "train__tokens_per_step": "131072"}
    advice = memory_advice(spec_of("qwen3-14b", **given), "gpu")
    assert changes_in(advice)[0] == (Change("train.micro_batch", 4, 2),)


def test_the_host_is_relieved_by_the_gpu_and_compact_moments() -> None:
    ratio, bf16, int8 = memory_advice(OURS, "node").savings
    assert ratio.changes == (Change("offload.ratio", 0.9, 0.7),)
    assert ratio.saves_bytes > 2**30
    assert bf16.changes == (Change("offload.states", "fp32", "bf16-moments"),)
    layout = profile_of(OURS.model).layout(OURS.ranks, OURS.offload)
    cpu, gpu = (
        max(group.numel for group in layout.sub_groups if group.device == device)
        for device in ("cpu", "gpu")
    )
    decoded = 8 * cpu - 4 * gpu  # while a checkpoint is written
    assert bf16.saves_bytes == 4 * layout.cpu_numel - decoded
    assert int8.saves_bytes == pytest.approx(5.98 * layout.cpu_numel - decoded, rel=1e-3)
    theirs = memory_advice(spec_of("qwen3-14b", offload__mode="zerooffload"), "node")
    assert "offload.states" not in {changes[0].key for changes in changes_in(theirs)}


def test_the_host_is_relieved_first_of_what_changes_no_result() -> None:
    spec = with_values(OURS, {"checkpoint.every_steps": "100"})
    optional = OptionalMemory(second_states_bytes=50 << 30, copies_bytes=20 << 30)
    given = replace(make_plan(spec, QUAD), optional=optional)
    advice = memory_advice(spec, "node", given)
    assert changes_in(advice) == [
        (Change("checkpoint.background", "true", "false"),),
        (Change("offload.speculation", "auto", "off"),),
        (Change("offload.ratio", 0.9, 0.7),),
    ]
    assert [saving.saves_bytes for saving in advice.savings[:2]] == [20 << 30, 50 << 30]
    told = memory_advice(spec, "node", given).message
    assert "checkpoint.background true -> false needs 20.0 GiB less" in told
    assert memory_advice(spec, "gpu", given) == memory_advice(spec, "gpu")


def test_one_memory_gets_no_more_offloading() -> None:
    """Whichever side asked in vain: what helps either helps both, and a larger ratio frees
    nothing.
    """
    given = GIVEN | {"offload__ratio": "0.5", "model__activation_checkpointing": "selective"}
    spec = spec_of("qwen3-14b", **given)
    memory = replace(make_plan(spec, QUAD), one_memory=True)
    advice, apart = memory_advice(spec, "gpu", memory), memory_advice(spec, "gpu")
    assert advice == memory_advice(spec, "node", memory)
    assert changes_in(advice)[0][0].key == "train.micro_batch"
    larger = [
        sum(one.saves_bytes for one in found.savings if one.changes[0].key == "offload.ratio")
        for found in (advice, apart)
    ]
    assert larger[0] < 0.2 * larger[1]


def test_offloading_is_proposed_with_its_ratio() -> None:
    given = {"train__micro_batch": "1", "model__activation_checkpointing": "full"}
    advice = memory_advice(spec_of("qwen3-14b", offload__mode="gpu", **given), "gpu")
    moved = (Change("offload.mode", "gpu", "superoffload"), Change("offload.ratio", 0.9, 0.9))
    assert changes_in(advice)[0] == moved
    assert "offload.mode gpu -> superoffload at offload.ratio 0.9 needs" in advice.message


def test_where_nothing_helps_a_larger_machine_does() -> None:
    assert memory_advice(spec_of("qwen3-14b", offload__mode="gpu"), "node").savings == ()
    unknown = with_values(
        CATALOG.presets["tiny"].spec,
        {"offload.mode": "superoffload", "model.config.hidden_size": "512"},
    )
    assert memory_advice(unknown, "gpu").savings == ()
    assert "more GPUs" in memory_advice(unknown, "gpu").message


def test_second_states_that_do_not_fit_are_given_up_first() -> None:
    """A spec that asks for them whatever the host has: 8 billion parameters on 160 GiB."""
    given = GIVEN | {"gpus": "1", "offload__ratio": "1", "offload__speculation": "on"}
    spec, machine = spec_of(LLAMA, **given), x86("NVIDIA H200", memory_mib=160 * 1024)
    advice = only(make_plan(spec, machine).remedies, FitsHere)
    assert advice.changes == (Change("offload.speculation", "on", "auto"),)
    assert make_plan(followed(spec, advice), machine).verdict == "fits"
    saving = memory_advice(spec, "node").savings[0]
    assert saving.changes == (Change("offload.speculation", "on", "off"),)
    assert saving.saves_bytes == pytest.approx(14 * spec.model.parameter_count, rel=1e-2)
