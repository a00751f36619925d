"""What DeepSpeed's own SuperOffload adds to a step, from its source (0.19.8) and measured on H200 hosts.

Each gradient crosses the link three times: to the pinned gradient buffer, back to the GPU, and in fp32 to the optimizer's own, which is
pageable once the Adam worker has received it. Without clipping a sub-group is submitted as soon as it is complete, and Adam overlaps with
backward; with clipping each is stepped after backward, one after the other. Then the training process passes over every gradient and
master weight on the host, casts the weights there and copies them from pageable memory.
"""

from __future__ import annotations

from msgspec import Struct

from so_tui.plan.constants import Speed

UNSCALE_BYTES = 8
"""Host memory traffic per parameter of multiplying the fp32 gradient by the loss scale and the clipping factor."""
SELF_COPY_BYTES = 8
"""The same of copying a master weight onto itself, which it does for each result that it did not wait for."""
WORKER_BYTES = 36
"""The same of its Adam worker: a copy of the fp32 gradient, then AdamW in fp32."""


class OffloadedStates(Struct, frozen=True, kw_only=True):
    """What one rank has to move and step."""

    parameters: int
    """All of the rank's: every gradient goes to the host, whatever the ratio."""
    on_cpu: int
    """Those whose optimizer states are in host memory."""
    last_sub_group: int
    """Those of the largest sub-group, which the worker can only begin when backward is over."""


def gradient_copies_s(states: OffloadedStates, speed: Speed) -> float:
    """Return how long the copies of one backward's gradients take on the link; Python waits for each of them."""
    there_and_back = 2 * states.parameters * (1 / speed.d2h_bytes_per_s + 1 / speed.h2d_bytes_per_s)
    return there_and_back + 4 * states.on_cpu / speed.pageable_d2h_bytes_per_s


def exposed_adam_s(states: OffloadedStates, adam_bytes_per_s: float, backward_s: float) -> float:
    """Return how long a step without clipping waits for Adam, and then passes over gradients and master weights.

    Args:
        states: What to step.
        adam_bytes_per_s: Host memory traffic of the worker, and of the passes.
        backward_s: How long the worker has had sub-groups to step.
    """
    worker = WORKER_BYTES / adam_bytes_per_s
    waits = max(states.last_sub_group * worker, states.on_cpu * worker - backward_s)
    return waits + states.on_cpu * (UNSCALE_BYTES + SELF_COPY_BYTES) / adam_bytes_per_s


def clipped_adam_s(states: OffloadedStates, adam_bytes_per_s: float, waited_bytes: float) -> float:
    """Return how long a step with clipping takes for Adam, sub-group by sub-group.

    Args:
        states: What to step.
        adam_bytes_per_s: Host memory traffic of the worker.
        waited_bytes: Host memory traffic per parameter that takes as long as the worker and both ways to it.
    """
    return states.on_cpu * (UNSCALE_BYTES + waited_bytes) / adam_bytes_per_s
