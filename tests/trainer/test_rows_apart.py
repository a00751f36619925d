"""Documents as rows of their own: every token has its place, and little is computed beyond the
ends.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from so_tui_trainer.data.batches import _rows_apart

LENGTHS = st.lists(st.integers(0, 700), min_size=1, max_size=40).filter(any)


def boundaries(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


@given(LENGTHS)
def test_every_token_is_in_the_row_of_its_document_and_nothing_else_is(lengths: list[int]) -> None:
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
