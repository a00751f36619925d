"""Copies between GPU and host memory that run concurrently with computation, and the times and
bytes of a step.

Without a GPU the same calls are plain copies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

# The run-ahead limiter: keeps the host from queueing all-gathers too far ahead of the GPU.


Event = Any
"""A point in the work of a stream, and its time: a ``torch.cuda.Event`` or a ``CompletedEvent``."""


@dataclass(frozen=True)
class CompletedEvent:
    """An event that has completed, as every one has without a GPU."""

    time_s: float = field(default_factory=time.perf_counter)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: CompletedEvent) -> float:
        """Return the time from this event to another, in milliseconds."""
        return (end.time_s - self.time_s) * 1e3


def seconds_between(begin: Event, end: Event) -> float:
    """Return the time between two events, negative if ``end`` came first. Waits until both have
    completed.
    """
    begin.synchronize()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


SMALL_SHARE = 1 / 100
"""Modules with less than this share of the limit (norms) are not counted. Waiting for the GPU to
reach one would leave the GPU idle.
"""


class RunAheadLimiter:
    """Limits how many all-gathered parameters the host may be ahead of the GPU.

    ZeRO-3 releases all-gathered weights as soon as the host has passed their layer, but their
    memory is free only when the GPU has passed it too. Nothing else holds back a fast host: on two
    H200s it all-gathered 12 layers of an 8B model too many, 5 GB.

    Used by one thread only: each device has one thread for its backward.

    Args:
        limit: Parameters that the host may have all-gathered beyond those that the GPU has begun to
            use.
        event: Makes an event of the current stream.
    """

    def __init__(self, limit: int, event: Callable[[], Event]) -> None:
        self._limit = limit
        self._event = event
        self._ahead: deque[tuple[Event, int]] = deque()
        self._numel = 0
        self._last: object = None

    def before_use(self, module: object, numel: int) -> None:
        """Record that the host now queues work with ``module``, of ``numel`` parameters, and wait
        until the GPU is near.

        A module that is used twice in a row counts once: backward uses a layer, and again when it
        recomputes the layer.
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


Copy = tuple[Tensor, Tensor]
"""(target, source)"""

Stream = Any
"""A ``torch.cuda.Stream``; None without a GPU."""

MAX_D2H_IN_FLIGHT = 2
"""Batches of gradients that may wait for the bus before computation waits for them. Bounds the GPU
memory that they hold.
"""


@dataclass(frozen=True)
class Transfer:
    """Copies that were queued together."""

    begin: Event
    end: Event
    bytes: int


class Transfers:
    """Copies in both directions; without a GPU every copy is complete when its call returns.

    ``attach`` and ``weights_to_gpu`` may be called from any thread, all other methods from the
    training thread only, on the stream on which it computes.
    """

    def attach(self) -> None:
        """Prepare the calling thread for ``weights_to_gpu`` and events. Call it first in every
        thread but the training thread.
        """

    def gradients_to_host(self, copies: Sequence[Copy], after: Iterable[Event]) -> Transfer:
        """Copy what the current stream has computed so far; ``after``: events before which the
        targets must not be overwritten.
        """
        begin = CompletedEvent()
        for target, source in copies:
            target.copy_(source)
        return Transfer(begin, CompletedEvent(), _bytes(copies))

    def weights_to_gpu(self, target: Tensor, source: Tensor) -> Transfer:
        """Copy ``source``, in pinned memory, to ``target``."""
        return self.gradients_to_host([(target, source)], ())

    def wait_event(self, event: Event) -> None:
        """Make the current stream wait for ``event``. The host does not wait."""

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        """Queue a copy of a small tensor; it is valid once the returned event has completed."""
        return values.clone(), CompletedEvent()

    def states_to_host(self, copies: Sequence[Copy]) -> Event:
        """Queue copies to pinned memory, behind what the current stream computes; they are valid
        once the returned event has completed.
        """
        return self.gradients_to_host(copies, ()).end

    def stream(self) -> Stream:
        """Return the current stream."""
        return None

    def mark(self, stream: Stream = None) -> Event:
        """Return the event in which ``stream``, by default the current one, has done what is queued
        so far.
        """
        return CompletedEvent()


