"""How parameters are sharded over ranks and cut into sub-groups, as arithmetic on plain numbers.

The engine cuts its states with these functions, and the planner predicts memory and time with the
same ones. Nothing here depends on a spec, a plan or torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Literal

OWN_LARGEST_BUCKET = 100_000_000
"""Most parameters in a reduce bucket of the project's own engine."""
PERSISTENCE_THRESHOLD = 100_000
"""ZeRO-3 stores parameters smaller than this whole on every rank (DeepSpeed's default); the
project's own engine stores none whole.
"""
GATHERED_AHEAD = 400_000_000
"""Parameters that several ranks all-gather ahead of the layer that computes, and by which the host
may run ahead of the GPU; a layer where a layer is larger. One rank that fetches its weights from
host memory waits for no other, so a layer is enough.
"""


def partition_numel(numel: int, ranks: int) -> int:
    """Return the elements of one rank's shard of a parameter: cut evenly, the last shard padded."""
    return -(-numel // ranks)


def live_parameters(largest_layer: int, ranks: int) -> int:
    """Return how many all-gathered parameters ZeRO-3 may hold before it stops: this layer and the
    next, more where they are small.
    """
    return max(2 * largest_layer, GATHERED_AHEAD if ranks > 1 else 0)


def run_ahead_parameters(largest_layer: int, ranks: int) -> int:
    """Return by how many parameters the host may run ahead of the GPU. They stay all-gathered until
    the GPU has used them.
    """
    return max(largest_layer, GATHERED_AHEAD if ranks > 1 else 0)


def sub_group_slices(numels: Sequence[int], sub_group_size: int) -> tuple[tuple[int, int], ...]:
    """Return the index ranges ``(start, stop)`` of the sub-groups of one parameter group.

    Greedy, as DeepSpeed's ``_create_fp16_sub_groups``: append parameters until their sum reaches
    ``sub_group_size``. Every sub-group but the last holds at least ``sub_group_size`` elements, and
    none as much as that plus its last parameter.
    """
    slices: list[tuple[int, int]] = []
    start = total = 0
    for index, numel in enumerate(numels):
        total += numel
        if total >= sub_group_size:
            slices.append((start, index + 1))
            start, total = index + 1, 0
    if start < len(numels):
        slices.append((start, len(numels)))
    return tuple(slices)


def gpu_sub_groups(numels: Sequence[int], ratio: float) -> int:
    """Return how many of the first sub-groups stay on the GPU: as many parameters as possible, but
    no more than ``1 - ratio``.

    The first ones, because backward reaches them last: what it reaches first has the longest time
    to be stepped on the CPU.
    """
    total = sum(numels)
    # The slack is for (1 - 0.9) * 10, which is a little less than 1 in floating point.
    budget = (1 - ratio) * total + 1e-12 * total
    return bisect_right(list(accumulate(numels)), budget)


StatesFormat = Literal["fp32", "bf16-moments", "int8-moments"]
"""Format of Adam's states in host memory. Master weights are always fp32."""

MOMENT_BLOCK = 128
"""8-bit moments with a common exponent."""


def moments_bytes(states: StatesFormat) -> float:
    """Return the bytes per parameter of both moments, with a byte for every block of 8-bit
    moments.
    """
    return {"fp32": 8.0, "bf16-moments": 4.0, "int8-moments": 2 + 2 / MOMENT_BLOCK}[states]


def state_bytes(weight_bytes: int, states: StatesFormat, *, accumulates: bool) -> float:
    """Return the host memory per parameter of the engine's states: master weight, two moments,
    staging buffer, summed gradient.
    """
    return 4 + moments_bytes(states) + weight_bytes + (4 if accumulates else 0)


def speculation_bytes(weight_bytes: int, states: StatesFormat, *, host_weights: bool) -> float:
    """Return the host memory per parameter of a second set of states: master weight, two moments,
    and the new weight.

    Weights in host memory take the new weight themselves.
    """
    return state_bytes(0 if host_weights else weight_bytes, states, accumulates=False)


def speculating(numels: Sequence[int], most: int) -> tuple[int, ...]:
    """Return which CPU sub-groups are stepped before the gradient norm is known, where not all can
    have a second set of states.

    They are spread evenly: the worker has something to do from the start of backward to its end,
    and what is held back is stepped while the next forward computes the layers before it.

    Args:
        numels: Their elements, in the order in which a forward pass first uses them.
        most: How many elements may have a second set of states.
    """
    chosen: set[int] = set()
    total, taken, seen = sum(numels), 0, 0
    for position, numel in enumerate(numels):
        seen += numel
        if taken + numel <= min(most, most * seen / total):
            chosen.add(position)
            taken += numel
    for position, numel in enumerate(numels):  # what rounding left over
        if position not in chosen and taken + numel <= most:
            chosen.add(position)
            taken += numel
    return tuple(sorted(chosen))


def copy_bytes(states: StatesFormat) -> float:
    """Return the host memory per parameter of a copy of the states, from which a checkpoint is
    written: master weight and two moments.
    """
    return 4 + moments_bytes(states)


def copied(sizes: Sequence[float], second: Collection[int], budget: float) -> tuple[int, ...]:
    """Return which sub-groups have room for a copy of their states, where not all can.

    First those without second states, because training waits until what has no copy at all is
    written. The others' second states can hold the copy, and then they cannot speculate until it is
    written.

    Args:
        sizes: The bytes of each sub-group's copy.
        second: The sub-groups with second states.
        budget: The bytes that all copies may take.
    """
    chosen: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (index in second, index)):
        if sizes[index] <= budget:
            chosen.append(index)
            budget -= sizes[index]
    return tuple(sorted(chosen))
