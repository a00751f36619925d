"""How many steps the means of a run cover: those of its charts, and those of its results."""

from __future__ import annotations

from so_tui.runs.blocks import BLOCK_STEPS, block_end
from so_tui.spec.types import RunSpec

SINGLE_STEPS = 4000
"""Between one and two times as many of the newest steps are drawn one by one, and up to twice as many of a whole run."""


def mean_steps(total_steps: int, log_interval: int = 1) -> int:
    """Return how many steps a mean covers: 50 logged ones, in short runs about a twenty-fifth of the run."""
    logged = total_steps // log_interval
    steps = log_interval * next((span for span in (BLOCK_STEPS, 25, 10) if 25 * span <= logged), 5)
    # Where blocks are drawn, only means of whole blocks are exact.
    return steps if total_steps < 2 * SINGLE_STEPS else block_end(steps)


def mean_steps_of(spec: RunSpec | None, total_steps: int, last_step: int) -> int:
    """Return how many steps the means of a run cover, which follows from the run, not from when it was opened.

    Args:
        spec: Its settings; None where they cannot be read.
        total_steps: Steps that it shall take; 0 where that is not known.
        last_step: The last that it took.
    """
    return mean_steps(
        max(total_steps, last_step), spec.train.log_interval if spec is not None else 1
    )


def mean_name(span: int, ema: float | None = None) -> str:
    """Return the name of a mean: ``mean of 50 steps``, or ``EMA 0.9`` where that weight was chosen."""
    return f"mean of {span} steps" if ema is None else f"EMA {ema:g}"
