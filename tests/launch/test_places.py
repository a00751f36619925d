"""The machine of a spec's place, and the network that joins it with others."""

from __future__ import annotations

import json
import socket
import time
from datetime import date

import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.launch.checks import preflight
from so_tui.launch.launch import prepare
from so_tui.launch.places import (
    _seen_machine,
    keep_network,
    machine_of,
    remember,
    source_of,
    with_measured_network,
    with_remedy,
)
from so_tui.launch.slurm import client
from so_tui.launch.slurm.script import _site_names, _user_sites, load_site
from so_tui.machine.known import MACHINES
from so_tui.machine.types import Machine, Network
from so_tui.plan.rates import between_hosts_bytes_per_s
from so_tui.runs.samples import NetworkRate
from so_tui.spec import InputError, Refusal, Refused
from so_tui.spec.run_spec import SlurmSpec
from tests.support.launching import tiny
from tests.support.planning import CPU_ONLY, QUAD
from tests.support.problems import rejected


@pytest.mark.parametrize(
    ("site", "partition", "gpus"),
    [("vista", "gh", 1), ("alps", "normal", 4), ("jupiter", "any", 4)],
)
def test_profile_says_what_the_nodes_are(site: str, partition: str, gpus: int) -> None:
    spec = tiny(slurm__partition=partition, slurm__site=site)
    found = machine_of(spec.slurm, CPU_ONLY)
    assert [gpu.name for gpu in found.gpus] == gpus * ["NVIDIA GH200 120GB"]
    error = Refused([Refusal("no-room", "it does not fit")])
    assert with_remedy(error, spec.slurm, described=False).codes == ("no-room",)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the cluster that commands speak to."""
    monkeypatch.setattr(client, "cluster_name", lambda: "Our cluster/1")
    return "Our cluster/1"


def test_what_a_job_has_seen_counts_more_than_a_profile(cluster: str) -> None:
    spec = tiny(slurm__partition="normal", slurm__site="alps")
    remember(cluster, "normal", CPU_ONLY)
    assert replace(machine_of(spec.slurm, QUAD), network=None) == CPU_ONLY


def test_what_a_machine_is_known_from_is_told_apart(cluster: str) -> None:
    assert source_of(SlurmSpec(partition="gg", site="vista")) == (None, "")
    assert source_of(SlurmSpec(partition="gh", site="vista")) == (None, "TACC Vista")
    remember(cluster, "gh", QUAD)
    seen, _ = source_of(SlurmSpec(partition="gh", site="vista"))
    assert seen is not None
    assert seen == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize("plan", [["plan"], ["plan", "tiny"]])
def test_plan_says_what_its_machine_is_known_from(
    plan: list[str], cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told, today = [], date.today()
    for nodes in (None, QUAD):
        if nodes is not None:
            remember(cluster, "gh", nodes)
        main([*plan, "--partition", "gh"])
        told.append(capsys.readouterr().out)
    assert "so-tui run tiny --partition gh" in told[0]
    assert any(str(day) in told[1] for day in (today, date.today()))  # it may be midnight
    main([*plan, "--partition", "gh", "--machine", "gh200-480"])
    assert "partition gh" not in capsys.readouterr().out


def part_of(machine: Machine) -> Machine:
    """Return a machine as a job sees it that has one GPU and its cores."""
    return replace(machine, gpus=machine.gpus[:1], allowed_cpus=machine.online_cpus[:72])


def test_a_job_that_had_a_part_of_a_node_hides_no_gpu(cluster: str) -> None:
    spec = tiny(slurm__partition="ghx4", slurm__site="deltaai")
    remember(cluster, "ghx4", part_of(QUAD))
    assert len(machine_of(spec.slurm, CPU_ONLY).gpus) == 4  # as the profile says
    assert source_of(SlurmSpec(partition="ghx4", site="deltaai"))[0] is None
    assert (
        len(machine_of(tiny(slurm__partition="ghx4").slurm, CPU_ONLY).gpus) == 1
    )  # nothing else is known
    remember(cluster, "ghx4", QUAD)
    remember(cluster, "ghx4", part_of(QUAD))
    keep_network(
        cluster,
        "ghx4",
        part_of(QUAD),
        NetworkRate(nodes=2, bytes_per_s=25e9, measured=1.8e9),
        local_ranks=1,
    )
    whole = machine_of(spec.slurm, CPU_ONLY)
    assert len(whole.gpus) == 4
    assert whole.network is not None
    assert between_hosts_bytes_per_s(whole.network, 0.25) == pytest.approx(25e9, rel=0.01)
    remember(cluster, "ghx4", replace(QUAD, gpus=QUAD.gpus[:2]))  # a whole node
    assert len(machine_of(spec.slurm, CPU_ONLY).gpus) == 2


def test_inspect_in_an_allocation_is_kept_for_plans(
    cluster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect"]) == 0
    assert _seen_machine(cluster, "gh") is None
    monkeypatch.setenv("SLURM_CLUSTER_NAME", cluster)
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gh")
    assert main(["inspect"]) == 0
    assert _seen_machine(cluster, "gh") is None, "the shell of salloc may be on the login node"
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "../gh")
    assert main(["inspect", "--json"]) == 0
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gh")
    capsys.readouterr()
    assert main(["inspect", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hostname"] == socket.gethostname()
    seen = _seen_machine(cluster, "gh")
    assert seen is not None
    assert seen.machine.hostname == socket.gethostname()


def test_a_new_inspection_keeps_the_network_that_was_measured(cluster: str) -> None:
    rate = NetworkRate(nodes=2, bytes_per_s=25e9, measured=1.8e9)
    keep_network(cluster, "gh", QUAD, rate, local_ranks=4)
    other = Network(gbit_per_s=800, source="hsn0")
    remember(cluster, "gh", replace(QUAD, hostname="another", network=other))
    seen = _seen_machine(cluster, "gh")
    assert seen is not None
    assert seen.machine.hostname == "another"
    assert seen.machine.network is not None
    assert seen.machine.network.measured


def test_clusters_that_share_a_home_are_kept_apart(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny(slurm__partition="normal")
    remember(cluster, "normal", CPU_ONLY)
    monkeypatch.setattr(client, "cluster_name", lambda: "Our cluster_1")
    assert machine_of(spec.slurm, QUAD) == QUAD
    remember("Our cluster_1", "normal", replace(QUAD, hostname="theirs"))
    assert machine_of(spec.slurm, CPU_ONLY).hostname == "theirs"
    monkeypatch.setattr(client, "cluster_name", lambda: cluster)
    assert machine_of(spec.slurm, QUAD) == CPU_ONLY


def test_unknown_partition_is_planned_for_this_machine() -> None:
    spec = tiny(slurm__partition="gg", slurm__site="vista")
    assert replace(machine_of(spec.slurm, CPU_ONLY), network=None) == CPU_ONLY
    error = Refused([Refusal("no-room", "it does not fit")])
    assert with_remedy(error, spec.slurm, described=False).codes == ("no-room", "partition-unknown")


def test_profile_says_how_fast_until_a_job_has_seen(cluster: str) -> None:
    """The adapters of a login node say nothing of the compute nodes'."""
    spec = tiny(slurm__partition="gg", slurm__site="vista")
    login = replace(QUAD, network=Network(gbit_per_s=25, source="eth0"))
    published = machine_of(spec.slurm, login).network
    assert published is not None
    assert published.gbit_per_s == 400
    assert "TACC" in published.source
    seen = replace(QUAD, network=Network(gbit_per_s=200, source="hsn0"))
    remember(cluster, "gg", seen)
    assert machine_of(spec.slurm, login).network == seen.network


