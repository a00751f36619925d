"""Runs on two nodes of a real Slurm, each with a supervisor and a launcher of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from so_tui.launch.launch import prepare_resume
from so_tui.launch.lifecycle import resume, stop
from so_tui.launch.places import _seen_machine, machine_of
from so_tui.launch.supervisor.node import NodeState
from so_tui.runs import RunDirectory
from so_tui.runs.records import BindingRecord, OutcomeCode, Process
from so_tui.runs.state import read_spec
from so_tui.trust.decoding import read_json
from tests.slurm.cluster import Cluster
from tests.slurm.submitting import (
    ended,
    ended_again,
    has_saved,
    losses,
    submission_of,
    submit,
    trains,
    wait_for,
)
from tests.support.launching import of_kind, tiny, train

pytestmark = pytest.mark.system

STEPS = 12


def two_nodes(folder: Path, **changes: str) -> RunDirectory:
    return submit(folder, **{"nodes": "2", "gpus": "1", **changes})


def node_state(run: RunDirectory) -> NodeState:
    return read_json(run.node_path(1, 1), NodeState)


def test_two_nodes_train_and_continue(cluster: Cluster, tmp_path: Path) -> None:
    run = two_nodes(tmp_path / "nodes", train__steps=str(STEPS))
    wait_for(run, trains)
    cluster.run("scancel", "--signal=USR1", submission_of(run).job_id)
    state = wait_for(run, ended_again)
    assert (state.state, state.step, run.attempts()) == ("finished", STEPS, (1, 2))
    node = node_state(run)
    assert (state.host, node.host, run.sample_hosts()) == ("n1", "n2", ("n1", "n2"))
    assert (node.ended, node.outcome) == (True, None)
    bound = of_kind(run, BindingRecord)[0]
    assert [(rank.rank, rank.host) for rank in bound.ranks] == [(0, "n1"), (1, "n2")]
    seen = _seen_machine("simulated", "main")
    assert seen is not None
    assert seen.machine.network is not None
    assert seen.machine.network.measured
    assert seen.machine.network.gbit_per_s > 0.01
    one, code = train(tiny(gpus="2", train__steps=str(STEPS)), tmp_path / "one")
    assert code == 0
    assert losses(run, STEPS) == pytest.approx(losses(one, STEPS), rel=1e-6)


def test_a_stop_ends_both_nodes_with_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    run = two_nodes(tmp_path, train__steps="5000")
    wait_for(run, trains)
    state = stop(run)
    assert state.state == "stopped"
    assert state.saved_step == state.step >= 2
    assert node_state(run).ended


def test_failed_node_is_reported_and_resumed(cluster: Cluster, tmp_path: Path) -> None:
    run = two_nodes(tmp_path, train__steps="5000", checkpoint__every_steps="2")
    wait_for(run, has_saved)
    cluster.stop_node("n2")
    state = wait_for(run, lambda state: ended(state) and state.code == OutcomeCode.NODE_FAILED)
    assert state.state in ("failed", "lost")
    assert state.saved_step is not None
    cluster.start_node("n2")
    cluster.wait_ready()
    steps = state.saved_step + 2
    machine = machine_of(read_spec(run).slurm)
    resume(run, prepare_resume(run, machine, values={"train.steps": str(steps)}))
    again = wait_for(run, ended_again)
    assert (again.state, again.step) == ("finished", steps)


@pytest.mark.parametrize(
    ("role", "code"), [("supervisor", OutcomeCode.NODE_LOST), ("rank", OutcomeCode.RANK_LOST)]
)
def test_what_is_killed_on_another_node_ends_the_run(
    role: str, code: OutcomeCode, cluster: Cluster, tmp_path: Path
) -> None:
    run = two_nodes(tmp_path, train__steps="50000")
    wait_for(run, trains)
    other = node_state(run)
    assert other.supervisor is not None
    processes: dict[str, Process] = {
        process.role: process for process in (*other.processes, other.supervisor)
    }
    os.kill(processes[role].pid, signal.SIGKILL)
    state = wait_for(run, ended)
    assert (state.state, state.code) == ("failed", code)
    assert "n2" in state.reason
