"""What host memory has room for besides the states: second sets of states, and copies from which a
checkpoint is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from so_tui.model.sharding import (
    StatesFormat,
    copied,
    copy_bytes,
    speculating,
    speculation_bytes,
    state_bytes,
)
from superoffload.gpu_states import SubGroup
from superoffload.settings import Settings

_ROUNDING_BYTES = 16 << 20
"""The arrays' alignment takes less."""


@dataclass(frozen=True)
class HostRoom:
    """Sub-groups that have more than one set of states."""

    second: frozenset[int]
    """CPU sub-groups with a second set, so that they can be stepped before the gradient norm is
    known.
    """
    copied: tuple[int, ...]
    """Sub-groups with room for a copy of their states."""


def host_room(
    sub_groups: Sequence[SubGroup],
    settings: Settings,
    *,
    clips: bool,
    accumulates: bool,
    host_weights: bool,
) -> HostRoom:
    """Share out what the states of the CPU sub-groups leave of the host's memory: second sets
    first, then copies.

    Args:
        sub_groups: All sub-groups of the rank.
        settings: How much of it each may take at most.
        clips: Whether gradients are clipped; only then are second sets of use.
        accumulates: Whether the states include accumulated gradients.
        host_weights: Whether the weights of the CPU sub-groups are in host memory.
    """
    spare = _spare_bytes(
        sub_groups, settings.available_bytes(), settings.states, accumulates=accumulates
    )
    second: frozenset[int] = frozenset()
    if clips and settings.speculation_bytes:
        each = speculation_bytes(
            sub_groups[0].weights.dtype.itemsize, settings.states, host_weights=host_weights
        )
        second = _speculating_within(sub_groups, each, min(settings.speculation_bytes, spare))
        spare -= int(each * sum(sub_groups[index].weights.numel() for index in second))
    sizes = [
        copy_bytes("fp32" if group.on_gpu else settings.states) * group.weights.numel()
        for group in sub_groups
    ]
    return HostRoom(
        second,
        tuple(copied(sizes, second, min(settings.copies_bytes, spare))),
    )


def within_share(
    sub_groups: Sequence[SubGroup],
    settings: Settings,
    ranks: int,
    *,
    clips: bool,
    accumulates: bool,
    host_weights: bool,
) -> Settings:
    """Return settings with which the ranks of a host, all started at once, take no more of its
    memory together than it has.

    Each finds the whole of it available, as none has allocated anything yet.

    Args:
        sub_groups: All sub-groups of the rank.
        settings: What second sets and copies may take at most.
        ranks: How many ranks the host has.
        clips: Whether gradients are clipped; only then are second sets of use.
        accumulates: Whether the states include accumulated gradients.
        host_weights: Whether the weights of the CPU sub-groups are in host memory.
    """
    available_bytes = settings.available_bytes()
    if ranks == 1 or available_bytes is None:
        return settings
    spare = _spare_bytes(
        sub_groups, available_bytes // ranks, settings.states, accumulates=accumulates
    )
    each = speculation_bytes(
        sub_groups[0].weights.dtype.itemsize, settings.states, host_weights=host_weights
    )
    most = min(settings.speculation_bytes, spare)
    second = (
        min(most, each * sum(group.weights.numel() for group in sub_groups if not group.on_gpu))
        if clips
        else 0
    )
    return replace(
        settings,
        speculation_bytes=most,
        copies_bytes=min(settings.copies_bytes, int(spare - second)),
    )


def _spare_bytes(
    sub_groups: Sequence[SubGroup],
    available_bytes: int | None,
    states: StatesFormat,
    *,
    accumulates: bool,
) -> int:
    """Return the host memory that the states of the CPU sub-groups leave; no limit where the
    available memory is not known.
    """
    if available_bytes is None:
        return sys.maxsize
    each = state_bytes(sub_groups[0].weights.dtype.itemsize, states, accumulates=accumulates)
    needed = each * sum(group.weights.numel() for group in sub_groups if not group.on_gpu)
    return max(0, available_bytes - int(needed) - _ROUNDING_BYTES)


def _speculating_within(
    sub_groups: Sequence[SubGroup], each_bytes: float, budget_bytes: int
) -> frozenset[int]:
    """Return the CPU sub-groups that can have a second set of states, of ``each_bytes`` a
    parameter, within this much host memory.
    """
    on_cpu = sorted(
        (index for index, group in enumerate(sub_groups) if not group.on_gpu),
        key=lambda index: sub_groups[index].first_use,
    )
    numels = [sub_groups[index].weights.numel() for index in on_cpu]
    return frozenset(
        on_cpu[position] for position in speculating(numels, int(budget_bytes / each_bytes))
    )