def test_measured_network_counts_most(cluster: str) -> None:
    """More than any other that is known of."""
    spec = tiny(slurm__partition="gh", slurm__site="vista")
    remember(cluster, "gh", QUAD)
    rate = NetworkRate(nodes=3, bytes_per_s=25e9, measured=1.8e9)
    keep_network(cluster, "gh", QUAD, rate, local_ranks=2)
    measured = machine_of(spec.slurm, CPU_ONLY).network
    assert measured is not None
    for share, rate_bytes in ((0.5, 25e9), (1.0, 50e9)):  # two of four GPUs, as it was measured
        found = between_hosts_bytes_per_s(measured, share)
        assert found == pytest.approx(rate_bytes, rel=0.01)
    assert "3 nodes" in measured.source
    # The next job keeps it.
    assert with_measured_network(cluster, "gh", CPU_ONLY).network == measured
    assert with_measured_network(cluster, "another", CPU_ONLY) == CPU_ONLY
    read = replace(QUAD, network=Network(gbit_per_s=200, source="hsn0"))  # not measured
    remember(cluster, "unmeasured", read)
    assert with_measured_network(cluster, "unmeasured", CPU_ONLY) == CPU_ONLY


def test_every_profile_names_machines_that_are_known() -> None:
    for site in map(load_site, _site_names()):
        names = {site.machine, *(partition.machine for partition in site.partitions.values())} - {
            ""
        }
        assert names <= MACHINES.keys()


def test_a_profile_that_does_not_exist_is_named() -> None:
    with rejected("unknown-site"):
        machine_of(tiny(slurm__partition="gh", slurm__site="absent").slurm, QUAD)


def write_profile(name: str, content: str) -> None:
    _user_sites().mkdir(parents=True, exist_ok=True)
    (_user_sites() / f"{name}.toml").write_text(content)


def test_wrong_profile_stops_no_plan(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For other clusters."""
    write_profile("a-wrong-one", "no toml")
    write_profile("b-wrong-one", 'title = "x"\nunknown = 1')
    spec = tiny(slurm__partition="normal")
    assert machine_of(spec.slurm, QUAD) == QUAD
    write_profile("ours", f'title = "Ours"\nclusters = ["{cluster}"]\nmachine = "gh200-quad-120"\n')
    assert source_of(SlurmSpec(partition="normal")) == (None, "Ours")
    assert main(["plan", "tiny", "--partition", "normal"]) == 0
    printed = capsys.readouterr()
    assert "a-wrong-one" in printed.out
    assert "b-wrong-one" in printed.out
    told = " ".join(preflight(prepare(spec, CPU_ONLY, force=True))[1])
    assert [name in told for name in ("a-wrong-one", "b-wrong-one", "ours")] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "content", "here"),
    [
        ("mine", 'title = "x"\nunknown = 1\nclusters = ["ours"]\n', "ours"),
        ("mine", 'clusters = ["ours"]\n', "ours"),
        ("mine", 'title = "x"\nclusters = [5, "ours"]\n', "ours"),
        (
            "alps",
            "no toml",
            "clariden",
        ),  # in place of the built-in profile, which names that cluster
    ],
)
def test_wrong_profile_of_this_cluster_is_named(
    name: str, content: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "cluster_name", lambda: here)
    write_profile(name, content)
    with pytest.raises(InputError) as caught:
        machine_of(tiny(slurm__partition="normal").slurm, QUAD)
    assert [(problem.code, problem.value) for problem in caught.value.problems] == [
        ("invalid-site", name)
    ]
    assert machine_of(tiny(slurm__partition="normal", slurm__site="generic").slurm, QUAD) == QUAD
