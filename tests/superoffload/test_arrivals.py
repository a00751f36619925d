"""Counting a step's gradients: what is complete, and what did not come or came too often."""

from __future__ import annotations

import pytest
import torch

import superoffload
from superoffload.gpu_states import Gradient, SubGroup
from superoffload.norm import clip_factor
from superoffload.optimizer import _Arrivals


def group(*names: str) -> SubGroup:
    return SubGroup(torch.zeros(len(names)), 0, names, tuple(range(len(names))), on_gpu=False)


def gradient(sub_group: int, member: int) -> Gradient:
    return Gradient(sub_group, member, torch.zeros(1))


def micro_batch(arrivals: _Arrivals) -> None:
    for place in ((0, 0), (0, 1), (1, 0)):
        arrivals.add(gradient(*place))
    arrivals.end_micro_batch(1)


@pytest.fixture
def arrivals() -> _Arrivals:
    return _Arrivals([group("a", "b"), group("c")], accumulation_steps=2)


def test_a_sub_group_is_complete_with_its_last_gradient_of_a_micro_batch(
    arrivals: _Arrivals,
) -> None:
    assert not arrivals.has_begun
    arrivals.add(gradient(0, 1))
    assert arrivals.has_begun
    assert not arrivals.is_complete(0)
    arrivals.add(gradient(0, 0))
    assert (arrivals.is_complete(0), arrivals.is_complete(1)) == (True, False)
    arrivals.add(gradient(1, 0))
    arrivals.end_micro_batch(1)
    assert (arrivals.micro_batch, arrivals.is_complete(0)) == (1, False)
    arrivals.begin_step()
    assert not arrivals.has_begun


def test_missing_gradients_are_named(arrivals: _Arrivals) -> None:
    arrivals.add(gradient(0, 0))
    with pytest.raises(
        superoffload.OffloadError, match=r"2 trainable parameters .* step 7, micro-batch 1: b, c\."
    ) as caught:
        arrivals.end_micro_batch(7)
    assert caught.value.code == "missing-gradient"


def test_a_gradient_comes_once_in_each_of_the_steps_micro_batches(arrivals: _Arrivals) -> None:
    micro_batch(arrivals)
    arrivals.add(gradient(0, 0))
    with pytest.raises(superoffload.OffloadError) as caught:
        arrivals.add(gradient(0, 0))
    assert caught.value.code == "second-gradient"
    arrivals.begin_step()
    micro_batch(arrivals)
    micro_batch(arrivals)
    with pytest.raises(superoffload.OffloadError) as caught:
        arrivals.add(gradient(0, 0))
    assert caught.value.code == "too-many-micro-batches"


@pytest.mark.parametrize(("norm", "limit"), [(4.0, 1.0), (1.0, 1.0), (0.5, 1.0), (3.0, 0.0)])
def test_gradients_are_clipped_as_torch_clips_them(norm: float, limit: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, norm)
    torch.nn.utils.clip_grad_norm_([parameter], limit or float("inf"))
    assert norm * clip_factor(norm, limit) == pytest.approx(parameter.grad.item(), rel=1e-12)
