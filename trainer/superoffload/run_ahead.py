"""The run-ahead limiter: keeps the host from queueing all-gathers too far ahead of the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point in the GPU's work, such as a ``torch.cuda.Event``."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


SMALL_SHARE = 1 / 100
"""Modules with less than this share of the limit (norms) are not counted. Waiting for the GPU to reach one would leave the GPU idle."""


class RunAheadLimiter:
    """Limits how many all-gathered parameters the host may be ahead of the GPU.

    ZeRO-3 releases all-gathered weights as soon as the host has passed their layer, but their memory is free only when the GPU has
    passed it too. Nothing else holds back a fast host: on two H200s it all-gathered 12 layers of an 8B model too many, 5 GB.

    Used by one thread only: each device has one thread for its backward.

    Args:
        limit: Parameters that the host may have all-gathered beyond those that the GPU has begun to use.
        event: Makes an event of the current stream.
    """

    def __init__(self, limit: int, event: Callable[[], Event]) -> None:
        self._limit = limit
        self._event = event
        self._ahead: deque[tuple[Event, int]] = deque()
        self._numel = 0
        self._last: object = None

    def before_use(self, module: object, numel: int) -> None:
        """Record that the host now queues work with ``module``, of ``numel`` parameters, and wait until the GPU is near.

        A module that is used twice in a row counts once: backward uses a layer, and again when it recomputes the layer.
        """
        if numel < SMALL_SHARE * self._limit or module is self._last:
            return
        self._last = module
        event = self._event()
        event.record()
        self._ahead.append((event, numel))
        self._numel += numel
        while (
            self._numel > self._limit and len(self._ahead) > 1
        ):  # never wait for the newest: the GPU would run out of work
            oldest, passed = self._ahead.popleft()
            self._numel -= passed
            oldest.synchronize()
