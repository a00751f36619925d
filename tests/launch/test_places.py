"""The machine of a spec's place, and the network that joins it with others."""

from __future__ import annotations

import json
import socket
import time

import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.launch import places
from so_tui.launch.checks import preflight
from so_tui.launch.launch import prepare
from so_tui.launch.slurm import client
from so_tui.launch.slurm.script import _site_names, _user_sites, load_site
from so_tui.machine.known import MACHINES
from so_tui.machine.types import Machine, Network
from so_tui.plan.rates import between_hosts_bytes_per_s
from so_tui.runs.samples import NetworkRate
from so_tui.spec import Refusal, Refused
from so_tui.spec.run_spec import SlurmSpec
from so_tui.ui.plan_view import launch_facts
from so_tui.ui.text import in_rows
from tests.support.launching import tiny
from tests.support.planning import CPU_ONLY, QUAD
from tests.support.problems import rejected

RATE = NetworkRate(nodes=3, bytes_per_s=25e9, measured=1.8e9)
PART = replace(QUAD, gpus=QUAD.gpus[:1], allowed_cpus=QUAD.online_cpus[:72])
"""A node as a job sees it that has one GPU and its cores."""
READ = replace(QUAD, network=Network(gbit_per_s=200, source="hsn0"))


def found(partition: str, site: str = "", here: Machine = CPU_ONLY) -> Machine:
    return places.machine_of(SlurmSpec(partition=partition, site=site), here)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the cluster that commands speak to."""
    monkeypatch.setattr(client, "cluster_name", lambda: "Our cluster/1")
    return "Our cluster/1"


@pytest.mark.parametrize(
    ("site", "partition", "gpus"),
    [("vista", "gh", 1), ("alps", "normal", 4), ("jupiter", "any", 4), ("vista", "gg", None)],
)
def test_profile_says_what_the_nodes_are(site: str, partition: str, gpus: int | None) -> None:
    """An unknown partition is planned for this machine, and a refusal says so."""
    machine = found(partition, site)
    assert [gpu.name for gpu in machine.gpus] == (gpus or 0) * ["NVIDIA GH200 120GB"]
    assert (replace(machine, network=None) == CPU_ONLY) == (gpus is None)
    error = Refused([Refusal("no-room", "it does not fit")])
    remedy = places.with_remedy(error, SlurmSpec(partition=partition, site=site), described=False)
    assert remedy.codes == ("no-room", *["partition-unknown"] * (gpus is None))


def test_what_a_job_has_seen_counts_more_than_a_profile(cluster: str) -> None:
    """The adapters of a login node say nothing of the compute nodes'."""
    login = replace(QUAD, network=Network(gbit_per_s=25, source="eth0"))
    published = found("gg", "vista", here=login).network
    assert published is not None
    assert (published.gbit_per_s, "TACC" in published.source) == (400, True)
    places.remember(cluster, "gg", READ)
    assert found("gg", "vista", here=login).network == READ.network
    assert places.source_of(SlurmSpec(partition="gh", site="vista")) == (None, "TACC Vista")
    places.remember(cluster, "gh", CPU_ONLY)
    assert replace(found("gh", "vista", here=QUAD), network=None) == CPU_ONLY
    seen, _ = places.source_of(SlurmSpec(partition="gh", site="vista"))
    assert seen == pytest.approx(time.time(), abs=60)


def test_a_job_that_had_a_part_of_a_node_hides_no_gpu(cluster: str) -> None:
    places.remember(cluster, "ghx4", PART)
    assert len(found("ghx4", "deltaai").gpus) == 4  # as the profile says
    assert places.source_of(SlurmSpec(partition="ghx4", site="deltaai"))[0] is None
    assert len(found("ghx4").gpus) == 1  # nothing else is known
    places.remember(cluster, "ghx4", QUAD)
    places.remember(cluster, "ghx4", PART)
    places.keep_network(cluster, "ghx4", PART, RATE, local_ranks=1)
    whole = found("ghx4", "deltaai")
    assert len(whole.gpus) == 4
    assert whole.network is not None
    assert between_hosts_bytes_per_s(whole.network, 0.25) == pytest.approx(25e9, rel=0.01)
    places.remember(cluster, "ghx4", replace(QUAD, gpus=QUAD.gpus[:2]))  # a whole node
    assert len(found("ghx4", "deltaai").gpus) == 2


