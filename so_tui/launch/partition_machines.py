"""What is known of the machines of a partition: the one that a job saw last, kept with its date.

Login nodes often have another chip, or none. A job records the node that it got, and later runs on that partition are planned for it.
Clusters may share a home directory and name their partitions alike, so each cluster has a folder of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import state_home
from so_tui.machine.types import Machine
from so_tui.plan.network import measured_network
from so_tui.runs.network_rate import NetworkRate
from so_tui.spec.files import write_atomic
from so_tui.trust.decoding import decode_json
from so_tui.trust.ownership import private_folder, read_own


class SeenMachine(Struct, frozen=True, kw_only=True):
    """A node of a partition."""

    v: int = 1
    seen: float
    """When a job inspected it, in seconds since the epoch."""
    machine: Machine


def sees_part(machine: Machine) -> bool:
    """Return whether a job had only a part of this node, and may not have seen all of its GPUs."""
    return len(machine.allowed_cpus) < len(machine.online_cpus)


def remember(cluster: str, partition: str, machine: Machine) -> None:
    """Keep the machine of a cluster's partition. Where it cannot be written, the next job tries again.

    What a job saw that had a part of a node does not replace what another saw with more GPUs, and a network that was measured is replaced
    only by another measurement.
    """
    before = seen_machine(cluster, partition)
    if before is not None and sees_part(machine) and len(machine.gpus) < len(before.machine.gpus):
        return
    if machine.network is None or not machine.network.measured:
        machine = _with_network_of(before, machine)
    content = msgspec.json.encode(SeenMachine(seen=time.time(), machine=machine))
    path = _path(cluster, partition)
    with contextlib.suppress(OSError):
        private_folder(path.parent)
        write_atomic(path, content)


def seen_machine(cluster: str, partition: str) -> SeenMachine | None:
    """Return the machine of a cluster's partition; None if no job of this user has seen it."""
    try:
        return decode_json(read_own(_path(cluster, partition)), SeenMachine)
    except (OSError, msgspec.DecodeError):
        return None


def with_measured_network(cluster: str, partition: str, machine: Machine) -> Machine:
    """Return a machine of a partition with the network between its nodes as a job measured it, if one has."""
    return _with_network_of(seen_machine(cluster, partition), machine)


def _with_network_of(seen: SeenMachine | None, machine: Machine) -> Machine:
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
    seen = seen_machine(cluster, partition)
    machine = seen.machine if seen is not None else machine
    source = f"measured on {rate.nodes} nodes, {datetime.fromtimestamp(rate.measured).date()}"
    network = measured_network(rate.bytes_per_s, local_ranks / max(1, len(machine.gpus)), source)
    remember(cluster, partition, replace(machine, network=network))


def _path(cluster: str, partition: str) -> Path:
    """Return the file of a partition. Slurm's names of clusters need not be names of folders."""
    folder = f"{re.sub(r'[^A-Za-z0-9_-]', '_', cluster)[:40]}-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}"
    return state_home() / "partitions" / folder / f"{partition}.json"
