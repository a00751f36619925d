"""The learning rate of a step. Pure."""

from __future__ import annotations

import math

from so_tui.spec import TrainSpec


def learning_rate(step: int, total_steps: int, train: TrainSpec) -> float:
    """Learning rate of step ``step`` (from 1): a linear rise over the warm-up steps to the peak, then the schedule down to 0.

    Warm-up takes ``ceil(warmup_ratio * total_steps)`` steps and reaches the peak at its last one. ``cosine`` and ``linear`` would reach 0
    one step after the last, so that no step is wasted on a rate of 0.
    """
    warmup = math.ceil(train.warmup_ratio * total_steps)
    if step <= warmup:
        return train.learning_rate * step / warmup
    progress = (step - warmup - 1) / max(1, total_steps - warmup)
    match train.schedule:
        case "cosine":
            return train.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return train.learning_rate * (1 - progress)
        case "constant":
            return train.learning_rate