def test_inspect_in_an_allocation_is_kept_for_plans(
    cluster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value, kept in (
        ("SO_TUI", "", False),
        ("SLURM_CLUSTER_NAME", cluster, False),
        ("SLURM_JOB_PARTITION", "gh", False),  # the shell of salloc may be on the login node
        ("SLURM_JOB_PARTITION", "../gh", False),
        ("SLURMD_NODENAME", "n1", False),
        ("SLURM_JOB_PARTITION", "gh", True),
    ):
        monkeypatch.setenv(variable, value)
        capsys.readouterr()
        assert main(["inspect", "--json"]) == 0
        seen = places._seen_machine(cluster, "gh")
        assert (seen is not None) == kept
    assert json.loads(capsys.readouterr().out)["hostname"] == socket.gethostname()
    assert seen is not None
    assert seen.machine.hostname == socket.gethostname()


def test_clusters_of_one_home_are_kept_apart(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places.remember(cluster, "normal", CPU_ONLY)
    monkeypatch.setattr(client, "cluster_name", lambda: "Our cluster_1")
    assert found("normal", here=QUAD) == QUAD
    places.remember("Our cluster_1", "normal", replace(QUAD, hostname="theirs"))
    assert found("normal").hostname == "theirs"
    monkeypatch.setattr(client, "cluster_name", lambda: cluster)
    assert found("normal", here=QUAD) == CPU_ONLY


def test_measured_network_counts_most(cluster: str) -> None:
    """More than any other that is known of, and a new inspection keeps it."""
    places.remember(cluster, "gh", QUAD)
    places.keep_network(cluster, "gh", QUAD, RATE, local_ranks=2)
    measured = found("gh", "vista").network
    assert measured is not None
    for share, bytes_per_s in ((0.5, 25e9), (1.0, 50e9)):  # two of four GPUs, as it was measured
        rate = between_hosts_bytes_per_s(measured, share)
        assert rate == pytest.approx(bytes_per_s, rel=0.01)
    assert "3 nodes" in measured.source
    places.remember(cluster, "gh", replace(READ, hostname="another"))
    assert found("gh", "vista") == replace(READ, hostname="another", network=measured)
    assert places.with_measured_network(cluster, "gh", CPU_ONLY).network == measured
    places.remember(cluster, "unmeasured", READ)
    for partition in ("another", "unmeasured"):
        assert places.with_measured_network(cluster, partition, CPU_ONLY) == CPU_ONLY


def test_every_profile_names_machines_that_are_known() -> None:
    for site in map(load_site, _site_names()):
        names = {site.machine, *(partition.machine for partition in site.partitions.values())}
        assert names - {""} <= MACHINES.keys()
    with rejected("unknown-site"):
        found("gh", "absent")


def write_profile(name: str, content: str) -> None:
    _user_sites().mkdir(parents=True, exist_ok=True)
    (_user_sites() / f"{name}.toml").write_text(content)


def test_wrong_profile_stops_no_plan(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For other clusters."""
    write_profile("a-wrong-one", "no toml")
    write_profile("b-wrong-one", 'title = "x"\nunknown = 1')
    assert found("normal", here=QUAD) == QUAD
    write_profile("ours", f'title = "Ours"\nclusters = ["{cluster}"]\nmachine = "gh200-quad-120"\n')
    assert places.source_of(SlurmSpec(partition="normal")) == (None, "Ours")
    assert main(["plan", "tiny", "--partition", "normal"]) == 0
    spec = tiny(slurm__partition="normal")
    told = " ".join(preflight(prepare(spec, CPU_ONLY, force=True))[1])
    for said in (capsys.readouterr().out, told):
        assert "a-wrong-one" in said
        assert "b-wrong-one" in said
    assert "ours" not in told


@pytest.mark.parametrize(
    ("name", "content", "here"),
    [
        ("mine", 'title = "x"\nunknown = 1\nclusters = ["ours"]\n', "ours"),
        ("mine", 'clusters = ["ours"]\n', "ours"),
        ("mine", 'title = "x"\nclusters = [5, "ours"]\n', "ours"),
        ("alps", "no toml", "clariden"),  # instead of the built-in one, which names that cluster
    ],
)
def test_wrong_profile_of_this_cluster_is_named(
    name: str, content: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "cluster_name", lambda: here)
    write_profile(name, content)
    with rejected("invalid-site") as caught:
        found("normal")
    assert caught.value.problems[0].value == name
    assert found("normal", "generic") == CPU_ONLY


@pytest.mark.parametrize("nodes", [1, 2])
def test_question_says_that_this_host_stands_for_unknown_nodes(cluster: str, nodes: int) -> None:
    here = replace(CPU_ONLY, hostname=socket.gethostname())
    spec = replace(tiny(), nodes=nodes, slurm=SlurmSpec(partition="debug"))
    told = places.unknown_nodes(spec, here)
    assert "debug are not known yet" in told
    assert ("the job chooses" in told) == (nodes == 1)
    assert told in in_rows(launch_facts(prepare(spec, here).plan, told)).plain
    for known in (replace(spec, slurm=SlurmSpec()), spec):
        planned_for = here if known is not spec else QUAD
        assert places.unknown_nodes(known, planned_for) == ""
    places.remember(cluster, "debug", QUAD)
    assert places.unknown_nodes(spec, here) == ""
