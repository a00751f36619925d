"""Prepare batches in a thread and copy them to the device while the step before is computed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

PREFETCH_DEPTH = 2
"""Batches that wait: one for the next forward pass, and one more in case a batch takes long to make."""


class Movable(Protocol):
    """Something with tensors that can be copied to a device."""

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def to(self, device: torch.device) -> Movable: ...


_CLOSE_TIMEOUT_S = 10.0
"""How long ``close`` waits for the thread."""

Item = TypeVar("Item", bound=Movable)


class Prefetcher(Generic[Item]):
    """Iterates over ``source`` in a thread of its own, and yields its items on ``device`` in the same order.

    On a GPU the copies run on a separate stream, and the compute stream waits for them; the host never does. An exception in ``source`` is
    raised when its item would have been returned. Use as a context manager, or call ``close``, unless all items are taken.
    """

    def __init__(self, source: Iterator[Item], device: torch.device) -> None:
        self._source, self._device = source, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._queue: queue.Queue[tuple[Item, torch.cuda.Event | None] | BaseException] = (
            queue.Queue(PREFETCH_DEPTH)
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetcher", daemon=True)
        self._thread.start()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """Return the next item, ready for the current stream.

        Raises:
            StopIteration: There are no more items; raised again by later calls.
        """
        found = self._queue.get()
        if isinstance(found, BaseException):
            self._queue.put(found)
            raise found
        item, copied = found
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in item.tensors:  # Allocated on one stream, used on another: the allocator must not reuse it too early.
                tensor.record_stream(stream)
        return item

    def close(self) -> None:
        """Stop the thread and drop waiting items. Gives up on a thread that hangs while reading from disk. Safe to call twice."""
        self._closing.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _fill(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(
                    self._device
                )  # Each thread has a current device; pinning would open a context on GPU 0.
            for item in self._source:
                if self._closing.is_set():
                    return
                self._queue.put(self._moved(item))
        except Exception as error:  # noqa: BLE001 -- raised where the item is asked for
            self._queue.put(error)
        else:
            self._queue.put(StopIteration())

    def _moved(self, item: Item) -> tuple[Item, torch.cuda.Event | None]:
        if self._stream is None:
            return item, None
        with torch.cuda.stream(self._stream):
            moved: Item = item.to(self._device)  # type: ignore[assignment]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return moved, event
