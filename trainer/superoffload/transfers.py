"""Copies between GPU and host beside computing, and their times; on a machine without GPU the same steps as plain copies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""(target, source)"""

Event = Any
"""Something that will have happened: a ``torch.cuda.Event``, or ``Done``."""

Mark = Any
"""A moment in the GPU's own time (a timing ``torch.cuda.Event``), or in the host's without GPU (seconds)."""

IN_FLIGHT = 2
"""Batches of gradients that may wait for the bus before computing waits for them: bounds the GPU memory they hold."""


@dataclass(frozen=True)
class Transfer:
    """Copies under way."""

    begin: Mark
    end: Mark
    done: Event
    bytes: int


class Transfers(Protocol):
    """All but ``attach`` and ``weights_to_gpu`` are called from the training thread, on the stream it computes on."""

    def gradients_to_host(self, copies: Sequence[Copy], after: Iterable[Event]) -> Transfer:
        """Copies what the current stream has computed so far; ``after``: what must be done before the targets may be overwritten."""

    def attach(self) -> None:
        """Called first in any other thread."""

    def weights_to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """May be called from any thread that is attached."""

    def join(self, event: Event) -> None:
        """Lets the current stream wait for ``event``; the host goes on."""

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A copy on the host that holds the values once the event has happened."""

    def mark(self) -> Mark: ...

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks; waits until both have passed."""


class Done:
    """An event of the past."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class HostTransfers:
    """Without GPU: every copy is done when the call returns."""

    def attach(self) -> None:
        return None

    def gradients_to_host(self, copies: Sequence[Copy], after: Iterable[Event]) -> Transfer:
        begin = time.perf_counter()
        for target, source in copies:
            target.copy_(source)
        return Transfer(begin, time.perf_counter(), Done(), _bytes(copies))

    def weights_to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        return self.gradients_to_host([(target, source)], ())

    def join(self, event: Event) -> None:
        return None

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return values.clone(), Done()

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin)


class CudaTransfers:
    """One stream in each direction: the bus carries both at once, and copies of one direction stay in order."""

    def __init__(self, device: torch.device) -> None:
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waiting: deque[Event] = deque()

    def attach(self) -> None:
        """A thread stands on the first GPU until told otherwise, and leaving another's stream would open a CUDA context there."""
        torch.cuda.set_device(self._down.device)

    def gradients_to_host(self, copies: Sequence[Copy], after: Iterable[Event]) -> Transfer:
        computing = torch.cuda.current_stream()
        self._down.wait_stream(computing)
        for event in after:
            self._down.wait_event(event)
        transfer = _copy(self._down, copies)
        for _, source in copies:
            source.record_stream(self._down)
        self._waiting.append(transfer.done)
        if len(self._waiting) > IN_FLIGHT:
            computing.wait_event(self._waiting.popleft())
        return transfer

    def weights_to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        return _copy(self._up, [(target, source)])

    def join(self, event: Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host, self.mark()

    def mark(self) -> Mark:
        event = _timing_event()
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _timing_event() -> Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _copy(stream: torch.cuda.Stream, copies: Sequence[Copy]) -> Transfer:
    begin, end = _timing_event(), _timing_event()
    with torch.cuda.stream(stream), torch.no_grad():
        begin.record(stream)
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        end.record(stream)
    return Transfer(begin, end, end, _bytes(copies))


def _bytes(copies: Sequence[Copy]) -> int:
    return sum(target.nbytes for target, _ in copies)


def transfers_for(device: torch.device) -> Transfers:
    if device.type == "cuda":
        return CudaTransfers(device)
    return HostTransfers()