class _CudaTransfers(Transfers):
    """One stream per direction: the bus carries both directions at the same time, and copies in one
    direction stay in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._d2h = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._h2d = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[Event] = deque()

    def attach(self) -> None:
        """Set the calling thread's device.

        A new thread starts on the first GPU. Leaving another GPU's stream would then open a CUDA
        context there.
        """
        torch.cuda.set_device(self._d2h.device)

    def gradients_to_host(self, copies: Sequence[Copy], after: Iterable[Event]) -> Transfer:
        computing = torch.cuda.current_stream()
        self._d2h.wait_stream(computing)
        for event in after:
            self._d2h.wait_event(event)
        transfer = self._copy(self._d2h, copies)
        for _, source in copies:
            source.record_stream(self._d2h)
        self._in_flight.append(transfer.end)
        if len(self._in_flight) > MAX_D2H_IN_FLIGHT:
            computing.wait_event(self._in_flight.popleft())
        return transfer

    def weights_to_gpu(self, target: Tensor, source: Tensor) -> Transfer:
        return self._copy(self._h2d, [(target, source)])

    def wait_event(self, event: Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        return host, self.states_to_host([(host, values)])

    def states_to_host(self, copies: Sequence[Copy]) -> Event:
        return self._copy(torch.cuda.current_stream(), copies).end

    def stream(self) -> Stream:
        return torch.cuda.current_stream()

    def mark(self, stream: Stream = None) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream())
        return event

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Copy]) -> Transfer:
        with torch.cuda.stream(stream), torch.no_grad():
            begin = self.mark()
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            return Transfer(begin, self.mark(), _bytes(copies))


def _bytes(copies: Sequence[Copy]) -> int:
    return sum(target.nbytes for target, _ in copies)


def transfers_for(device: torch.device) -> Transfers:
    """Return the transfers for a device."""
    if device.type == "cuda":
        return _CudaTransfers(device)
    return Transfers()


# Times and bytes, collected while the engine runs and reported for the last step.


class OffloadStats(Struct, frozen=True, kw_only=True):
    """Times of one step of this rank, and counts of steps. All zero where DeepSpeed's own optimizer
    runs, which does not report them.
    """

    adam_busy_s: float = 0.0
    """Time for which the Adam worker computed."""
    adam_bytes: int = 0
    """Host memory traffic of that computation: what it must at least read and write."""
    exposed_wait_s: float = 0.0
    """Time for which the GPU had nothing to do but wait for the worker, its copies or the gradient
    norm.
    """
    exposed_in_forward_s: float = 0.0
    """The part of ``exposed_wait_s`` in the forward pass: nothing was left to compute until a
    layer's new weights had arrived.
    """
    host_wait_s: float = 0.0
    """Time for which the engine blocked the main thread. The GPU may still have had work during
    it.
    """
    d2h_bytes: int = 0
    d2h_s: float = 0.0
    """Time during which gradients were being copied; without a GPU, the time of the plain
    copies.
    """
    h2d_bytes: int = 0
    h2d_s: float = 0.0
    kept_steps: int = 0
    """Steps so far in which sub-groups were stepped before the norm was known, and that was
    final.
    """
    redone_steps: int = 0
    """Those in which the norm exceeded the limit, so that the sub-groups were stepped again."""
    skipped_steps: int = 0
    """Steps so far that were skipped because a gradient was not finite."""

    @property
    def adam_bytes_per_s(self) -> float:
        return self.adam_bytes / self.adam_busy_s if self.adam_busy_s else 0.0

    @property
    def d2h_bytes_per_s(self) -> float:
        return self.d2h_bytes / self.d2h_s if self.d2h_s else 0.0

    @property
    def h2d_bytes_per_s(self) -> float:
        return self.h2d_bytes / self.h2d_s if self.h2d_s else 0.0


@dataclass(frozen=True)
class LayerWait:
    """Between ``begin`` and ``end`` the computing stream had nothing to do: a layer's weights were
    updated, copied and all-gathered.
    """

    begin: Event
    end: Event
    updated: tuple[Event, ...]
    """When the host had queued what it waited for, and when this rank's new weights were on the
    GPU. All-gathering follows.
    """

    def seconds(self) -> float:
        """Return for how long the optimizer was the reason."""
        until_updated = max(
            (seconds_between(self.begin, event) for event in self.updated), default=0.0
        )
        return max(0.0, min(seconds_between(self.begin, self.end), until_updated))


@dataclass
class _Interval:
    """Measurements from the end of one step to the end of the next."""

    layer_waits: list[LayerWait] = field(default_factory=list)
    """Waits for weights, in forward."""
    step_waits: list[tuple[Event, Event]] = field(default_factory=list)
    """Waits in ``step``, for the gradient norm and, if it waits for them, for all weights."""
    host_wait_s: float = 0.0
    adam_busy_s: float = 0.0
    adam_bytes: int = 0
    d2h: list[Transfer] = field(default_factory=list)
    h2d: list[Transfer] = field(default_factory=list)


class Meter:
    """Collects measurements of the current step in ``current``.

    The training thread adds most of them, the worker client's thread Adam's time and the copies to
    the GPU.
    """

    def __init__(self) -> None:
        self.current = _Interval()
        self._last = _Interval()

    def end_step(self) -> None:
        self._last, self.current = self.current, _Interval()

    def leave_out_waits(self) -> None:
        """Drop the waits for weights since the last step: they were not part of a step's forward
        pass.
        """
        self.current.layer_waits.clear()

    def stats(self) -> OffloadStats:
        """Return the measurements of the last step, from the end of the step before it. May wait
        for the GPU.
        """
        last = self._last
        in_forward = sum(wait.seconds() for wait in last.layer_waits)
        return OffloadStats(
            adam_busy_s=last.adam_busy_s,
            adam_bytes=last.adam_bytes,
            exposed_wait_s=in_forward + sum(seconds_between(*wait) for wait in last.step_waits),
            exposed_in_forward_s=in_forward,
            host_wait_s=last.host_wait_s,
            d2h_bytes=sum(transfer.bytes for transfer in last.d2h),
            d2h_s=sum(seconds_between(transfer.begin, transfer.end) for transfer in last.d2h),
            h2d_bytes=sum(transfer.bytes for transfer in last.h2d),
            h2d_s=sum(seconds_between(transfer.begin, transfer.end) for transfer in last.h2d),
        )
