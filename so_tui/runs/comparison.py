"""Compare and order runs: pure functions of their settings and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from so_tui.runs.results import RunResults
from so_tui.units import duration, memory_size, plural, rate

Run = TypeVar("Run")

RESULTS = {
    "loss": "mean loss",
    "evaluation_loss": "evaluation loss",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "step_s": "step time",
    "gpu_memory_bytes": "GPU memory",
    "host_memory_bytes": "host memory",
    "mean_steps": "means of",
}
"""Names of results by field."""
_BY_RESULT = {
    "loss": ("loss", False),
    "evaluation": ("evaluation_loss", False),
    "tokens/s": ("tokens_per_s", True),
    "mfu": ("mfu", True),
    "memory": ("gpu_memory_bytes", False),
}
"""Result and whether the highest comes first, by the name of an order."""


def result_of_order(sort: str) -> str | None:
    """Return the result that an order goes by; None for the other orders."""
    return _BY_RESULT[sort][0] if sort in _BY_RESULT else None


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values are not the same in all settings, sorted."""
    keys = sorted({key for values in settings for key in values})
    return [key for key in keys if len({values.get(key) for values in settings}) > 1]


def result_text(results: RunResults, key: str) -> str:
    """Return a result as it is shown; empty if it was not measured."""
    value = getattr(results, key)
    if value is None:
        return ""
    match key:
        case "mean_steps":
            return f"last {plural(value, 'step')}"
        case "loss" | "evaluation_loss":
            return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"
        case "tokens_per_s":
            return rate(value)
        case "mfu":
            return f"{100 * value:.1f} %"
        case "step_s":
            return duration(value)
    return memory_size(value)


def ordered(
    runs: Iterable[Run],
    sort: str,
    text_of: Callable[[Run, str], str],
    step_of: Callable[[Run], int],
    results: Callable[[Run], RunResults | None],
) -> list[Run]:
    """Return runs, which come newest first, in another order.

    Args:
        runs: The runs, in any form.
        sort: ``started``, ``step``, a result (``loss``, ``evaluation``, ``tokens/s``, ``mfu``, ``memory``), or what ``text_of`` knows.
        text_of: Returns a run's name, model, state or host by that word.
        step_of: Returns the step that a run has reached; the run that has come furthest is the first.
        results: Returns a run's results, and is called only where ``sort`` is a result: the best comes first, runs without it last.
    """
    if sort == "started":
        return list(runs)
    if sort == "step":
        return sorted(runs, key=lambda run: -step_of(run))
    if sort not in _BY_RESULT:
        return sorted(runs, key=lambda run: text_of(run, sort))
    key, highest_first = _BY_RESULT[sort]

    def place(run: Run) -> float:
        found = results(run)
        value: float | None = None if found is None else getattr(found, key)
        return math.inf if value is None else -value if highest_first else value

    return sorted(runs, key=place)
