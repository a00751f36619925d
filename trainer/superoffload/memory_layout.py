"""The memory that the Adam worker shares with the training process: which arrays each sub-group
has, and where.

Only the standard library is used, since the worker process imports this too.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

REGION_ALIGNMENT = 65536
"""Bytes. The largest page size in use (aarch64), so that a region can be pinned without its
neighbours.
"""
SUB_GROUP_ALIGNMENT = 64
"""Bytes. A cache line, so that threads working on adjacent sub-groups share none."""
BLOCK = 128
"""Elements of 8-bit moments that have one exponent, counted from the start of the whole parameter
(``so_tui.model.sharding.MOMENT_BLOCK``, which the worker process cannot import).
"""


class Moments(IntEnum):
    """Format of Adam's moments (``moments.h``)."""

    FP32 = 0
    BF16 = 1
    INT8 = 2

    @property
    def element_bytes(self) -> int:
        """Bytes of one moment; 8-bit moments have an exponent for each block besides."""
        return (4, 2, 1)[self]


class Segment(NamedTuple):
    """This rank's shard of one parameter, in a sub-group."""

    numel: int
    place: int = 0
    """Its first element, in the whole parameter."""
    random: int = 0
    """32 bits that select the random bits by which compact moments are rounded."""

    @property
    def blocks(self) -> int:
        """Blocks of 8-bit moments that it has a part of."""
        return (self.place + self.numel - 1) // BLOCK - self.place // BLOCK + 1 if self.numel else 0


class MemorySize(NamedTuple):
    """What decides the layout of the shared memory."""

    sub_groups: tuple[tuple[Segment, ...], ...]
    weight_bytes: int
    """Of one weight: 2 for bf16, 4 for fp32."""
    accumulate: bool
    """Whether there is room for accumulated gradients."""
    speculating: tuple[int, ...] = ()
    """Positions of the sub-groups that have a second set of states."""
    moments: Moments = Moments.FP32
    copied: tuple[int, ...] = ()
    """Positions of the sub-groups that have room for a copy of their states."""
    host_weights: bool = False
    """Whether the weights are in host memory, in a second shared memory (``weights_layout``)."""

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each sub-group."""
        return tuple(sum(segment.numel for segment in segments) for segments in self.sub_groups)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Exponents of each sub-group's first or second moments."""
        if self.moments is not Moments.INT8:
            return (0,) * len(self.sub_groups)
        return tuple(sum(segment.blocks for segment in segments) for segments in self.sub_groups)


class StateOffsets(NamedTuple):
    """Byte offsets of one set of states."""

    master_weights: tuple[int, ...]
    first_moment: tuple[int, ...]
    second_moment: tuple[int, ...]
    first_exponents: tuple[int, ...]
    """One byte for each block of 8-bit moments; of no size in other formats."""
    second_exponents: tuple[int, ...]


class _MemoryLayout(NamedTuple):
    """Byte offsets of each sub-group's arrays in the shared memory, whose first 8 bytes hold the
    progress counter.
    """

    staging: tuple[int, ...]
    new_weights: tuple[int, ...]
    """Where SPECULATE leaves the weights. Of no size for a sub-group that does not speculate, as
    the second set of states, and where the weights are in host memory.
    """
    states: tuple[StateOffsets, StateOffsets, StateOffsets]
    """By ``StatesSet``; of no size where a sub-group lacks the set."""
    accumulated: tuple[int, ...]
    """Empty without gradient accumulation."""
    staging_bytes: int
    bytes: int
    """Size of the whole memory."""


def memory_size(values: Sequence[Any]) -> MemorySize:
    """Return a size of which only plain lists are left, as after JSON."""
    sub_groups, weight_bytes, accumulate, speculating, moments, copied, host_weights = values
    segments = tuple(tuple(Segment(*segment) for segment in group) for group in sub_groups)
    return MemorySize(
        segments,
        weight_bytes,
        accumulate,
        tuple(speculating),
        Moments(moments),
        tuple(copied),
        host_weights,
    )


def layout(size: MemorySize) -> _MemoryLayout:
    """Lay out the shared memory.

    With bf16 weights it has 14 bytes a parameter, 10 with bf16 moments and 8 with 8-bit moments
    (and 2 for every block); as many again for one that speculates, 4 with gradient accumulation,
    and for one with a copy what its states take.
    """
    end = REGION_ALIGNMENT

    def region(element_bytes: int, numels: tuple[int, ...]) -> tuple[int, ...]:
        nonlocal end
        offsets = []
        for numel in numels:
            offsets.append(end)
            end += -(-numel * element_bytes // SUB_GROUP_ALIGNMENT) * SUB_GROUP_ALIGNMENT
        end = -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return tuple(offsets)

    numels = size.numels

    def of(having: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(each if index in having else 0 for index, each in enumerate(sizes))

    def states_of(having: tuple[int, ...]) -> StateOffsets:
        elements, blocks = of(having, numels), of(having, size.blocks)
        moment = size.moments.element_bytes
        return StateOffsets(
            region(4, elements),
            region(moment, elements),
            region(moment, elements),
            region(1, blocks),
            region(1, blocks),
        )

    second_buffers = () if size.host_weights else size.speculating
    staging = region(size.weight_bytes, numels)
    new_weights = region(size.weight_bytes, of(second_buffers, numels))
    staging_bytes = end - REGION_ALIGNMENT
    states = (
        states_of(tuple(range(len(numels)))),
        states_of(size.speculating),
        states_of(size.copied),
    )
    accumulated = region(4, numels) if size.accumulate else ()
    return _MemoryLayout(staging, new_weights, states, accumulated, staging_bytes, end)


def weights_layout(numels: Sequence[int], weight_bytes: int) -> tuple[tuple[int, ...], int]:
    """Return the byte offsets of each sub-group's weights in the memory that holds nothing else,
    and its size.
    """
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel * weight_bytes // SUB_GROUP_ALIGNMENT) * SUB_GROUP_ALIGNMENT
    return tuple(offsets), -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
