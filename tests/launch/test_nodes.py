"""Runs on several nodes, without nodes: what supervisors tell each other, and networks."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch import command
from so_tui.launch.command import argv
from so_tui.launch.in_job import _planned_here
from so_tui.launch.launch import prepare
from so_tui.launch.supervisor import host
from so_tui.launch.supervisor import node as nodes
from so_tui.launch.supervisor.ending import Evidence, Outcome, conclude, outcome_text
from so_tui.launch.supervisor.slowness import EXPECTED_VARIABLE, missing_network
from so_tui.runs import RunDirectory, create_run, new_attempt
from so_tui.runs.directory import write_run_json
from so_tui.runs.records import OutcomeCode
from so_tui.spec import Refused, find_preset
from so_tui.spec.merge import with_values
from tests.support.machines import superchips
from tests.support.plans import cpu_machine, launch_with, plan_of, quad_gh200, spec_of

JOB = {
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_JOB_ID": "16003",
}
SECOND = host.Nodes(node=1, count=2, address="10.0.0.7", port=12_003)
CORES = ((0, 1), (2, 3))
LOST = Outcome(code=OutcomeCode.RANK_LOST, who="rank", rank=1, signal=9)
OTHER_RANK = replace(LOST, rank=0, signal=None, reported="another rank was lost")
FAILED = Outcome(code=OutcomeCode.UNEXPECTED, exit_code=1)


def test_slurm_says_which_node_this_is() -> None:
    assert host.nodes_of_job(JOB) == SECOND
    assert SECOND.init_method == "tcp://10.0.0.7:12003"
    assert replace(SECOND, address="fd00::1").init_method == "tcp://[fd00::1]:12003"
    for job in ({}, {"SLURM_NNODES": "1", "SLURM_NODEID": "0"}):
        assert host.nodes_of_job(job) == host.ALONE


def test_deepspeed_gets_the_gpus_of_each_node() -> None:
    plan = plan_of(spec_of(nodes=2, gpus=(1, 3)), cpus=CORES, gpus=True)
    plan = replace(plan, binding=tuple(replace(r, gpu=2 * r.rank + 1) for r in plan.binding))
    assert host.hostfile(SECOND, plan) == "node0 slots=2\nnode1 slots=4\n"
    values = host.node_values(SECOND, plan, "/run/hostfile")
    assert values["{DEVICES}"] == "node0:0,1@node1:1,3"
    given = argv(plan)
    for option in ("--node_rank", "--node"):
        assert given[given.index(option) + 1] == "{NODE}"
    assert values.keys() <= {*given}
    assert "--no_ssh" not in argv(plan_of(spec_of(), cpus=CORES, gpus=True))


def test_ranks_of_other_nodes_have_other_numbers() -> None:
    plan = plan_of(spec_of(nodes=2), cpus=CORES)
    assert [rank.rank for rank in host.numbered(plan.binding, 1)] == [2, 3]
    submitted = launch_with(plan_of(spec_of(nodes=2, gpus=2)), cpu_machine(), forced=True)
    here = _planned_here(submitted, cpu_machine(), node=2).plan.binding
    assert [rank.rank for rank in here] == [4, 5]


def test_only_ranks_of_one_host_keep_to_loopback_and_one_cache() -> None:
    """A run on several hosts compiles some code while it trains."""
    machine, home = quad_gh200(), {"HOME": "/home/me"}
    one, two = (
        command.shown(command.variables(plan_of(spec_of(nodes=nodes), gpus=True), machine, home))
        for nodes in (1, 2)
    )
    loopback = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert loopback <= one.keys()
    assert not loopback & two.keys()
    assert {"NCCL_DEBUG", command.NODE_MARKER} <= two.keys()
    assert str(two["TRITON_CACHE_DIR"]).startswith("/tmp/so-tui-")
    assert str(two["TORCH_EXTENSIONS_DIR"]).startswith("/home/me/")


def tell(run: RunDirectory, node: int, state: nodes.NodeState) -> None:
    write_run_json(run, run.node_path(1, node), state)


@pytest.fixture
def three_nodes(tmp_path: Path) -> RunDirectory:
    run = create_run(spec_of(nodes=3), tmp_path)
    new_attempt(run)
    return run


def test_a_silent_node_is_lost(three_nodes: RunDirectory) -> None:
    """It has time for its first sign."""
    now = [0.0]
    others, late = (nodes.OtherNodes(three_nodes, 1, count, lambda: now[0]) for count in (3, 2))
    now[0] = nodes.FIRST_SIGN_S
    assert late.cause(60) is None
    now[0] += 1
    assert late.cause(60) is not None
    for beat in range(5):
        now[0] += 30
        for node in (1, 2) if beat < 2 else (1,):
            tell(three_nodes, node, nodes.NodeState(host=f"n{node}", heartbeat=beat))
        others.poll()
        lost = others.cause(60)
        assert (lost is None) == (beat < 4)
    assert lost is not None
    assert (lost.code, lost.node) == (OutcomeCode.NODE_LOST, "n2")


def test_what_ended_a_node_counts_before_what_followed(three_nodes: RunDirectory) -> None:
    state = nodes.NodeState(host="n1", heartbeat=1, ended=True)
    tell(three_nodes, 1, state)
    assert nodes.OtherNodes(three_nodes, 1, 2).wait() is None
    assert nodes.OtherNodes(three_nodes, 1, 1).wait() is None
    tell(three_nodes, 1, replace(state, outcome=FAILED))
    tell(three_nodes, 2, replace(state, host="n2", outcome=LOST))
    cause = nodes.OtherNodes(three_nodes, 1, 3).wait()
    assert cause == replace(LOST, node="n2")
    assert "n2" in outcome_text(cause, "one")[0]


@pytest.mark.parametrize(
    ("own", "others", "unprompted", "taken"),
    [
        (OTHER_RANK, LOST, False, True),
        (FAILED, LOST, False, True),
        (LOST, FAILED, False, False),
        (Outcome(state="finished", code=OutcomeCode.FINISHED), LOST, False, False),
        (Outcome(code="not-finite", reported="a loss was not finite"), LOST, True, False),
        (Outcome(code=OutcomeCode.LAUNCHER_LOST, signal=9), LOST, True, False),
        (OTHER_RANK, None, False, False),
        # A lost node is the cause of crashes elsewhere.
        (replace(LOST, signal=6), Outcome(code=OutcomeCode.NODE_LOST, node="n2"), True, True),
    ],
)
def test_the_cause_is_reported_and_not_what_followed_elsewhere(
    own: Outcome, others: Outcome | None, *, unprompted: bool, taken: bool
) -> None:
    assert nodes.attributed(own, others, unprompted=unprompted) == (others if taken else own)


@pytest.mark.parametrize(
    ("expected", "used", "missing"),
    [
        ("AWS Libfabric", "Socket", "AWS Libfabric"),
        ("IB", "IBext_v8", ""),
        ("AWS Libfabric", "AWS Libfabric", ""),
        ("", "Socket", ""),
    ],
)
def test_a_fall_back_to_sockets_ends_a_run(expected: str, used: str, missing: str) -> None:
    environ = {EXPECTED_VARIABLE: expected}
    lines = ["n1:7:19 [0] NCCL INFO NET/IB : No device found."]
    assert not missing_network(lines, environ)
    lines.append(f"n1:7:19 [0] NCCL INFO Using network {used}")
    assert missing_network(lines, environ) == missing
    outcome = conclude(Evidence(missing_network=missing))
    assert (outcome.code == OutcomeCode.SLOW_NETWORK) == bool(missing)
    assert missing in outcome_text(outcome, "one")[0]


def test_nodes_of_one_job_train_with_the_same_settings() -> None:
    """Each plans by itself. One that needed other settings would wait for the others forever."""
    spec = find_preset("qwen3-4b-random").spec
    roomy = superchips(1)
    submitted = prepare(replace(spec, nodes=2), roomy)
    gpu = replace(roomy.gpus[0], memory_total_bytes=24 * 2**30)
    small = replace(roomy, gpus=(gpu,))
    alone = replace(submitted, plan=replace(submitted.plan, spec=replace(submitted.spec, nodes=1)))
    assert _planned_here(alone, small, 0).plan.replaced_texts
    with pytest.raises(Refused):
        _planned_here(submitted, small, 1)
    assert _planned_here(submitted, roomy, 1).spec == submitted.spec


def test_a_job_on_unknown_nodes_chooses_for_its_node() -> None:
    """The submitting host stood for them; a login node has no GPU and other cores."""
    submitted = prepare(find_preset("tiny").spec, cpu_machine())
    assert submitted.spec.ranks_per_host == 2
    node = superchips(1)
    with pytest.raises(Refused):
        _planned_here(submitted, node, 0)
    here, best = (
        _planned_here(submitted, node, 0, anew=True),
        prepare(find_preset("tiny").spec, node),
    )
    assert _planned_here(submitted, node, 0, anew=True).spec == best.spec
    fixed = with_values(find_preset("tiny").spec, {"offload.mode": "superoffload"})
    here = _planned_here(prepare(fixed, cpu_machine()), node, 0, anew=True)
    assert here.spec.offload.mode == "superoffload"
