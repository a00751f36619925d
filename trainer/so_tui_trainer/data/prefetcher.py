"""Micro-batches ahead of need: a thread makes them and sends them to the device while the one before is computed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

PREFETCH_DEPTH = 2
"""How many wait: one for the next micro-step, and one more for a slow one to make."""


class Movable(Protocol):
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def to(self, device: torch.device) -> Movable: ...


_CLOSE_TIMEOUT_S = 10.0

Item = TypeVar("Item", bound=Movable)


class Prefetcher(Generic[Item]):
    """Iterates over ``source`` in its order, from a thread of its own, with what it yields on ``device``.

    On a GPU the copies run on a stream of their own, and the stream that computes waits for them; the host never does. An exception in
    ``source`` is raised where the item would have come. ``close`` it when not all was taken; it is its own context manager for that.
    """

    def __init__(self, source: Iterator[Item], device: torch.device) -> None:
        self._source, self._device = source, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._queue: queue.Queue[tuple[Item, torch.cuda.Event | None] | BaseException] = queue.Queue(PREFETCH_DEPTH)
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
        """The next item, ready for the current stream. Raises StopIteration at the end, again and again."""
        found = self._queue.get()
        if isinstance(found, BaseException):
            self._queue.put(found)
            raise found
        item, copied = found
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in item.tensors:  # made on one stream, used on another: not to be overwritten before that is done
                tensor.record_stream(stream)
        return item

    def close(self) -> None:
        """End the thread, whatever it was about to bring; one that reads from a disk that hangs is left to itself. Safe to call twice."""
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
                torch.cuda.set_device(self._device)  # every thread has its own; page-locking would open a context on the first GPU
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
