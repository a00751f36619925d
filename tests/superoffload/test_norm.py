"""Parts of a step: gradients and their norm, what is waited for, how far the host may be ahead."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_module

import superoffload
from superoffload.deepspeed_adapter import engine as adapter
from superoffload.errors import NonFiniteGradientError
from superoffload.gpu_states import Gradient, SubGroup
from superoffload.optimizer import _Arrivals
from superoffload.steps import GradientNorm, clip_factor
from superoffload.transfers import CompletedEvent, LayerWait, Meter, RunAheadLimiter, Transfers
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


class _Events:
    """Makes events and records the order in which they were waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.numbers: Iterator[int] = count()

    def __call__(self, **settings: Any) -> Any:
        number = next(self.numbers)
        wait = partial(self.waited.append, number)
        return SimpleNamespace(record=lambda: None, synchronize=wait)


@pytest.mark.parametrize(
    ("used", "waited"),
    [
        ([(f"layer {number}", 100) for number in range(5)], [0, 1, 2]),
        # The newest module is what the GPU computes next: without it, it would run out of work.
        ([("layer", 100), ("head", 900)], [0]),
        ([("layer", 100), ("head", 900), ("layer", 100)], [0, 1]),
        # A recomputed layer counts once.
        ([(name, 100) for name in "aabb"], []),
        ([(name, 100) for name in "abab"], [0, 1]),
        ([("activation", 0), ("norm", 1)] * 100, []),
    ],
)
def test_the_host_waits_when_it_is_too_far_ahead(
    used: list[tuple[str, int]], waited: list[int]
) -> None:
    events = _Events()
    limiter = RunAheadLimiter(200, events)
    for name, numel in used:
        limiter.before_use(name, numel)
    assert events.waited == waited
    if all(numel <= 1 for _, numel in used):
        assert next(events.numbers) == 0, "small modules are not even noted"


@pytest.mark.parametrize(
    ("ranks", "synchronized", "host_weights", "limited"),
    [
        (2, False, False, True),
        (1, False, True, True),
        (1, False, False, False),
        (2, True, False, False),
    ],
    ids=["several GPUs", "copies of host weights", "one GPU", "a CPU"],
)
def test_what_is_gathered_or_copied_counts(
    ranks: int,
    synchronized: bool,
    host_weights: bool,
    limited: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers of 100 parameters in an inner module are each gathered as a whole."""
    fetched: list[bool] = []
    # Stands in for DeepSpeed's coordinator, whose gathering needs several GPUs.
    coordinator = SimpleNamespace(fetch_sub_module=lambda module, forward: fetched.append(forward))
    parameter_offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    optimizer = SimpleNamespace(parameter_offload=parameter_offload, offload_param=host_weights)
    events = _Events()
    accelerator = SimpleNamespace(Event=events, is_synchronized_device=lambda: synchronized)
    monkeypatch.setattr(adapter, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: ranks)
    adapter._limit_run_ahead(SimpleNamespace(optimizer=optimizer), 200)
    for index in range(5):
        linear = torch.nn.Linear(10, 10, bias=False)
        layer = torch.nn.Sequential(linear)
        # As DeepSpeed does it: these are no tensors or modules that torch would register.
        vars(linear.weight)["ds_numel"] = 100
        vars(layer).update(ds_id=index, ds_external_parameters=list)
        set_z3_leaf_module(layer, True)
        coordinator.fetch_sub_module(layer, forward=True)
    assert fetched == [True] * 5
    assert events.waited == ([0, 1, 2] if limited else [])
    assert limited or next(events.numbers) == 0


def test_muon_is_imported_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    compiler = importlib.import_module("deepspeed.runtime.compiler")
    monkeypatch.setattr(compiler, "compile", lambda: compiled.append)
    before = compiler.compile
    for name in ("original_muon", "muon_optimizer"):
        monkeypatch.delitem(sys.modules, f"deepspeed.runtime.zero.muon.{name}", raising=False)
    adapter.import_muon()
    assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules
    assert compiled == []
    assert compiler.compile is before
