"""Micro-batches: what ranks share, also of one sequence, and how they are made ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from so_tui_trainer.data.batches import PREFETCH_DEPTH, Batch, Batches, Prefetcher, _rows_apart
from tests.support import rank_processes
from tests.support.documents import documents, spec
from tests.support.waiting import wait_until

CPU = torch.device("cpu")


def test_an_epoch_meets_every_sequence_once() -> None:
    batches = Batches(documents(), spec(), 0)
    count = len(batches.sequences)
    first, second = batches._indices(0, count).tolist(), batches._indices(count, count).tolist()
    assert sorted(first) == sorted(second) == list(range(count))
    assert first != second


def test_targets_are_the_next_tokens_of_the_same_document() -> None:
    for batch in Batches(documents(), spec(), 0).micro_batches(1):
        flat, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        assert torch.equal(flat[batch.predictors + 1], batch.targets)
        assert torch.equal(positions[batch.predictors] + 1, positions[batch.predictors + 1])
        starts = (positions == 0).nonzero().flatten()
        assert batch.boundaries.tolist() == [*starts.tolist(), flat.numel()]
        assert batch.longest == batch.boundaries.diff().max()


def test_length_of_a_run() -> None:
    docs = documents()
    sequences = len(Batches(docs, spec(), 0).sequences)
    for steps, changes in (
        (7, {"train__steps": "7"}),
        (-(-2 * sequences // 12), {"train__epochs": "2"}),
        (1, {"train__tokens": "1"}),
        (7, {"benchmark__warmup_steps": "2", "benchmark__measured_steps": "5"}),
    ):
        assert Batches(docs, spec(**changes), 0).total_steps() == steps


@pytest.mark.parametrize("packing", ["true", "false"])
def test_resumes_with_other_ranks_skip_and_repeat_nothing(packing: str) -> None:
    docs = documents()
    whole = Batches(docs, spec(data__packing=packing), 0)
    order = np.concatenate([whole._epoch_order(epoch) for epoch in range(6)])
    texts = np.split(docs.tokens, docs.offsets[1:-1])
    step = consumed = 0
    for gpus, micro_batch, accumulation in ((2, 2, 3), (1, 2, 3), (3, 1, 1), (2, 2, 3)):
        changed = spec(
            data__packing=packing,
            gpus=str(gpus),
            train__micro_batch=str(micro_batch),
            train__gradient_accumulation=str(accumulation),
        )
        ranks = [Batches(docs, changed, rank) for rank in range(gpus)]
        for batches in ranks:
            batches.resume_at(step, consumed)
        for _ in range(3):
            step += 1
            first, consumed = consumed, ranks[0].consumed(step)
            seen = [batch for batches in ranks for batch in batches.micro_batches(step)]
            rows = [
                row[real].tolist()
                for batch in seen
                for row, real in zip(batch.input_ids, batch.real, strict=True)
            ]
            assert sorted(rows) == sorted(
                [token for document in whole.sequences.of(index) for token in texts[document]]
                for index in order[first:consumed]
            )
            counts = ranks[0].counts(step)
            assert (counts.trained_tokens, counts.computed_tokens, counts.useful_tokens) == (
                sum(len(batch.targets) for batch in seen),
                sum(batch.input_ids.numel() for batch in seen),
                counts.document_lengths.sum(),
            )
    assert consumed == 3 * (12 + 6 + 3 + 12)


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
    long = spec(
        gpus="1", data__packing=packing, data__sequence_length="1024", train__micro_batch="4"
    )
    batches = Batches(documents(400, longest=300), long, 0)
    in_rows, row_counts = list(batches.micro_batches(1)), batches.counts(1)
    batches.end_to_end = True
    capacity = 4 * 1024
    for step in range(1, 5):
        found = list(batches.micro_batches(step))
        sizes = [batch.input_ids.numel() for batch in found]
        assert batches.counts(step).computed_tokens == sum(sizes)
        for batch, size in zip(found, sizes, strict=True):
            assert len(batch.input_ids) == 1
            assert (size % 64, int(batch.boundaries[-1])) == (0, size)
            assert size - batch.real.sum() < capacity // 64
    assert batches.counts(1).useful_tokens == row_counts.useful_tokens
    assert batches.counts(1).computed_tokens <= row_counts.computed_tokens
    for row, one in zip(in_rows, batches.micro_batches(1), strict=True):
        assert torch.equal(row.input_ids[row.real], one.input_ids[one.real])
        assert torch.equal(row.targets, one.targets)


def test_everything_comes_in_order() -> None:
    batches = Batches(documents(), spec(), 0)
    expected = list(batches.iterate(3, 5))
    with closing(Prefetcher(batches.iterate(3, 5), CPU)) as prefetcher:
        found = list(prefetcher)
    assert len(found) == 9
    for batch, other in zip(found, expected, strict=True):
        assert torch.equal(batch.input_ids, other.input_ids)
        assert batch.counts.trained_tokens == other.counts.trained_tokens


def test_it_is_ahead_but_not_by_much_and_leaves_no_thread() -> None:
    made: list[int] = []

    def source() -> Iterator[Batch]:
        for portion in Batches(documents(), spec(), 0).iterate(1, 100):
            made.append(1)
            yield portion

    before = threading.active_count()
    with closing(Prefetcher(source(), CPU)) as prefetcher:
        next(prefetcher)
        wait_until(lambda: len(made) >= 1 + PREFETCH_DEPTH)
        time.sleep(0.05)
        assert len(made) <= 2 + PREFETCH_DEPTH
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


def rows_apart(lengths: list[int]) -> tuple[torch.Tensor, ...]:
    return _rows_apart(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=40).filter(any))
def test_rows_hold_the_tokens_of_one_document(lengths: list[int]) -> None:
    places, *groups = rows_apart(lengths)
    tokens = torch.arange(sum(lengths))
    assert torch.equal(torch.cat([tokens[group].flatten() for group in groups])[places], tokens)
    rows = [row.tolist() for group in groups for row in group]
    documents = [part.tolist() for part in torch.split(tokens, lengths) if len(part)]
    assert sorted(sorted(set(row)) for row in rows) == documents
    assert all(row == sorted(row) for row in rows), "tokens follow each other as in the document"
    # Padding is below a third of the tokens, unless documents are shorter than a kernel's block.
    for group in groups:
        ends = sum(len(set(row.tolist())) for row in group)
        assert group.shape[1] <= 64 or group.numel() <= ends / 0.75


def test_documents_of_similar_lengths_are_computed_together() -> None:
    _, *groups = rows_apart([100, 10, 95, 400, 80, 30])
    assert [tuple(group.shape) for group in groups] == [(1, 400), (3, 100), (2, 30)]


def batches_of(rank: int, ranks: int = 1, sequence_ranks: int = 1, **changes: str) -> Batches:
    shared = {"gpus": str(ranks), "train__sequence_parallel": str(sequence_ranks)}
    found = Batches(documents(), spec(**shared, **changes), rank)
    found.end_to_end = True
    return found


def test_groups_of_ranks_share_the_sequences_of_a_step() -> None:
    """Four ranks in two groups train what two ranks do with whole sequences."""
    groups = [batches_of(rank, 4, 2) for rank in range(4)]
    alone = [batches_of(rank, 2) for rank in range(2)]
    assert groups[0].counts(1).useful_tokens == alone[0].counts(1).useful_tokens
    for replica, whole in enumerate(alone):
        firsts, seconds = (groups[2 * replica + at].micro_batches(1) for at in (0, 1))
        for first, second, expected in zip(firsts, seconds, whole.micro_batches(1), strict=True):
            assert torch.equal(torch.cat([first.targets, second.targets]), expected.targets)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_whole_sequences() -> None:
    """In float64: packed or not, few key heads, windows, sinks, recomputation, host memory."""
    rank_processes.finish(
        rank_processes.start(Path(rank_processes.__file__).with_name("sequence_ranks.py"), [], 2)
    )
