import time

import numpy as np
import pytest

from so_tui_trainer.data.documents import _one_each, _pack


@pytest.mark.parametrize("seed", range(5))
def test_every_document_lies_in_exactly_one_sequence_that_holds_it(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 257, size=500)
    sequences = _pack(lengths, 256)
    assert sorted(sequences.documents.tolist()) == list(range(500))
    assert sequences.sums(lengths).max() <= 256
    assert sequences.sums(lengths).sum() == lengths.sum()


def test_best_fit_decreasing_leaves_little_room() -> None:
    lengths = np.random.default_rng(0).integers(1, 120, size=5000)
    sequences = _pack(lengths, 256)
    assert lengths.sum() / (len(sequences) * 256) > 0.99


def test_a_document_goes_where_it_leaves_least() -> None:
    sequences = _pack(np.array([6, 5, 4, 5]), 10)
    assert [sorted(sequences.of(index).tolist()) for index in range(len(sequences))] == [
        [0, 2],
        [1, 3],
    ]


def test_the_fullest_sequence_with_room_is_chosen_before_an_emptier_one() -> None:
    """7 and 6 open a sequence each: 3 fits both, and fills the first."""
    sequences = _pack(np.array([7, 6, 3]), 10)
    assert [sequences.of(index).tolist() for index in range(len(sequences))] == [[0, 2], [1]]


def test_equal_input_packs_equally() -> None:
    lengths = np.full(100, 7)
    assert _pack(lengths, 64).documents.tolist() == _pack(lengths, 64).documents.tolist()


def test_without_packing_each_document_is_a_sequence() -> None:
    sequences = _one_each(3)
    assert [sequences.of(index).tolist() for index in range(3)] == [[0], [1], [2]]


def test_a_million_documents_are_packed_within_seconds() -> None:
    lengths = np.clip(
        np.random.default_rng(0).lognormal(5.5, 0.9, 1_000_000).astype(np.int64), 1, 4096
    )
    began = time.process_time()
    sequences = _pack(lengths, 4096)
    assert time.process_time() - began < 8  # about 1
    assert sequences.efficiency(lengths, 4096) > 0.99
