"""Micro-batches that are made ahead: in order, once each, and no thread left behind."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from so_tui_trainer.data.batches import PREFETCH_DEPTH, Batches, MicroBatch, Prefetcher
from tests.support.documents import documents, spec
from tests.support.waiting import LIMIT_S

CPU = torch.device("cpu")


def test_everything_comes_in_order() -> None:
    batches = Batches(documents(), spec(), 0)
    expected = [
        (step, batch.input_ids) for step in range(3, 6) for batch in batches.micro_batches(step)
    ]
    with Prefetcher(batches.iterate(3, 5), CPU) as prefetcher:
        found = list(prefetcher)
    assert len(found) == len(expected) == 9
    for (step, ids), (counts, batch) in zip(expected, found, strict=True):
        assert torch.equal(ids, batch.input_ids)
        assert counts.trained_tokens == batches.counts(step).trained_tokens


def test_it_is_ahead_but_not_by_much_and_leaves_no_thread() -> None:
    made: list[int] = []

    def source() -> Iterator[MicroBatch]:
        for portion in Batches(documents(), spec(), 0).iterate(1, 100):
            made.append(1)
            yield portion

    before = threading.active_count()
    with Prefetcher(source(), CPU) as prefetcher:
        next(prefetcher)
        deadline = time.monotonic() + LIMIT_S
        while len(made) < 1 + PREFETCH_DEPTH and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert 1 + PREFETCH_DEPTH <= len(made) <= 2 + PREFETCH_DEPTH
    assert threading.active_count() == before


def test_an_error_is_raised_where_the_batch_would_have_come() -> None:
    def source() -> Iterator[MicroBatch]:
        yield from Batches(documents(), spec(), 0).iterate(1, 1)
        raise OSError("the file is gone")

    with Prefetcher(source(), CPU) as prefetcher:
        for _ in range(3):
            next(prefetcher)
        for _ in range(2):
            with pytest.raises(OSError, match="the file is gone"):
                next(prefetcher)
