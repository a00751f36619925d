"""The next value of a number field, for a press on ``+`` or ``−``: sensible for what the number means, inside its limits. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from so_tui.spec import FieldInfo, field_index, parse_value
from so_tui.ui.form import LENGTH_KEYS, text_of

Direction = Literal[-1, 1]
Kind = Literal["by one", "powers of two", "round", "1-2-5"]

_TOLERANCE = 1e-9
_GRIDS = {
    "offload.ratio": 0.05,
    "offload.cpu_adam_cores_fraction": 0.05,
    "train.warmup_ratio": 0.01,
    "train.decay_ratio": 0.01,
    "train.min_learning_rate_ratio": 0.01,
    "data.held_out": 0.01,
    "train.beta1": 0.01,
    "train.beta2": 0.001,
    "prompts.temperature": 0.1,
    "model.rope_factor": 1.0,
}
"""Fields that step by a fixed distance."""
_KINDS: dict[str, Kind] = {
    "gpus": "by one",
    "nodes": "by one",
    "checkpoint.keep": "by one",
    "train.seed": "by one",
    "train.max_skipped_steps": "by one",
    "train.micro_batch": "powers of two",
    "train.gradient_accumulation": "powers of two",
    "train.tokens_per_step": "powers of two",
    "train.sequence_parallel": "powers of two",
    "data.sequence_length": "powers of two",
    "train.learning_rate": "1-2-5",
    "train.weight_decay": "1-2-5",
    "train.epsilon": "1-2-5",
    "train.router_loss_coefficient": "1-2-5",
    "train.gradient_clipping": "1-2-5",
}
"""How the others step; those that are not named, by their first digit: 60, 50 ... 10, 9, and 4,000 after 3,000."""
_LEAST = {
    "train.epochs": 0.1,
    "train.tokens": 1e6,
    "train.tokens_per_step": 4096.0,
    "train.gradient_clipping": 0.1,
    "train.weight_decay": 1e-3,
    "train.router_loss_coefficient": 1e-4,
}
"""The value after 0, where that is not 1."""


def beyond(values: Iterable[float], present: float, direction: int) -> float | None:
    """Return the nearest value in a direction; None at the end."""
    there = [
        value
        for value in values
        if (value - present) * direction > _TOLERANCE * max(abs(value), abs(present))
    ]
    return None if not there else min(there) if direction > 0 else max(there)


def can_step(info: FieldInfo | None) -> bool:
    """Return whether a field has next values: a number does, and so does the length, which has no ``info``."""
    return info is None or info.type_name in ("integer", "number")


def next_text(path: str, text: str, direction: Direction) -> str | None:
    """Return the next value of a field as it is typed; None at its limit, or where the text is no number."""
    info = field_index()[path]
    present = parse_value(text, info)
    if type(present) not in (int, float) or not math.isfinite(present):
        return None
    proposed = _proposed(path, info, present, direction)
    if proposed is None:
        return None
    value = float(f"{proposed:.12g}")
    low, high = info.minimum, info.maximum
    value = value if high is None else min(value, high)
    value = value if low is None else max(value, low)
    value = round(value) if info.type_name == "integer" else value
    excluded = (info.excludes_minimum and value == low) or (info.excludes_maximum and value == high)
    if excluded or (value - present) * direction <= 0:
        return None
    return text_of(value)


def _proposed(path: str, info: FieldInfo, present: float, direction: Direction) -> float | None:
    """Return the next value without regard to limits."""
    kind = _KINDS.get(path, "round")
    if kind == "by one":
        return present + direction
    if (grid := _GRIDS.get(path)) is not None:
        at = present / grid
        return grid * (
            math.floor(at + _TOLERANCE) + 1 if direction > 0 else math.ceil(at - _TOLERANCE) - 1
        )
    endless = (
        info.excludes_minimum or path in LENGTH_KEYS
    )  # 0 is no value, and there is always a smaller one
    least = _LEAST.get(path, 1.0)
    if present <= 0:
        return least if direction > 0 else None
    if direction < 0 and not endless and present <= least * (1 + _TOLERANCE):
        return 0.0
    return beyond(_candidates(kind, present), present, direction)


def _candidates(kind: Kind, present: float) -> list[float]:
    """Return the values of a kind around a positive one."""
    if kind == "powers of two":
        power = math.floor(math.log2(present))
        return [2.0**exponent for exponent in range(power - 1, power + 2)]
    decade = math.floor(math.log10(present))
    digits = (1, 2, 5) if kind == "1-2-5" else range(1, 10)
    return [
        float(f"{digit}e{exponent}")
        for exponent in range(decade - 1, decade + 2)
        for digit in digits
    ]
