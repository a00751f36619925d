"""Ranks that share sequences: their parts, and loss and gradients as those of whole sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from so_tui_trainer.data.batches import Batches
from tests.support import rank_processes
from tests.support.documents import documents, spec


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
