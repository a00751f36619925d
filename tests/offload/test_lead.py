"""How far the host may be ahead of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from so_tui_trainer.offload.lead import Lead


class _Events:
    """Notes in which order points of the GPU's work were waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.numbers: Iterator[int] = count()

    def __call__(self) -> _Event:
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
    lead = Lead(200, events)
    for layer in range(5):
        lead.asked(f"layer {layer}", 100)
    assert events.waited == [0, 1, 2]


def test_a_parameter_larger_than_the_lead_is_never_waited_for_itself() -> None:
    """The GPU would run dry: what was asked for last is what it is to do next."""
    events = _Events()
    lead = Lead(200, events)
    lead.asked("layer", 100)
    lead.asked("head", 900)
    assert events.waited == [0]
    lead.asked("layer", 100)
    assert events.waited == [0, 1]


@pytest.mark.parametrize(("names", "waited"), [("aabb", []), ("abab", [0, 1])])
def test_a_layer_computed_anew_counts_once(names: str, waited: list[int]) -> None:
    events = _Events()
    lead = Lead(200, events)
    for name in names:
        lead.asked(name, 100)
    assert events.waited == waited


def test_modules_without_parameters_cost_nothing() -> None:
    events = _Events()
    lead = Lead(0, events)
    for _ in range(3):
        lead.asked("activation", 0)
    assert next(events.numbers) == 0
