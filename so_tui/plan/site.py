"""The part of a machine that a run would use: which GPUs, which nodes, how much memory, how fast."""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from so_tui.machine.types import Gpu, Machine
from so_tui.plan.binding import bind_ranks, whole_gpus
from so_tui.plan.calibration import Calibration, Probe, calibration_of, speed_of
from so_tui.plan.constants import Speed, digest
from so_tui.plan.types import RankBinding, Workload
from so_tui.plan.verdict import Supply, memory_node, supply_of
from so_tui.spec.errors import InputError

Gpus = int | tuple[int, ...]

ROUNDS_NO_MORE = (2, 13)
"""The first torch that can be told not to round pinned memory, which the launcher does."""


class Site(Struct, frozen=True, kw_only=True):
    machine: Machine
    gpus: Gpus
    ranks: int
    has_gpu: bool
    """Whether the machine has GPUs at all; without them ranks run on the CPU."""
    gpu_name: str
    supply: Supply
    nodes: tuple[int, ...]
    """The CPU node that each rank has its memory from; empty when there is a problem."""
    cores: int
    """Cores of the smallest rank."""
    adam_cores: int
    """Of these, those that run CPU Adam beside the training process."""
    speed: Speed | None
    probes: tuple[Probe, ...]
    """What was measured here of real runs, any model."""
    known: Calibration | None
    """All that was measured of the machine."""
    pinned_rounded: bool
    """Whether torch rounds pinned memory up to powers of two; assumed where its version is not known."""
    workload: Workload | None = None
    """What is known of the data that is to be trained on."""
    problem: str
    """Why the ranks cannot be placed on this machine; empty when they can."""

    @property
    def gpu_memory_unknown(self) -> bool:
        """Whether it can be said of no plan that it fits."""
        return self.has_gpu and self.supply.gpu_bytes is None

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share the fullest node."""
        return max((self.nodes.count(node) for node in set(self.nodes)), default=1)


def rank_counts(machine: Machine) -> tuple[int, ...]:
    """GPU counts worth planning for: 1, 2, 4, ... and all of them; ranks on a machine without GPUs."""
    most = len(whole_gpus(machine)) or (1 if machine.gpus else min(2, len(machine.allowed_cpus)))
    doubled = tuple(2**power for power in range(most.bit_length()))
    return doubled if doubled[-1] == most else (*doubled, most)


@lru_cache(maxsize=256)
def bindings(machine: Machine, gpus: Gpus, mode: str, cpu_adam_cores_fraction: float) -> tuple[RankBinding, ...]:
    """``bind_ranks``, remembered: the planner asks for the same binding at many ratios."""
    return bind_ranks(machine, gpus, mode=mode, cpu_adam_cores_fraction=cpu_adam_cores_fraction)


def site_of(machine: Machine, gpus: Gpus, cpu_adam_cores_fraction: float) -> Site:
    """The site of these GPUs (a count or indices; ranks where the machine has none). A site that cannot be had says why.

    Its rates are what was calibrated on the machine or one like it, else published ones.
    """
    return _site(machine, gpus, cpu_adam_cores_fraction, calibration_of(machine) if machine.gpus else None)


def other_site(site: Site, gpus: Gpus, cpu_adam_cores_fraction: float) -> Site:
    """``site_of`` other GPUs, or with other cores, of the same machine and for the same data."""
    return replace(_site(site.machine, gpus, cpu_adam_cores_fraction, site.known), workload=site.workload)


@lru_cache(maxsize=256)
def _site(machine: Machine, gpus: Gpus, cpu_adam_cores_fraction: float, known: Calibration | None) -> Site:
    ranks = gpus if isinstance(gpus, int) else len(gpus)
    chosen = _chosen(machine, gpus)
    problem = _missing(machine, gpus)
    placed: tuple[RankBinding, ...] = ()
    if not problem:
        try:
            placed = bindings(machine, gpus, "superoffload", cpu_adam_cores_fraction)
        except InputError as error:
            problem = "; ".join(f"{found.message}. {found.remedy}" for found in error.problems)
    name = chosen[0].name if chosen else ""
    fallback = machine.cpu_nodes[0].id if machine.cpu_nodes else 0
    return Site(
        machine=machine,
        gpus=gpus,
        ranks=ranks,
        has_gpu=bool(machine.gpus),
        gpu_name=name,
        supply=supply_of(machine, chosen),
        nodes=tuple(memory_node(machine, rank.numa_node if rank.numa_node is not None else fallback) for rank in placed),
        cores=min((len(rank.cpus) for rank in placed), default=1) or 1,
        adam_cores=min((len(rank.adam_cpus) for rank in placed), default=1) or 1,
        speed=speed_of(machine, name, known),
        # What other constants were off by says nothing of these.
        probes=tuple(probe for probe in known.probes if probe.constants == digest()) if known else (),
        known=known,
        pinned_rounded=bool(machine.gpus) and _version(machine.software.torch) < ROUNDS_NO_MORE,
        problem=problem,
    )


def _version(text: str | None) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return tuple(map(int, match.groups())) if match else ()


def _chosen(machine: Machine, gpus: Gpus) -> tuple[Gpu, ...]:
    if isinstance(gpus, int):
        return whole_gpus(machine)[:gpus]
    return tuple(gpu for gpu in machine.gpus if gpu.index in gpus)


def _missing(machine: Machine, gpus: Gpus) -> str:
    if not machine.gpus:
        return ""
    there = len(machine.gpus)
    has = f"{machine.label} has {there} GPU" + ("s" if there > 1 else "")
    if isinstance(gpus, int):
        return "" if gpus <= there else f"gpus = {gpus}: {has}. Ask for {'1' if there == 1 else f'{there} or fewer'}"
    indices = [gpu.index for gpu in machine.gpus]
    absent = [index for index in gpus if index not in indices]
    return f"gpus = {list(gpus)}: there is no GPU {absent[0]}, {has}. Choose from {indices}" if absent else ""
