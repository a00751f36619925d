"""When the weights that an Adam worker updated are on the GPU again, sub-group by sub-group, and what a forward waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple


class Update(NamedTuple):
    """One sub-group's way through the Adam worker. Time 0 is the end of backward."""

    begin: float
    """When a forward first uses it, as a share of the forward."""
    ready_s: float
    """When the worker may take it."""
    adam_s: float
    weights_bytes: int
    """New weights that are copied to the GPU; none where they stay in host memory."""


def arrivals(
    updates: Iterable[Update], h2d_bytes_per_s: float, copy_latency_s: float
) -> list[tuple[float, float]]:
    """Return (when a forward first uses it, seconds at which its new weights are on the GPU) of each sub-group.

    Of the sub-groups that are ready, the worker takes the one that a forward uses first.

    Args:
        updates: The sub-groups.
        h2d_bytes_per_s: Rate of the copies.
        copy_latency_s: From the end of a sub-group's Adam until the copy of its weights begins.
    """
    coming = sorted(updates, key=attrgetter("ready_s"), reverse=True)
    ready: list[tuple[float, int, Update]] = []
    worker = copies = float("-inf")
    found = []
    while coming or ready:
        if not ready:
            worker = max(worker, coming[-1].ready_s)
        while coming and coming[-1].ready_s <= worker:
            heappush(ready, (coming[-1].begin, len(coming), coming.pop()))
        begin, _, (_, _, adam_s, weights_bytes) = heappop(ready)
        worker += adam_s
        copies = max(copies, worker + copy_latency_s) + weights_bytes / h2d_bytes_per_s
        found.append((begin, copies))
    return found


def weight_wait_s(
    updates: Iterable[Update],
    h2d_bytes_per_s: float,
    copy_latency_s: float,
    forward_s: float,
    forward_begins_s: float,
) -> float:
    """Return how long the forward after a step waits for weights that are still to be updated or copied. Arguments as ``arrivals``."""
    found = arrivals(updates, h2d_bytes_per_s, copy_latency_s)
    return max(0.0, *(at - forward_begins_s - begin * forward_s for begin, at in found))
