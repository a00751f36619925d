"""Two partitions of cache and memory bandwidth along the split of main and Adam cores, within what a resctrl file system allows.

SuperOffload's authors published the split for a Grace: the main cores keep all bandwidth and two thirds of the L3 cache, the Adam cores,
which stream through memory, get 20 % and the other third.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from so_tui.machine.resctrl import Resctrl
from so_tui.plan.plan import RankBinding

ADAM_BANDWIDTH = 0.2
ADAM_CACHE = 1 / 3
_LEAST_BANDWIDTH = 0.06
"""Grace's hardware keeps at least 5 % between the least and the most bandwidth of a partition (erratum T241-MPAM-4)."""
_GROUPS = 3
"""Both partitions, and the default group."""

Role = Literal["main", "adam"]
Obstacle = Literal["no-adam-cores", "no-controls", "too-few-groups", "cores-taken"]


class Partition(Struct, frozen=True, kw_only=True):
    """One control group."""

    role: Role
    cpus: tuple[int, ...]
    schemata: tuple[str, ...]
    """Its lines: ``MB:1=20``, ``L3:1=f``."""


def partitions(found: Resctrl, bindings: Sequence[RankBinding]) -> tuple[Partition, ...] | Obstacle:
    """Return a partition of the main cores of all ranks and one of their Adam cores, or why there are none."""
    adam = {cpu for binding in bindings for cpu in binding.adam_cpus}
    main = {cpu for binding in bindings for cpu in binding.main_cpus} - adam
    if not adam or not main:
        return "no-adam-cores"
    if len(found.groups) + _GROUPS > found.most_groups:
        return "too-few-groups"
    if any((adam | main).intersection(cpus) for cpus in found.groups.values()):
        return "cores-taken"
    wanted = (_partition(found, "main", main), _partition(found, "adam", adam))
    return wanted if any(partition.schemata for partition in wanted) else "no-controls"


def _partition(found: Resctrl, role: Role, cpus: set[int]) -> Partition:
    lines = tuple(_schemata(found, role == "adam", {found.cache_of.get(cpu) for cpu in cpus}))
    return Partition(role=role, cpus=tuple(sorted(cpus)), schemata=lines)


def _schemata(found: Resctrl, adam: bool, caches: Iterable[int | None]) -> Iterator[str]:
    """Yield the lines of a partition for the L3 caches of its CPUs; where those are not known, for all."""
    own = set(caches)

    def line(name: str, values: dict[int, str]) -> Iterator[str]:
        parts = [
            f"{cache}={value}" for cache, value in values.items() if cache in own or None in own
        ]
        if parts:
            yield f"{name}:{';'.join(parts)}"

    yield from line(
        "MB",
        {
            cache: str(_bandwidth(found, full) if adam else full)
            for cache, full in found.bandwidth.items()
        },
    )
    for name, masks in found.caches.items():
        yield from line(
            name,
            {cache: f"{_cut(mask, found.least_bits)[adam]:x}" for cache, mask in masks.items()},
        )


def _bandwidth(found: Resctrl, full: int) -> int:
    """Return the bandwidth of the Adam cores, in whole steps."""
    least = max(found.least_bandwidth, math.ceil(_LEAST_BANDWIDTH * full))
    steps = math.ceil(round(max(least, ADAM_BANDWIDTH * full) / found.bandwidth_step, 6))
    return min(full, steps * found.bandwidth_step)


def _cut(mask: int, least_bits: int) -> tuple[int, int]:
    """Return the masks of main and Adam cores: parts of ``mask``, or all of it for both where it has too few bits."""
    first = mask & -mask
    low = max(least_bits, round(mask.bit_count() * ADAM_CACHE))
    contiguous = (mask + first) & mask == 0  # as all but a few processors have them
    if not contiguous or mask.bit_count() - low < max(1, least_bits):
        return mask, mask
    adam = ((1 << low) - 1) * first
    return mask & ~adam, adam
