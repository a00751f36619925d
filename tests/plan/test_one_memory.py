"""Plans for APUs, whose CPU and GPU have one memory."""

from __future__ import annotations

import pytest

from so_tui.cli import main
from so_tui.machine.known import named_machine
from so_tui.plan.fit import assess, in_mode, target_of
from so_tui.plan.notes import AutoMode, DeepSpeedNvidiaOnly, NeverRun, OneMemory
from so_tui.plan.resources import usable_bytes
from so_tui.units import GIB
from tests.support.planning import bytes_at, bytes_of, facts_of, only, planned, some, spec_of

APUS = named_machine("mi300a-4")
APART = named_machine("gh200-quad-120")
PLAIN = {
    "gpus": "1",
    "model__activation_checkpointing": "full",
    "train__gradient_clipping": "0",
    "checkpoint__background": "false",
}
"""One GPU, and nothing that takes whatever memory is left."""
OFFLOADED = {"gpus": "1", "offload__mode": "superoffload", "offload__ratio": "1.0"}


@pytest.mark.parametrize("mode", ["gpu", "superoffload"])
def test_states_count_once_and_all_memory_is_that_of_the_nodes(mode: str) -> None:
    given = PLAIN | {"offload__mode": mode, "offload__ratio": "1.0"}
    plan, apart = (planned("qwen3-4b-random", machine, **given) for machine in (APUS, APART))
    assert (plan.one_memory, apart.one_memory) == (True, False)
    assert plan.gpu_bytes == 0 == bytes_at(plan, "gpu")
    assert plan.host_bytes_per_node == {0: bytes_at(plan, "node")}
    assert plan.host_capacity_bytes_per_node[0] == usable_bytes(128 * GIB)
    # Each of the states once, as where the memories are two.
    states = [
        [bytes_of(one, kind) for kind in ("weights", "master-weights", "moments")]
        for one in (plan, apart)
    ]
    assert states[0] == states[1]
    assert sum(states[0]) == pytest.approx(14 * plan.spec.model.parameter_count, rel=1e-3)
    # What was on either side is in the one memory. Loading needs nothing beside it: what comes
    # later is larger.
    sides = bytes_at(apart, "gpu") + bytes_at(apart, "node")
    assert bytes_at(plan, "node") == sides - bytes_of(apart, "loading")


def test_what_needs_both_sides_of_a_memory_does_not_fit() -> None:
    """8 billion parameters need 128 GiB: less on each side of a superchip than it has, and more
    than one APU has, unless their states are compact.
    """
    plan = planned("llama-3.1-8b", APUS, **OFFLOADED)
    assert plan.verdict == "does not fit"
    assert some(plan.shortage).pool == "node"
    assert planned("llama-3.1-8b", APUS, gpus="2").fits
    assert planned("llama-3.1-8b", APUS, offload__states="int8-moments", **OFFLOADED).fits


def test_offloading_frees_nothing_and_copies_cost_what_memory_costs() -> None:
    spec = spec_of("qwen3-4b-random", **PLAIN)
    target = target_of(spec, APUS)
    on_gpu, offloaded = (
        assess(in_mode(spec, mode, 1.0), target).demand.node_bytes[0]
        for mode in ("gpu", "superoffload")
    )
    assert offloaded == pytest.approx(on_gpu, rel=0.1)
    plan = planned("qwen3-4b-random", APUS, gpus="1", offload__mode="auto")
    only(plan.reasons, OneMemory)
    # Offloading would gain little without it.
    assert (plan.mode, only(plan.reasons, AutoMode).why) == ("gpu", "fits-on-gpu")
    speed = some(target.resources.speed)
    # A copy reads and writes the same memory.
    assert speed.d2h_bytes_per_s == speed.h2d_bytes_per_s == speed.hbm_bytes_per_s / 2


def test_plans_say_that_nothing_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("tiny", APUS, gpus="1")
    assert only(plan.warnings, NeverRun).name == "AMD Instinct MI300A"
    assert (plan.never_run, planned("tiny", APART, gpus="1").never_run) == (True, False)
    assert not facts_of(plan.warnings, DeepSpeedNvidiaOnly)
    theirs = planned("tiny", APUS, offload__engine="deepspeed", **OFFLOADED)
    assert facts_of(theirs.warnings, DeepSpeedNvidiaOnly)
    for preset in (["qwen3-14b", "--gpus", "4"], []):
        assert main(["plan", *preset, "--machine", "mi300a-4"]) == 0
        assert "planned, never run" in capsys.readouterr().out.lower()
