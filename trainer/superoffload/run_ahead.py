"""How far the host may be ahead of the GPU while it gathers weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point in the GPU's work, such as ``torch.cuda.Event``."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


SMALL_SHARE = 1 / 100
"""Modules with less than this share of the limit (norms) do not count. A host that waited for the GPU to reach one would leave it idle."""


class RunAheadLimiter:
    """Lets the host ask for weights only while the GPU is near. For one thread: a device has one for its backward.

    ZeRO-3 gives gathered weights back as soon as the host has passed their layer, but their memory is free only when the GPU has passed it
    too. Nothing else holds back a host that is quick: on two H200s it gathered 12 layers of an 8B model too many, 5 GB.
    """

    def __init__(self, most: int, event: Callable[[], Event]) -> None:
        """``most``: parameters that the host may have asked for beyond those that the GPU has begun to use."""
        self._most = most
        self._event = event
        self._ahead: deque[tuple[Event, int]] = deque()
        self._numel = 0
        self._last: object = None

    def asked(self, module: object, numel: int) -> None:
        """``module``, of ``numel`` parameters, is used from now on by what the host gives the GPU to do. Waits until the GPU is near.

        What is asked for twice in a row counts once: backward asks for a layer, and again when it computes the layer anew.
        """
        if numel < SMALL_SHARE * self._most or module is self._last:
            return
        self._last = module
        event = self._event()
        event.record()
        self._ahead.append((event, numel))
        self._numel += numel
        while self._numel > self._most and len(self._ahead) > 1:  # never for the newest: what comes after it is not there yet
            oldest, passed = self._ahead.popleft()
            self._numel -= passed
            oldest.synchronize()
