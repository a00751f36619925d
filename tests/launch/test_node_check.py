"""A node that differs from the machine that was planned for is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch import prepare
from so_tui.launch.attempt_files import write_launch
from so_tui.launch.node_check import NodeDiffersError, refuse_different_node
from so_tui.machine import Machine, inspect_machine
from so_tui.runs import create_run, new_attempt, read_state
from so_tui.runs.outcome import OutcomeCode
from so_tui.spec import find_preset
from tests.support.plans import quad_gh200

QUAD = quad_gh200()
LAUNCH = prepare(replace(find_preset("tiny").spec, gpus=2), QUAD, inherited={})


def codes_on(node: Machine) -> set[str]:
    with pytest.raises(NodeDiffersError) as caught:
        refuse_different_node(LAUNCH, node)
    return set(caught.value.codes)


def test_the_planned_node_is_accepted() -> None:
    refuse_different_node(LAUNCH, QUAD)
    refuse_different_node(LAUNCH, replace(QUAD, gpus=QUAD.gpus[:2]))


def test_other_gpus() -> None:
    assert codes_on(replace(QUAD, gpus=QUAD.gpus[:1])) == {"gpu-missing"}
    other = replace(QUAD.gpus[1], uuid="GPU-ffff")
    assert codes_on(replace(QUAD, gpus=(QUAD.gpus[0], other))) == {"gpu-differs"}


def test_other_numa_nodes_and_cores() -> None:
    assert codes_on(replace(QUAD, numa_nodes=QUAD.numa_nodes[:1])) == {"numa-node-missing"}
    assert codes_on(replace(QUAD, allowed_cpus=tuple(range(100)))) == {"cores-not-allowed"}


@pytest.mark.slow
def test_the_supervisor_starts_nothing_on_another_node(tmp_path: Path) -> None:
    here = replace(inspect_machine(), gpus=())
    cores = max(here.online_cpus) + 1
    launch = prepare(replace(find_preset("tiny").spec, gpus=1), here, force=True)
    elsewhere = replace(launch.plan.binding[0], cpus=(cores,), main_cpus=(cores,), adam_cpus=(cores,))
    launch = replace(launch, plan=replace(launch.plan, binding=(elsewhere,)))
    run = create_run(launch.spec, tmp_path)
    write_launch(run, new_attempt(run), launch)
    assert launch.machine.hostname == socket.gethostname()
    command = [sys.executable, "-m", "so_tui", "supervise", str(run.path), "--attempt", "1"]
    done = subprocess.run(command, timeout=60, check=False, env=dict(os.environ))
    state = read_state(run)
    assert (done.returncode, state.state, state.code) == (1, "failed", OutcomeCode.NODE_DIFFERS)
    assert not run.command_path(1).exists()
