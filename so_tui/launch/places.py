"""The machine that a spec's place has: this one, or that of a partition, as its jobs have seen it
or its site describes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import state_home
from so_tui.machine import inspect_machine
from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine, Network
from so_tui.plan.rates import measured_network
from so_tui.runs.samples import NetworkRate
from so_tui.spec import Problem, Refusal, Refused
from so_tui.spec.check import write_atomic
from so_tui.spec.run_spec import RunSpec, SlurmSpec
from so_tui.trust.decoding import readable_json
from so_tui.trust.folders import private_folder
from so_tui.trust.text import so_tui_command

if TYPE_CHECKING:
    from so_tui.launch.slurm.script import Site


# What is known of the machines of a partition: the one that a job saw last, kept with its date.
#
# Login nodes often have another chip, or none. A job records the node that it got, and later runs
# on that partition are planned for it. Clusters may share a home directory and name their
# partitions alike, so each cluster has a folder of its own.


class _SeenMachine(Struct, frozen=True, kw_only=True):
    """A node of a partition."""

    v: int = 1
    seen: float
    """When a job inspected it, in seconds since the epoch."""
    machine: Machine


def sees_part(machine: Machine) -> bool:
    """Return whether a job had only a part of this node, and may not have seen all of its GPUs."""
    return len(machine.allowed_cpus) < len(machine.online_cpus)


def remember(cluster: str, partition: str, machine: Machine) -> None:
    """Keep the machine of a cluster's partition. Where it cannot be written, the next job tries
    again.

    What a job saw that had a part of a node does not replace what another saw with more GPUs, and a
    network that was measured is replaced only by another measurement.
    """
    before = _seen_machine(cluster, partition)
    if before is not None and sees_part(machine) and len(machine.gpus) < len(before.machine.gpus):
        return
    if machine.network is None or not machine.network.measured:
        machine = with_measured_network(cluster, partition, machine)
    content = msgspec.json.encode(_SeenMachine(seen=time.time(), machine=machine))
    path = _path(cluster, partition)
    with contextlib.suppress(OSError):
        private_folder(path.parent)
        write_atomic(path, content)


def _seen_machine(cluster: str, partition: str) -> _SeenMachine | None:
    """Return the machine of a cluster's partition; None if no job of this user has seen it."""
    return readable_json(_path(cluster, partition), _SeenMachine, own=True)


def with_measured_network(cluster: str, partition: str, machine: Machine) -> Machine:
    """Return a machine of a partition with the network between its nodes as a job measured it, if
    one has.
    """
    seen = _seen_machine(cluster, partition)
    network = seen.machine.network if seen is not None else None
    return (
        replace(machine, network=network) if network is not None and network.measured else machine
    )


def keep_network(
    cluster: str, partition: str, machine: Machine, rate: NetworkRate, local_ranks: int
) -> None:
    """Keep what the ranks of a job measured of the network.

    Args:
        cluster: The cluster.
        partition: The partition.
        machine: The job's first node, as the job sees it.
        rate: What was measured.
        local_ranks: How many ranks each node had; adapters of other GPUs were not used.
    """
    seen = _seen_machine(cluster, partition)
    machine = seen.machine if seen is not None else machine
    network = measured_network(
        rate.bytes_per_s,
        local_ranks / max(1, len(machine.gpus)),
        f"measured on {rate.nodes} nodes, {datetime.fromtimestamp(rate.measured).date()}",
    )
    remember(cluster, partition, replace(machine, network=network))


