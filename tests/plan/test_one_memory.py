"""Plans for APUs, whose CPU and GPU have one memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.machine import load_machine
from so_tui.machine.known import named_machine
from so_tui.plan.fit import assess, in_mode, target_of
from so_tui.plan.notes import AutoMode, DeepSpeedNvidiaOnly, NeverRun, OneMemory
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.resources import usable_bytes
from so_tui.units import GIB
from tests.support.planning import bytes_at, facts_of, only, spec_of
from tests.support.sysroots import QUAD_MI300A, build_sysroot

APUS = named_machine("mi300a-4")
APART = named_machine("gh200-quad-120")
PLAIN = {
    "gpus": "1",
    "model__activation_checkpointing": "full",
    "train__gradient_clipping": "0",
    "checkpoint__background": "false",
}
"""One GPU, and nothing that takes whatever memory is left."""


def state_bytes(plan: Plan) -> dict[str, int]:
    return {
        term.kind: term.bytes
        for term in plan.breakdown
        if term.kind in ("weights", "master-weights", "moments")
    }


@pytest.mark.parametrize("mode", ["gpu", "superoffload"])
def test_states_count_once_and_all_memory_is_that_of_the_nodes(mode: str) -> None:
    spec = spec_of("qwen3-4b-random", offload__mode=mode, offload__ratio="1.0", **PLAIN)
    plan, apart = make_plan(spec, APUS), make_plan(spec, APART)
    assert (plan.one_memory, apart.one_memory) == (True, False)
    assert plan.gpu_bytes == 0 == bytes_at(plan, "gpu")
    assert plan.host_bytes_per_node == {0: bytes_at(plan, "node")}
    assert plan.host_capacity_bytes_per_node[0] == usable_bytes(128 * GIB)
    states, parameters = state_bytes(plan), spec.model.parameter_count
    assert states == state_bytes(apart)  # each of them once, as where the memories are two
    assert sum(states.values()) == pytest.approx(14 * parameters, rel=1e-3)
    # What was on either side is in the one memory. Loading needs nothing beside it: what comes
    # later is larger.
    loading = sum(term.bytes for term in apart.breakdown if term.kind == "loading")
    assert bytes_at(plan, "node") == bytes_at(apart, "gpu") + bytes_at(apart, "node") - loading


def test_what_needs_both_sides_of_a_memory_does_not_fit() -> None:
    """8 billion parameters need 128 GiB: less on each side of a superchip than it has, and more
    than one APU has.
    """
    spec = spec_of("llama-3.1-8b", gpus="1", offload__mode="superoffload", offload__ratio="1.0")
    plan = make_plan(spec, APUS)
    assert plan.verdict == "does not fit"
    assert plan.shortage is not None
    assert plan.shortage.pool == "node"
    assert make_plan(spec_of("llama-3.1-8b", gpus="2"), APUS).fits


def test_offloading_frees_nothing() -> None:
    spec = spec_of("qwen3-4b-random", **PLAIN)
    target = target_of(spec, APUS)
    on_gpu, offloaded = (
        assess(in_mode(spec, "gpu"), target),
        assess(in_mode(spec, "superoffload", 1.0), target),
    )
    assert offloaded.demand.node_bytes[0] == pytest.approx(on_gpu.demand.node_bytes[0], rel=0.1)
    plan = make_plan(spec_of("qwen3-4b-random", gpus="1", offload__mode="auto"), APUS)
    only(plan.reasons, OneMemory)
    assert (plan.mode, only(plan.reasons, AutoMode).why) == (
        "gpu",
        "fits-on-gpu",
    )  # offloading would gain little without it


def test_a_copy_costs_what_the_memory_costs() -> None:
    speed = target_of(spec_of("tiny", gpus="1"), APUS).resources.speed
    assert speed is not None
    assert (
        speed.d2h_bytes_per_s == speed.h2d_bytes_per_s == speed.hbm_bytes_per_s / 2
    )  # it reads and writes the same memory


def test_compact_states_help_where_states_are_all_that_is_large() -> None:
    spec = spec_of(
        "llama-3.1-8b",
        gpus="1",
        offload__states="int8-moments",
        offload__mode="superoffload",
        offload__ratio="1.0",
    )
    assert make_plan(spec, APUS).fits


def test_plans_say_that_nothing_was_run() -> None:
    plan = make_plan(spec_of("tiny", gpus="1"), APUS)
    assert only(plan.warnings, NeverRun).name == "AMD Instinct MI300A"
    assert plan.never_run
    assert not make_plan(spec_of("tiny", gpus="1"), APART).never_run
    assert not facts_of(plan.warnings, DeepSpeedNvidiaOnly)
    theirs = make_plan(
        spec_of("tiny", gpus="1", offload__engine="deepspeed", offload__mode="superoffload"), APUS
    )
    only(theirs.warnings, DeepSpeedNvidiaOnly)


def test_system_files_to_binding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build_sysroot(QUAD_MI300A.listing(), tmp_path / "root")
    assert main(["inspect", "--sysroot", str(root), "--json"]) == 0
    file = tmp_path / "machine.json"
    file.write_text(capsys.readouterr().out)
    assert [gpu.shares_memory for gpu in load_machine(file).gpus] == [True] * 4
    for machine in (str(file), "mi300a-4"):
        assert main(["plan", "qwen3-14b", "--gpus", "4", "--machine", machine, "--json"]) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        assert (plan["fits"], plan["one_memory"], plan["mode"]) == (True, True, "gpu")
        assert "never-run" in [fact["code"] for fact in plan["facts"]]
        assert [
            (rank["gpu"], rank["numa_node"], rank["memory_policy"]["nodes"])
            for rank in plan["binding"]
        ] == [(index, index, [index]) for index in range(4)]
    assert main(["plan", "qwen3-14b", "--gpus", "4", "--machine", "mi300a-4"]) == 0
    assert "planned, never run" in capsys.readouterr().out
    assert main(["plan", "--machine", "mi300a-4"]) == 0
    assert "never run" in capsys.readouterr().out
