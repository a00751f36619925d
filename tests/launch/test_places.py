"""The machine of a spec's place, and the network that joins it with others."""

from __future__ import annotations

from msgspec.structs import replace

from so_tui.launch.partition_machines import remember
from so_tui.launch.places import machine_of
from so_tui.machine.types import Network
from tests.support.launching import tiny
from tests.support.planning import QUAD


def test_a_site_profile_says_how_fast_the_network_is_until_a_job_has_seen_it() -> None:
    """The adapters of a login node say nothing of the compute nodes'."""
    spec = tiny(slurm__partition="gh", slurm__site="vista", nodes="2")
    login = replace(QUAD, network=Network(gbit_per_s=25, source="eth0"))
    published = machine_of(spec, login).network
    assert published is not None
    assert published.gbit_per_s == 400
    assert "TACC" in published.source
    seen = replace(QUAD, network=Network(gbit_per_s=200, source="hsn0"))
    remember("gh", seen)
    assert machine_of(spec, login).network == seen.network


def test_one_host_is_planned_without_a_site_profile() -> None:
    assert machine_of(tiny(slurm__partition="gh", slurm__site="vista"), QUAD) == QUAD
