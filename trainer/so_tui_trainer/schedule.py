"""The learning rate of a step. Pure."""

from __future__ import annotations

import math

from so_tui.spec import TrainSpec


def learning_rate(step: int, total_steps: int, train: TrainSpec) -> float:
    """Learning rate of step ``step`` (from 1): a linear rise over the warm-up steps to the peak, then the schedule down to its floor.

    Warm-up takes ``ceil(warmup_ratio * total_steps)`` steps and reaches the peak at its last one. ``cosine`` and ``linear`` fall from
    there on, ``wsd`` (warm-up, stable, decay) linearly over the last ``ceil(decay_ratio * total_steps)`` steps, of those after the
    warm-up. All would reach the floor one step after the last, so that no step is wasted on a rate of 0.
    """
    warmup = math.ceil(train.warmup_ratio * total_steps)
    if step <= warmup:
        return train.learning_rate * step / warmup
    falling = total_steps - warmup
    if train.schedule == "wsd":
        falling = min(falling, math.ceil(train.decay_ratio * total_steps))
    progress = max(0, step - (total_steps - falling) - 1) / max(1, falling)
    return train.learning_rate * (train.min_learning_rate_ratio + (1 - train.min_learning_rate_ratio) * _height(progress, train))


def _height(progress: float, train: TrainSpec) -> float:
    """From 1 at the start of the fall towards 0 at its end."""
    match train.schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            return 1 - progress
        case "constant":
            return 1.0
