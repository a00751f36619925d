"""The run-ahead limiter: how far the host may be ahead of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_module

from superoffload.deepspeed_adapter import engine as adapter
from superoffload.deepspeed_adapter.engine import _compiled_when_called
from superoffload.transfers import RunAheadLimiter


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
    """Of layers of 100 parameters in an inner module, each gathered as a whole."""
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


def test_a_function_is_compiled_once_at_its_first_call() -> None:
    compiled: list[str] = []

    def compile_now(function: Callable[..., int]) -> Callable[..., int]:
        compiled.append(function.__name__)
        return lambda *arguments, **keywords: -function(*arguments, **keywords)

    def added(one: int, other: int) -> int:
        return one + other

    call = _compiled_when_called(compile_now, added)
    assert (call.__name__, compiled) == ("added", [])
    assert (call(1, other=2), call(3, 4), compiled) == (-3, -7, ["added"])
