"""Parts of a step: gradients and their norm, when sub-groups are stepped, what is waited for."""

from __future__ import annotations

import math

import pytest
import torch

import superoffload
from superoffload.errors import NonFiniteGradientError
from superoffload.gpu_states import Gradient, SubGroup
from superoffload.optimizer import _Arrivals
from superoffload.steps import GradientNorm, clip_factor
from superoffload.transfers import CompletedEvent, LayerWait, Meter, Transfers
from tests.support.problems import coded


def group_of(*names: str) -> SubGroup:
    """Return a sub-group on the host, of parameters with one element each."""
    offsets, places = tuple(range(len(names))), (0,) * len(names)
    weights = torch.zeros(len(names))
    return SubGroup(weights, 0, names, offsets, on_gpu=False, places=places, first_use=0)


def norm_of_two(*others: float) -> GradientNorm:
    """Return the norm of two sub-groups; another rank has ``others`` as sums of squares."""
    groups = [group_of("first"), group_of("second")]

    def all_reduce(squares: torch.Tensor) -> None:
        squares += torch.tensor(others, dtype=squares.dtype)

    return GradientNorm(groups, torch.device("cpu"), Transfers(), all_reduce, poisons=False)


def test_norm_is_that_of_all_ranks() -> None:
    norm = norm_of_two(9.0, 16.0)
    norm.add([Gradient(0, 0, torch.full((4,), 2.0))])
    squares = norm.all_rank_squares([(1, torch.ones(4))], {})
    assert squares.tolist() == pytest.approx([25, 20])
    assert norm.read(squares, 1) == pytest.approx(math.sqrt(45))


def test_norm_names_a_sub_group_that_is_infinite_elsewhere() -> None:
    norm = norm_of_two(0.0, math.inf)
    with pytest.raises(NonFiniteGradientError, match="second") as caught:
        norm.read(norm.all_rank_squares([], {0: 1.0}), 7)
    assert (caught.value.step, caught.value.sub_group) == (7, 1)


def add(arrivals: _Arrivals, *places: tuple[int, int]) -> None:
    for sub_group, member in places:
        arrivals.add(Gradient(sub_group, member, torch.zeros(1)))


def test_missing_and_second_gradients_are_refused() -> None:
    """Of two members of one sub-group, and one of another."""
    groups = [group_of("a", "b"), group_of("c")]
    arrivals = _Arrivals(groups, accumulation_steps=2)
    add(arrivals, (0, 0))
    named = r"2 trainable parameters .* step 7, micro-batch 1: b, c\."
    with coded(superoffload.OffloadError, "missing-gradient", match=named):
        arrivals.end_micro_batch(7)
    with coded(superoffload.OffloadError, "second-gradient"):
        add(arrivals, (0, 0))
    arrivals.begin_step()
    for _ in range(2):
        add(arrivals, (0, 0), (0, 1), (1, 0))
        arrivals.end_micro_batch(1)
    with coded(superoffload.OffloadError, "too-many-micro-batches"):
        add(arrivals, (0, 0))


@pytest.mark.parametrize(("norm", "limit"), [(4.0, 1.0), (1.0, 1.0), (0.5, 1.0), (3.0, 0.0)])
def test_gradients_are_clipped_as_torch_clips_them(norm: float, limit: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, norm)
    torch.nn.utils.clip_grad_norm_([parameter], limit or float("inf"))
    assert norm * clip_factor(norm, limit) == pytest.approx(parameter.grad.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("updated", "seconds"),
    [
        ((2.5,), 1.5),  # what follows until 3.0 is the all-gather
        ((0.5,), 0.0),  # the weights had arrived while the GPU still computed
        ((0.5, 2.0), 1.0),  # the host was kept until 2.0, by weights that are needed later
        ((4.0,), 2.0),  # copied for another stream: the layer had begun
        ((), 0.0),
    ],
)
def test_layer_wait_from_idle_until_updated(updated: tuple[float, ...], seconds: float) -> None:
    assert layer_wait(1.0, 3.0, *updated).seconds() == pytest.approx(seconds)


def layer_wait(begin: float, end: float, *updated: float) -> LayerWait:
    return LayerWait(
        CompletedEvent(begin), CompletedEvent(end), tuple(map(CompletedEvent, updated))
    )


def test_waits_in_forward_are_part_of_what_is_exposed() -> None:
    meter = Meter()
    meter.current.layer_waits += [layer_wait(0.0, 1.0, 0.75), layer_wait(2.0, 3.0, 5.0)]
    meter.current.step_waits.append((CompletedEvent(3.0), CompletedEvent(3.5)))
    meter.end_step()
    stats = meter.stats()
    assert (stats.exposed_in_forward_s, stats.exposed_wait_s) == pytest.approx((1.75, 2.25))
    meter.current.layer_waits.append(layer_wait(0.0, 1.0, 1.0))
    meter.leave_out_waits()
    meter.end_step()
    assert meter.stats().exposed_in_forward_s == 0.0
