"""The machine that a spec's place has: this one, or the one that a partition's jobs have seen."""

from __future__ import annotations

import logging
from datetime import datetime

from msgspec.structs import replace

from so_tui.launch.partition_machines import seen_machine
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine, Network
from so_tui.spec import Refusal, Refused, RunSpec
from so_tui.trust.printable import so_tui_command

_LOG = logging.getLogger(__name__)


def machine_of(spec: RunSpec, here: Machine | None = None) -> Machine:
    """Return the machine to plan a spec for. Until a job has seen a node of the partition, this machine stands for it.

    Args:
        spec: What is planned.
        here: This machine, if it has been inspected already.
    """
    machine = machine_of_partition(spec.slurm.partition, here)
    return with_network(machine, spec) if spec.nodes > 1 and spec.slurm.partition else machine


def with_network(machine: Machine, spec: RunSpec) -> Machine:
    """Return the machine of a spec's partition with the network that its site profile publishes, unless a job has seen its adapters.

    Raises:
        InputError: There is no such profile, or it is wrong.
    """
    from so_tui.launch.executors.slurm.executor import site_of

    if machine.network is not None and seen_machine(spec.slurm.partition) is not None:
        return machine
    _, site = site_of(spec)
    if not site.network_gbit_per_s:
        return machine
    return replace(machine, network=Network(gbit_per_s=site.network_gbit_per_s, source=f"{site.title}: {site.source}"))


def machine_of_partition(partition: str, here: Machine | None = None) -> Machine:
    """Return the machine of a partition, or this one if it is empty; otherwise as ``machine_of``."""
    seen = seen_machine(partition) if partition else None
    if seen is not None:
        _LOG.info("partition %s: the machine that a job saw on %s", partition, datetime.fromtimestamp(seen.seen).date())
        return seen.machine
    if partition:
        _LOG.info("partition %s: no job has seen its machine; this one stands for it", partition)
    return here or inspect_machine()


def with_remedy(error: Refused, spec: RunSpec, *, described: bool) -> Refused:
    """Return why a spec was refused, with how to get to know the partition's machine if only this one was known.

    Args:
        error: Why the plan was refused.
        spec: What was planned.
        described: The user gave the machine.
    """
    partition = spec.slurm.partition
    if not partition or described or seen_machine(partition) is not None:
        return error
    measure = so_tui_command("run", "tiny", "--partition", partition)
    message = (
        f"the nodes of partition {partition} are not known yet, so this plan is for the machine you are on. "
        f"`{measure}` records them in a minute; --machine names or describes them"
    )
    return Refused([*error.refusals, Refusal("partition-unknown", message)], forceable=error.forceable)
