"""How far the host may be ahead of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_module

from superoffload import adapter
from superoffload.run_ahead import RunAheadLimiter


class _Events:
    """Notes in which order points of the GPU's work were waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.numbers: Iterator[int] = count()

    def __call__(self, **settings: Any) -> _Event:
        return _Event(next(self.numbers), self.waited.append)


class _Event:
    def __init__(self, number: int, waited: Callable[[int], None]) -> None:
        self._number, self._waited, self._recorded = number, waited, False

    def record(self) -> None:
        self._recorded = True

    def synchronize(self) -> None:
        assert self._recorded
        self._waited(self._number)


def test_the_host_waits_when_it_is_further_ahead_than_it_may() -> None:
    events = _Events()
    lead = RunAheadLimiter(200, events)
    for layer in range(5):
        lead.asked(f"layer {layer}", 100)
    assert events.waited == [0, 1, 2]


def test_a_parameter_larger_than_the_lead_is_never_waited_for_itself() -> None:
    """The GPU would run dry: what was asked for last is what it is to do next."""
    events = _Events()
    lead = RunAheadLimiter(200, events)
    lead.asked("layer", 100)
    lead.asked("head", 900)
    assert events.waited == [0]
    lead.asked("layer", 100)
    assert events.waited == [0, 1]


@pytest.mark.parametrize(("names", "waited"), [("aabb", []), ("abab", [0, 1])])
def test_a_layer_computed_anew_counts_once(names: str, waited: list[int]) -> None:
    events = _Events()
    lead = RunAheadLimiter(200, events)
    for name in names:
        lead.asked(name, 100)
    assert events.waited == waited


def test_small_modules_are_not_waited_for() -> None:
    events = _Events()
    lead = RunAheadLimiter(200, events)
    for _ in range(100):
        lead.asked("activation", 0)
        lead.asked("norm", 1)
    assert next(events.numbers) == 0


class _Coordinator:
    """What gathers in DeepSpeed, asked as its hooks do; gathering itself needs several GPUs (``benchmarks/planner.py --gpus 2``)."""

    def __init__(self) -> None:
        self.fetched: list[tuple[torch.nn.Module, bool]] = []

    def fetch_sub_module(self, module: torch.nn.Module, forward: bool) -> None:
        self.fetched.append((module, forward))


def _layers(count: int) -> list[torch.nn.Module]:
    """Layers of 100 parameters, all in a module inside, gathered whole."""
    found = []
    for index in range(count):
        layer = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False))
        layer[0].weight.ds_numel = 100
        layer.ds_id = index
        layer.ds_external_parameters = list
        set_z3_leaf_module(layer, True)
        found.append(layer)
    return found


def _gathering(monkeypatch: pytest.MonkeyPatch, ranks: int, events: _Events, *, synchronized: bool = False) -> _Coordinator:
    coordinator = _Coordinator()
    engine = SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=SimpleNamespace(get_param_coordinator=lambda: coordinator)))
    accelerator = SimpleNamespace(Event=events, is_synchronized_device=lambda: synchronized)
    monkeypatch.setattr(adapter, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(adapter.comm, "get_world_size", lambda: ranks)
    adapter.limit_run_ahead(engine, 200)
    for layer in _layers(5):
        coordinator.fetch_sub_module(layer, forward=True)
    assert [forward for _, forward in coordinator.fetched] == [True] * 5
    return coordinator


def test_every_gathering_of_several_gpus_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    events = _Events()
    _gathering(monkeypatch, 2, events)
    assert events.waited == [0, 1, 2]


@pytest.mark.parametrize(("ranks", "synchronized"), [(1, False), (2, True)])
def test_one_gpu_or_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch, ranks: int, synchronized: bool) -> None:
    events = _Events()
    _gathering(monkeypatch, ranks, events, synchronized=synchronized)
    assert next(events.numbers) == 0


def test_the_coordinator_is_where_it_is_looked_for() -> None:
    """In the DeepSpeed that is installed."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    assert hasattr(DeepSpeedZeRoOffload, "get_param_coordinator")
    assert hasattr(PartitionedParameterCoordinator, "fetch_sub_module")
