"""Compare and order runs: pure functions of their settings and results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from so_tui.runs.results import RunResults
from so_tui.units import duration, memory_size, rate

RESULTS = {
    "loss": "loss",
    "evaluation_loss": "evaluation loss",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "step_s": "step",
    "gpu_memory_bytes": "GPU memory",
    "host_memory_bytes": "host memory",
}
"""Names of results by field."""
_BY_RESULT = {"loss": ("loss", False), "tokens/s": ("tokens_per_s", True), "mfu": ("mfu", True), "memory": ("gpu_memory_bytes", False)}
"""Result and whether the highest comes first, by the name of an order."""


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
        case "loss" | "evaluation_loss":
            return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"
        case "tokens_per_s":
            return rate(value)
        case "mfu":
            return f"{100 * value:.1f} %"
        case "step_s":
            return duration(value)
    return memory_size(value)


def result_order(sort: str, results: RunResults | None) -> float:
    """Return where a run comes by an order that goes by results, the best first and those without last. Raises KeyError for others."""
    key, highest_first = _BY_RESULT[sort]
    value: float | None = getattr(results, key) if results is not None else None
    if value is None:
        return math.inf
    return -value if highest_first else value


def goes_by_results(sort: str) -> bool:
    """Return whether an order needs the runs' results."""
    return sort in _BY_RESULT
