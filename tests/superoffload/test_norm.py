from __future__ import annotations

import math

import pytest
import torch

from superoffload.errors import NonFiniteGradientError
from superoffload.gpu_states import Gradient, SubGroup
from superoffload.norm import GradientNorm
from superoffload.transfers import Transfers


def norm_of_two(*others: float) -> GradientNorm:
    """Return the norm of two sub-groups, with another rank that has ``others`` as sums of
    squares.
    """
    groups = [
        SubGroup(torch.zeros(4), 0, (name,), (0,), on_gpu=False) for name in ("first", "second")
    ]

    def all_reduce(squares: torch.Tensor) -> None:
        squares += torch.tensor(others, dtype=squares.dtype)

    return GradientNorm(groups, torch.device("cpu"), Transfers(), all_reduce, poisons=False)


def test_norm_is_that_of_all_ranks() -> None:
    norm = norm_of_two(9.0, 16.0)
    norm.add([Gradient(0, 0, torch.full((4,), 2.0))])
    squares = norm.all_rank_squares([(1, torch.ones(4))], {})
    assert squares.tolist() == pytest.approx([25, 20])
    assert norm.read(squares, 1) == pytest.approx(math.sqrt(45))


def test_norm_names_the_sub_group_that_is_not_finite_on_another_rank() -> None:
    norm = norm_of_two(0.0, math.inf)
    with pytest.raises(NonFiniteGradientError, match="second") as caught:
        norm.read(norm.all_rank_squares([], {0: 1.0}), 7)
    assert (caught.value.step, caught.value.sub_group) == (7, 1)
