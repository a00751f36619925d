"""Micro-batches: what ranks share, rows of documents, and how they are made ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from so_tui_trainer.data.batches import PREFETCH_DEPTH, Batch, Batches, Prefetcher, _rows_apart
from tests.support.documents import documents, spec
from tests.support.waiting import LIMIT_S


@pytest.mark.parametrize("packing", ["true", "false"])
def test_ranks_share_a_step_and_its_counts_are_those_of_all(packing: str) -> None:
    ranks = [Batches(documents(), spec(data__packing=packing), rank) for rank in range(2)]
    for step in (1, 2, 9):
        batches = [batch for rank in ranks for batch in rank.micro_batches(step)]
        counts = ranks[0].counts(step)
        assert len(batches) == 6
        assert sum(len(batch.targets) for batch in batches) == counts.trained_tokens
        assert sum(batch.input_ids.numel() for batch in batches) == counts.computed_tokens
        assert counts.document_lengths.sum() == counts.useful_tokens


def test_a_step_needs_no_history() -> None:
    one, other = Batches(documents(), spec(), 0), Batches(documents(), spec(), 0)
    for step in range(1, 8):
        list(one.micro_batches(step))
    for a, b in zip(one.micro_batches(8), other.micro_batches(8), strict=True):
        assert torch.equal(a.input_ids, b.input_ids)


def test_an_epoch_meets_every_sequence_once() -> None:
    batches = Batches(documents(), spec(), 0)
    count = len(batches.sequences)
    first, second = batches._indices(0, count).tolist(), batches._indices(count, count).tolist()
    assert sorted(first) == sorted(second) == list(range(count))
    assert first != second


def test_targets_are_the_next_tokens_of_the_same_document() -> None:
    batches = Batches(documents(), spec(), 0)
    for batch in batches.micro_batches(1):
        flat, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        assert torch.equal(flat[batch.predictors + 1], batch.targets)
        assert torch.equal(positions[batch.predictors] + 1, positions[batch.predictors + 1])
        starts = (positions == 0).nonzero().flatten()
        assert torch.equal(starts.to(torch.int32), batch.boundaries[:-1])
        assert batch.boundaries[-1] == flat.numel()
        assert batch.longest == batch.boundaries.diff().max()


def test_length_of_a_run() -> None:
    docs = documents()
    sequences = len(Batches(docs, spec(), 0).sequences)
    assert Batches(docs, spec(train__steps="7"), 0).total_steps() == 7
    assert Batches(docs, spec(train__epochs="2"), 0).total_steps() == -(-2 * sequences // 12)
    assert Batches(docs, spec(train__tokens="1"), 0).total_steps() == 1
    benchmark = spec(benchmark__warmup_steps="2", benchmark__measured_steps="5")
    assert Batches(docs, benchmark, 0).total_steps() == 7


def test_resumes_with_other_ranks_skip_and_repeat_nothing() -> None:
    docs = documents()
    order = [
        index
        for epoch in range(6)
        for index in Batches(docs, spec(), 0)._epoch_order(epoch).tolist()
    ]
    taken: list[int] = []
    step = consumed = 0
    for gpus, micro_batch, accumulation in ((2, 2, 3), (1, 2, 3), (3, 1, 1), (2, 2, 3)):
        changes = {
            "gpus": str(gpus),
            "train__micro_batch": str(micro_batch),
            "train__gradient_accumulation": str(accumulation),
        }
        ranks = [Batches(docs, spec(**changes), rank) for rank in range(gpus)]
        for batches in ranks:
            batches.resume_at(step, consumed)
        for _ in range(3):
            step += 1
            first = len(taken)
            taken += order[consumed : ranks[0].consumed(step)]
            counts = ranks[0].counts(step)
            seen = [batch for batches in ranks for batch in batches.micro_batches(step)]
            assert sum(len(batch.targets) for batch in seen) == counts.trained_tokens
            assert counts.trained_tokens == sum(
                int(ranks[0]._trained[index]) for index in taken[first:]
            )
            consumed = ranks[0].consumed(step)
    assert taken == order[: len(taken)]
    assert len(taken) == consumed == 3 * (12 + 6 + 3 + 12)


def test_epochs_keep_their_length_with_other_ranks() -> None:
    docs = documents()
    two, one = (Batches(docs, spec(gpus=gpus, train__epochs="4"), 0) for gpus in ("2", "1"))
    sequences = 4 * len(two.sequences)
    one.resume_at(3, two.consumed(3))
    assert one.total_steps() == 3 + -(-(sequences - 36) // 6)
    assert one.consumed(one.total_steps()) >= sequences > one.consumed(one.total_steps() - 1)
    two.resume_at(3, two.consumed(3))
    assert two.total_steps() == -(-sequences // 12)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_end_to_end_pads_a_sixty_fourth_at_most(packing: str) -> None:
    changes = {
        "gpus": "1",
        "data__packing": packing,
        "data__sequence_length": "1024",
        "train__micro_batch": "4",
    }
    batches = Batches(documents(400, longest=300), spec(**changes), 0)
    in_rows, in_rows_too = batches.counts(1), list(batches.micro_batches(1))
    batches.end_to_end = True
    capacity, sizes = 4 * 1024, set()
    for step in range(1, 5):
        counts, found = batches.counts(step), list(batches.micro_batches(step))
        assert counts.computed_tokens == sum(batch.input_ids.numel() for batch in found)
        for batch in found:
            assert len(batch.input_ids) == 1
            assert batch.real.numel() - batch.real.sum() < capacity // 64
            assert batch.boundaries[-1] == batch.input_ids.numel()
            sizes.add(batch.input_ids.numel())
    assert len(sizes) <= 64
    assert all(size % 64 == 0 for size in sizes)
    assert batches.counts(1).useful_tokens == in_rows.useful_tokens
    assert batches.counts(1).computed_tokens <= in_rows.computed_tokens
    for row, one in zip(in_rows_too, batches.micro_batches(1), strict=True):
        assert torch.equal(row.input_ids[row.real], one.input_ids[one.real])
        assert torch.equal(row.targets, one.targets)


CPU = torch.device("cpu")


def test_everything_comes_in_order() -> None:
    batches = Batches(documents(), spec(), 0)
    expected = [
        (step, batch.input_ids) for step in range(3, 6) for batch in batches.micro_batches(step)
    ]
    with closing(Prefetcher(batches.iterate(3, 5), CPU)) as prefetcher:
        found = list(prefetcher)
    assert len(found) == len(expected) == 9
    for (step, ids), batch in zip(expected, found, strict=True):
        assert torch.equal(ids, batch.input_ids)
        assert batch.counts.trained_tokens == batches.counts(step).trained_tokens


def test_it_is_ahead_but_not_by_much_and_leaves_no_thread() -> None:
    made: list[int] = []

    def source() -> Iterator[Batch]:
        for portion in Batches(documents(), spec(), 0).iterate(1, 100):
            made.append(1)
            yield portion

    before = threading.active_count()
    with closing(Prefetcher(source(), CPU)) as prefetcher:
        next(prefetcher)
        deadline = time.monotonic() + LIMIT_S
        while len(made) < 1 + PREFETCH_DEPTH and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert 1 + PREFETCH_DEPTH <= len(made) <= 2 + PREFETCH_DEPTH
    assert threading.active_count() == before


def test_an_error_is_raised_where_the_batch_would_have_come() -> None:
    def source() -> Iterator[Batch]:
        yield from Batches(documents(), spec(), 0).iterate(1, 1)
        raise OSError("the file is gone")

    with closing(Prefetcher(source(), CPU)) as prefetcher:
        for _ in range(3):
            next(prefetcher)
        for _ in range(2):
            with pytest.raises(OSError, match="the file is gone"):
                next(prefetcher)


LENGTHS = st.lists(st.integers(0, 700), min_size=1, max_size=40).filter(any)


def boundaries(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


@given(LENGTHS)
def test_rows_hold_the_tokens_of_one_document(lengths: list[int]) -> None:
    places, *groups = _rows_apart(boundaries(lengths))
    tokens = torch.arange(sum(lengths))
    together = torch.cat([tokens[group].flatten() for group in groups])
    assert torch.equal(together[places], tokens)
    rows = [row.tolist() for group in groups for row in group]
    documents = torch.split(tokens, lengths)
    found = sorted(sorted(set(row)) for row in rows)
    assert found == [document.tolist() for document in documents if len(document)]
    assert all(row == sorted(row) for row in rows), "tokens follow each other as in the document"


@given(LENGTHS)
def test_what_is_computed_beyond_the_ends_is_little(lengths: list[int]) -> None:
    """Below a third of the tokens, apart from documents shorter than a kernel's block."""
    _, *groups = _rows_apart(boundaries(lengths))
    for group in groups:
        ends = [len(set(row.tolist())) for row in group]
        assert group.shape[1] <= 64 or group.numel() <= sum(ends) / 0.75


def test_documents_of_similar_lengths_are_computed_together() -> None:
    _, *groups = _rows_apart(boundaries([100, 10, 95, 400, 80, 30]))
    assert [tuple(group.shape) for group in groups] == [(1, 400), (3, 100), (2, 30)]
