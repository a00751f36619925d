"""The partitions of a cluster as ``sinfo`` lists them: limits, nodes, GPUs and features."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from so_tui.launch.executors.slurm.commands import sinfo

_FORMAT = "%P|%a|%l|%F|%G|%f"
"""A line for each group of nodes that are alike: partition (the default one with a star), state, time limit, nodes that are
allocated/idle/other/in all, generic resources, features."""
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d{1,4})")
_COUNTS = re.compile(r"(\d{1,9})/(\d{1,9})/(\d{1,9})/(\d{1,9})")
_NONE = frozenset(("(null)", "N/A", ""))


class Partition(Struct, frozen=True, kw_only=True):
    """A partition, over all of its nodes."""

    name: str
    default: bool = False
    open: bool = True
    """Whether it takes jobs."""
    time_limit: str = ""
    """As Slurm writes it: ``1-00:00:00``; empty where there is none."""
    nodes: int = 0
    idle: int = 0
    gpus: int = 0
    """Most that a node has; 0 if none is configured as a resource."""
    features: tuple[str, ...] = ()


def partitions() -> tuple[Partition, ...]:
    """Return the partitions that this user can see, the default one first. Raises SlurmError."""
    return parse_partitions(sinfo(_FORMAT))


def parse_partitions(printed: str) -> tuple[Partition, ...]:
    """Parse lines of ``sinfo``; a line of another form is left out."""
    found: dict[str, list[Partition]] = {}
    for line in printed.splitlines():
        if (part := _parsed(line.strip().split("|"))) is not None:
            found.setdefault(part.name, []).append(part)
    return tuple(
        sorted(map(_together, found.values()), key=lambda partition: not partition.default)
    )


def _parsed(row: list[str]) -> Partition | None:
    counts = _COUNTS.fullmatch(row[3]) if len(row) == 6 else None
    if counts is None:
        return None
    name, state, limit, _, resources, features = row
    return Partition(
        name=name.rstrip("*"),
        default=name.endswith("*"),
        open=state == "up",
        time_limit="" if limit in ("infinite", *_NONE) else limit,
        nodes=int(counts[4]),
        idle=int(counts[2]),
        gpus=sum(map(int, _GPUS.findall(resources))),
        features=() if features in _NONE else tuple(features.split(",")),
    )


def _together(parts: Iterable[Partition]) -> Partition:
    first, *others = parts
    every = (first, *others)
    return Partition(
        name=first.name,
        default=first.default,
        open=first.open,
        time_limit=first.time_limit,
        nodes=sum(part.nodes for part in every),
        idle=sum(part.idle for part in every),
        gpus=max(part.gpus for part in every),
        features=tuple(dict.fromkeys(feature for part in every for feature in part.features)),
    )
