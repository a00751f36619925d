"""The run-ahead limiter: how far the host may be ahead of the GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
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


def test_the_host_waits_when_it_is_too_far_ahead() -> None:
    events = _Events()
    limiter = RunAheadLimiter(200, events)
    for layer in range(5):
        limiter.before_use(f"layer {layer}", 100)
    assert events.waited == [0, 1, 2]


def test_the_newest_module_is_not_waited_for() -> None:
    """The GPU would run out of work, because the newest module is what it computes next."""
    events = _Events()
    limiter = RunAheadLimiter(200, events)
    limiter.before_use("layer", 100)
    limiter.before_use("head", 900)
    assert events.waited == [0]
    limiter.before_use("layer", 100)
    assert events.waited == [0, 1]


@pytest.mark.parametrize(("names", "waited"), [("aabb", []), ("abab", [0, 1])])
def test_a_recomputed_layer_counts_once(names: str, waited: list[int]) -> None:
    events = _Events()
    limiter = RunAheadLimiter(200, events)
    for name in names:
        limiter.before_use(name, 100)
    assert events.waited == waited


def test_small_modules_are_not_waited_for() -> None:
    events = _Events()
    limiter = RunAheadLimiter(200, events)
    for _ in range(100):
        limiter.before_use("activation", 0)
        limiter.before_use("norm", 1)
    assert next(events.numbers) == 0


class _Coordinator:
    """Stands in for DeepSpeed's coordinator, whose gathering needs several GPUs
    (``benchmarks/planner.py --gpus 2``).
    """

    def __init__(self) -> None:
        self.fetched: list[tuple[torch.nn.Module, bool]] = []

    def fetch_sub_module(self, module: torch.nn.Module, forward: bool) -> None:
        self.fetched.append((module, forward))


def _layers(count: int) -> list[torch.nn.Module]:
    """Return layers of 100 parameters in an inner module, each gathered as a whole."""
    found: list[torch.nn.Module] = []
    for index in range(count):
        linear = torch.nn.Linear(10, 10, bias=False)
        layer = torch.nn.Sequential(linear)
        # As DeepSpeed does it: these are no tensors or modules that torch would register.
        vars(linear.weight)["ds_numel"] = 100
        vars(layer).update(ds_id=index, ds_external_parameters=list)
        set_z3_leaf_module(layer, True)
        found.append(layer)
    return found


def _gathering(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    events: _Events,
    *,
    synchronized: bool = False,
    host_weights: bool = False,
) -> _Coordinator:
    coordinator = _Coordinator()
    parameter_offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(parameter_offload=parameter_offload, offload_param=host_weights)
    )
    accelerator = SimpleNamespace(Event=events, is_synchronized_device=lambda: synchronized)
    monkeypatch.setattr(adapter, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: ranks)
    adapter.limit_run_ahead(engine, 200)
    for layer in _layers(5):
        coordinator.fetch_sub_module(layer, forward=True)
    assert [forward for _, forward in coordinator.fetched] == [True] * 5
    return coordinator


def test_every_all_gather_of_several_gpus_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    events = _Events()
    _gathering(monkeypatch, 2, events)
    assert events.waited == [0, 1, 2]


def test_copies_of_host_weights_count_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    events = _Events()
    _gathering(monkeypatch, 1, events, host_weights=True)
    assert events.waited == [0, 1, 2]


@pytest.mark.parametrize(("ranks", "synchronized"), [(1, False), (2, True)])
def test_one_gpu_or_a_cpu_is_not_limited(
    monkeypatch: pytest.MonkeyPatch, ranks: int, synchronized: bool
) -> None:
    events = _Events()
    _gathering(monkeypatch, ranks, events, synchronized=synchronized)
    assert next(events.numbers) == 0


def test_the_installed_deepspeed_has_the_coordinator() -> None:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    assert hasattr(DeepSpeedZeRoOffload, "get_param_coordinator")
    assert hasattr(PartitionedParameterCoordinator, "fetch_sub_module")


MUON = """
import sys, torch
compiled = []
torch.compile = lambda function: compiled.append(function) or function
from superoffload.deepspeed_adapter.engine import import_muon
early = "deepspeed.runtime.zero.muon.original_muon" in sys.modules  # versions before 0.19 import it themselves
import_muon()
from deepspeed.runtime.zero.muon import original_muon
assert early or not compiled, compiled
step = original_muon.zeropower_via_newtonschulz5(torch.eye(4), 5)
assert step.shape == (4, 4)
assert len(compiled) >= 1
from deepspeed.runtime import compiler
assert compiler.compile() is torch.compile, "as it was"
"""  # noqa: E501


@pytest.mark.slow
def test_muon_is_compiled_when_it_is_called() -> None:
    done = subprocess.run([sys.executable, "-c", MUON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
