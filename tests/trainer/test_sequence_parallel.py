"""Ranks that share sequences: their parts, and loss and gradients as those of whole sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from so_tui_trainer.data.batches import Batch, Batches
from tests.support import rank_processes
from tests.support.documents import documents, spec


def parts(ranks: int, **changes: str) -> tuple[Batch, list[Batch]]:
    """The whole first micro-batch, and its parts."""
    shared = spec(
        gpus=str(ranks),
        train__sequence_parallel=str(ranks),
        train__gradient_accumulation="1",
        **changes,
    )
    found = []
    for rank in range(ranks):
        batches = Batches(documents(), shared, rank)
        batches.end_to_end = True
        found.append(next(batches.micro_batches(1)))
    alone = Batches(documents(), spec(train__gradient_accumulation="1", **changes), 0)
    alone.end_to_end = True
    return next(alone.micro_batches(1)), found


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_a_row_are_equal_and_make_it_up(ranks: int, packing: str) -> None:
    whole, found = parts(ranks, data__packing=packing)
    width = whole.input_ids.shape[1]
    assert len({part.input_ids.shape for part in found}) == 1
    joined = torch.cat([part.input_ids for part in found], dim=1)
    assert torch.equal(joined[:, :width], whole.input_ids[:, : joined.shape[1]])
    assert torch.equal(
        torch.cat([part.position_ids for part in found], dim=1)[
            torch.cat([part.real for part in found], dim=1)
        ],
        whole.position_ids[whole.real],
    )
    each = found[0].input_ids.shape[1]
    predictors = torch.cat(
        [part.predictors + position * each for position, part in enumerate(found)]
    )
    assert torch.equal(predictors, whole.predictors)
    assert torch.equal(torch.cat([part.targets for part in found]), whole.targets)
    ids = joined.flatten()
    # Also where the target is the next part's first token.
    assert torch.equal(ids[predictors + 1], whole.targets)
    for part in found:
        assert (part.is_part, part.longest) == (True, found[0].longest)
        assert int(part.boundaries[-1]) == ranks * each


def test_groups_of_ranks_share_the_sequences_of_a_step() -> None:
    """Four ranks in two groups train what two ranks do with whole sequences."""
    shared, two = spec(gpus="4", train__sequence_parallel="2"), spec(gpus="2")
    groups = [Batches(documents(), shared, rank) for rank in range(4)]
    alone = [Batches(documents(), two, rank) for rank in range(2)]
    for batches in (*groups, *alone):
        batches.end_to_end = True
    assert groups[0].counts(1).useful_tokens == alone[0].counts(1).useful_tokens
    for replica, whole in enumerate(alone):
        for first, second, expected in zip(
            groups[2 * replica].micro_batches(1),
            groups[2 * replica + 1].micro_batches(1),
            whole.micro_batches(1),
            strict=True,
        ):
            assert torch.equal(torch.cat([first.targets, second.targets]), expected.targets)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_whole_sequences() -> None:
    """In float64: packed or not, few key heads, windows, sinks, recomputation, host memory."""
    rank_processes.finish(
        rank_processes.start(Path(rank_processes.__file__).with_name("sequence_ranks.py"), [], 2)
    )
