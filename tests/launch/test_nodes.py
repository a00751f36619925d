"""Runs on several nodes, without nodes: numbers, addresses, what supervisors tell each other, and
which network NCCL names.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from so_tui.launch import command
from so_tui.launch.command import Placeholder, argv
from so_tui.launch.in_job import _planned_here
from so_tui.launch.supervisor.ending import Evidence, Outcome, conclude, outcome_text
from so_tui.launch.supervisor.host import (
    ALONE,
    Nodes,
    hostfile,
    node_values,
    nodes_of_job,
    numbered,
)
from so_tui.launch.supervisor.node import (
    FIRST_SIGN_S,
    NodeState,
    OtherNodes,
    attributed,
    write_node_state,
)
from so_tui.launch.supervisor.slowness import EXPECTED_VARIABLE, missing_network
from so_tui.runs import RunDirectory, create_run, new_attempt
from so_tui.runs.records import OutcomeCode
from tests.support.plans import cpu_machine, launch_with, plan_of, quad_gh200, spec_of

JOB = {
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_JOB_ID": "16003",
}
SECOND = Nodes(node=1, count=2, address="10.0.0.7", port=12_003)
CORES = ((0, 1), (2, 3))
LOST = Outcome(state="failed", code=OutcomeCode.RANK_LOST, who="rank", rank=1, signal=9)
OTHER_RANK = Outcome(
    state="failed", code=OutcomeCode.RANK_LOST, who="rank", rank=0, reported="another rank was lost"
)
FAILED = Outcome(state="failed", code=OutcomeCode.UNEXPECTED, exit_code=1)


def test_slurm_says_which_node_this_is() -> None:
    assert nodes_of_job(JOB) == SECOND
    assert SECOND.init_method == "tcp://10.0.0.7:12003"
    assert msgspec.structs.replace(SECOND, address="fd00::1").init_method == "tcp://[fd00::1]:12003"
    assert nodes_of_job({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}) == ALONE
    assert nodes_of_job({}) == ALONE


def test_deepspeed_gets_the_gpus_of_each_node() -> None:
    plan = plan_of(spec_of(nodes=2, gpus=(1, 3)), cpus=CORES, gpus=True)
    binding = (msgspec.structs.replace(rank, gpu=2 * rank.rank + 1) for rank in plan.binding)
    plan = msgspec.structs.replace(plan, binding=tuple(binding))
    assert hostfile(SECOND, plan) == "node0 slots=2\nnode1 slots=4\n"
    values = node_values(SECOND, plan, "/run/hostfile")
    assert values[Placeholder.DEVICES] == "node0:0,1@node1:1,3"
    given = argv(plan)
    for option in ("--node_rank", "--node"):
        assert given[given.index(option) + 1] == Placeholder.NODE
    assert values.keys() <= {*given}
    assert "--no_ssh" not in argv(plan_of(spec_of(), cpus=CORES, gpus=True))


def test_ranks_of_other_nodes_have_other_numbers() -> None:
    plan = plan_of(spec_of(nodes=2), cpus=CORES)
    assert [rank.rank for rank in numbered(plan.binding, 1)] == [2, 3]
    submitted = launch_with(plan_of(spec_of(nodes=2, gpus=2)), cpu_machine(), forced=True)
    here = _planned_here(submitted, cpu_machine(), node=2).plan.binding
    assert [rank.rank for rank in here] == [4, 5]


def test_only_ranks_of_one_host_keep_to_loopback() -> None:
    plans = [plan_of(spec_of(nodes=nodes), gpus=True) for nodes in (1, 2)]
    one, two = (
        {change.name for change in command.variables(plan, quad_gh200(), {})} for plan in plans
    )
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= one
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & two
    assert {"NCCL_DEBUG", command.NODE_MARKER} <= two


def test_compiled_code_stays_on_each_host() -> None:
    """A run on several hosts compiles some code while it trains."""
    changes = command.variables(plan_of(spec_of(nodes=2)), cpu_machine(), {"HOME": "/home/me"})
    here = command.shown(changes)
    assert str(here["TRITON_CACHE_DIR"]).startswith("/tmp/so-tui-")
    assert str(here["TORCH_EXTENSIONS_DIR"]).startswith("/home/me/")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create_run(spec_of(nodes=3), tmp_path)
    new_attempt(run)
    return run


def test_a_silent_node_is_lost(run: RunDirectory) -> None:
    clock = Clock()
    others = OtherNodes(run, 1, 3, clock)
    for beat in range(5):
        clock.now += 30
        for node in (1, 2):
            if node == 1 or beat < 2:
                write_node_state(run, 1, node, NodeState(host=f"n{node}", heartbeat=beat))
        others.poll()
        lost = others.cause(60)
        assert (lost is None) == (beat < 4)
    assert lost is not None
    assert (lost.code, lost.node) == (OutcomeCode.NODE_LOST, "n2")


def test_a_node_has_time_for_its_first_sign(run: RunDirectory) -> None:
    clock = Clock()
    others = OtherNodes(run, 1, 2, clock)
    clock.now = FIRST_SIGN_S
    assert others.cause(60) is None
    clock.now += 1
    assert others.cause(60) is not None


def test_what_ended_a_node_counts_before_what_followed(run: RunDirectory) -> None:
    others = OtherNodes(run, 1, 3)
    write_node_state(run, 1, 1, NodeState(host="n1", heartbeat=1, ended=True, outcome=FAILED))
    write_node_state(run, 1, 2, NodeState(host="n2", heartbeat=1, ended=True, outcome=LOST))
    cause = others.wait()
    assert cause == msgspec.structs.replace(LOST, node="n2")
    assert "n2" in outcome_text(cause, "one").reason


def test_a_node_that_ended_well_is_no_cause(run: RunDirectory) -> None:
    write_node_state(run, 1, 1, NodeState(host="n1", heartbeat=1, ended=True))
    assert OtherNodes(run, 1, 2).wait() is None
    assert OtherNodes(run, 1, 1).wait() is None


@pytest.mark.parametrize(
    ("own", "others", "unprompted", "wanted"),
    [
        (OTHER_RANK, LOST, False, LOST),
        (FAILED, LOST, False, LOST),
        (LOST, LOST, False, LOST),
        (LOST, FAILED, False, LOST),
        (Outcome(state="finished", code=OutcomeCode.FINISHED), LOST, False, None),
        (
            Outcome(state="failed", code="not-finite", reported="a loss was not finite"),
            LOST,
            True,
            None,
        ),
        (Outcome(state="failed", code=OutcomeCode.LAUNCHER_LOST, signal=9), LOST, True, None),
        (OTHER_RANK, None, False, None),
    ],
)
def test_the_cause_is_reported_and_not_what_followed_elsewhere(
    own: Outcome, others: Outcome | None, *, unprompted: bool, wanted: Outcome | None
) -> None:
    assert attributed(own, others, unprompted=unprompted) == (wanted or own)


def test_a_lost_node_is_the_cause_of_crashes_elsewhere() -> None:
    gone = Outcome(state="failed", code=OutcomeCode.NODE_LOST, node="n2")
    assert attributed(msgspec.structs.replace(LOST, signal=6), gone, unprompted=True) == gone


def lines(network: str) -> list[str]:
    return [
        "n1:7:19 [0] NCCL INFO NET/IB : No device found.",
        f"n1:7:19 [0] NCCL INFO Using network {network}",
    ]


@pytest.mark.parametrize(
    ("expected", "used", "missing"),
    [
        ("AWS Libfabric", "Socket", "AWS Libfabric"),
        ("IB", "Socket", "IB"),
        ("IB", "IBext_v8", ""),
        ("AWS Libfabric", "AWS Libfabric", ""),
        ("", "Socket", ""),
    ],
)
def test_a_fall_back_to_sockets_ends_a_run(expected: str, used: str, missing: str) -> None:
    environ = {EXPECTED_VARIABLE: expected}
    assert not missing_network(lines("Socket")[:1], environ)
    assert missing_network(lines(used), environ) == missing
    outcome = conclude(Evidence(missing_network=missing))
    assert (outcome.code == OutcomeCode.SLOW_NETWORK) == bool(missing)
    assert missing in outcome_text(outcome, "one").reason
