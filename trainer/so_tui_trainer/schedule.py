"""The learning rate of a step. A pure function."""

from __future__ import annotations

import math

from so_tui.spec import TrainSpec


def learning_rate(step: int, total_steps: int, train: TrainSpec) -> float:
    """Return the learning rate of a step.

    It rises linearly over the warm-up of ``ceil(warmup_ratio * total_steps)`` steps and reaches the peak at the last of them. ``cosine``
    and ``linear`` decay from there, ``wsd`` (warm-up, stable, decay) decays linearly over the last ``ceil(decay_ratio * total_steps)``
    steps, as far as they come after the warm-up. The floor would be reached one step after the last, so that no step has a learning rate
    of 0.

    Args:
        step: From 1.
        total_steps: Steps of the run.
        train: The train section.
    """
    warmup = math.ceil(train.warmup_ratio * total_steps)
    if step <= warmup:
        return train.learning_rate * step / warmup
    falling = total_steps - warmup
    if train.schedule == "wsd":
        falling = min(falling, math.ceil(train.decay_ratio * total_steps))
    progress = max(0, step - (total_steps - falling) - 1) / max(1, falling)
    return train.learning_rate * (
        train.min_learning_rate_ratio
        + (1 - train.min_learning_rate_ratio) * _height(progress, train)
    )


def _height(progress: float, train: TrainSpec) -> float:
    """Return the share of the decay that is left, from 1 at its start towards 0 at its end."""
    match train.schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            return 1 - progress
        case "constant":
            return 1.0