def _path(cluster: str, partition: str) -> Path:
    """Return the file of a partition. Slurm's names of clusters need not be names of folders."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", cluster)[:40]
    folder = f"{readable}-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}"
    return state_home() / "partitions" / folder / f"{partition}.json"


_LOG = logging.getLogger(__name__)


def machine_of(slurm: SlurmSpec, here: Machine | None = None) -> Machine:
    """Return the machine of a partition: the one that a job saw there, else the one that the site
    profile describes, else this one.

    Args:
        slurm: The partition, empty for this machine, and the site profile, by default that of this
            cluster.
        here: This machine, if it has been inspected already.

    Raises:
        InputError: There is no site profile of this name, or it is wrong.
    """
    if not slurm.partition:
        return here or inspect_machine()
    seen, described, profile = _known(slurm)
    if seen is not None:
        found = seen.machine
        known = f"the machine that a job saw on {datetime.fromtimestamp(seen.seen).date()}"
    elif described is not None:
        found, known = described, f"as the profile of {profile.title} says"
    else:
        found = here or inspect_machine()
        known = "no job has seen its machine; this one stands for it"
    _LOG.info("partition %s: %s", slurm.partition, known)
    gbit_per_s = profile.network_gbit_per_s
    if not gbit_per_s or (seen is not None and found.network is not None):
        return found
    source = f"{profile.title}: {profile.source}"
    return replace(found, network=Network(gbit_per_s=gbit_per_s, source=source))


def unknown_nodes(spec: RunSpec, planned_for: Machine) -> str:
    """Return that a plan is for this host, which stands for unknown nodes; empty if it does not.
    Errors as for ``machine_of``.
    """
    here = planned_for.hostname == socket.gethostname()
    if not spec.slurm.partition or not here or any(source_of(spec.slurm)):
        return ""
    after = "the job chooses for its node" if spec.nodes == 1 else "its settings stay there"
    return (
        f"the nodes of partition {spec.slurm.partition} are not known yet: this plan is for the "
        f"machine you are on, and {after}"
    )


def source_of(slurm: SlurmSpec) -> tuple[float | None, str]:
    """Return where the description of a partition's machine comes from: when a job inspected a
    node, in seconds since the epoch, or the title of the site profile; neither where this machine
    stands for it. Errors as for ``machine_of``.
    """
    seen, described, profile = _known(slurm)
    if seen is not None:
        return seen.seen, ""
    return None, profile.title if described else ""


def left_out_profiles(slurm: SlurmSpec) -> tuple[Problem, ...]:
    """Return what is wrong with site profiles among which that of a partition's cluster was looked
    for.
    """
    from so_tui.launch.slurm.script import wrong_sites

    return wrong_sites() if slurm.partition and not slurm.site else ()


def _known(slurm: SlurmSpec) -> tuple[_SeenMachine | None, Machine | None, Site]:
    """Return the machine that a job saw, the one that the site profile describes, and the profile.

    A job that had a part of a node is not believed where the profile knows of more GPUs.
    """
    # Only where there is a partition: they take time to import.
    from so_tui.launch.slurm.client import cluster_here
    from so_tui.launch.slurm.script import load_site, site_name

    profile = load_site(site_name(slurm.site))
    seen = _seen_machine(cluster_here(), slurm.partition)
    name = profile.partition(slurm.partition).machine or profile.machine
    described = named_machine(name) if name else None
    if (
        seen is not None
        and described is not None
        and sees_part(seen.machine)
        and len(seen.machine.gpus) < len(described.gpus)
    ):
        seen = None
    return seen, described, profile


def with_remedy(error: Refused, slurm: SlurmSpec, *, described: bool) -> Refused:
    """Return why a spec was refused, with how to get to know the partition's machine if only this
    one was known.

    Args:
        error: Why the plan was refused.
        slurm: Where it was planned for.
        described: The user gave the machine.
    """
    partition = slurm.partition
    if not partition or described or any(source_of(slurm)):
        return error
    measure = so_tui_command("run", "tiny", "--partition", partition)
    unknown = Refusal(
        "partition-unknown",
        f"the nodes of partition {partition} are not known yet, so this plan is for the machine "
        f"you are on. `{measure}` records them in a minute; --machine names or describes them",
    )
    return Refused([*error.refusals, unknown], forceable=error.forceable)
