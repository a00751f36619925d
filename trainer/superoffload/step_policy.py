"""When a CPU sub-group is stepped, with which gradient, and who takes the gradient norm.

Clipping needs the norm of all gradients before any sub-group may be stepped. Gradient accumulation sums gradients on the host, so only
the Adam worker sees a whole gradient. The two together decide everything below:

    gradient accumulation  clipping  a CPU sub-group is stepped       the worker finds its gradient in     norm is taken
    1 step                 off       when its gradient is complete    the staging buffer                   on the GPU, in backward
    1 step                 on        when the norm is known           the staging buffer                   on the GPU, in backward
    several steps          off       when its gradient is complete    accumulated and staging              by the worker, when it steps
    several steps          on        when the norm is known           accumulated                          by the worker, accumulating

At the accumulation boundary (a step's last micro-batch) a gradient is added inside the Adam pass where nothing holds the step back.
Otherwise it is accumulated like the ones before, because the worker must know the whole gradient's norm first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from superoffload.worker import GradientSource


class StepTime(Enum):
    """When a CPU sub-group may be stepped."""

    GRADIENT_COMPLETE = "gradient complete"
    """As soon as all of its gradients have arrived, while backward goes on."""
    NORM_KNOWN = "norm known"
    """Held back until the norm of all gradients is known, after backward."""


class NormSource(Enum):
    """Who takes the sum of squares of a CPU sub-group's gradient."""

    GPU = "gpu"
    """The GPU, while backward runs."""
    WORKER_ACCUMULATE = "worker accumulate"
    """The Adam worker, when it adds the last micro-batch's gradient."""
    WORKER_STEP = "worker step"
    """The Adam worker, when it steps the sub-group."""


class SubGroupAction(Enum):
    """What happens to a CPU sub-group whose gradients of one micro-batch are complete."""

    STEP = "step"
    ACCUMULATE = "accumulate"
    HOLD = "hold"
    """The gradient waits in the staging buffer until the norm is known."""


@dataclass(frozen=True)
class StepPolicy:
    """One row of the table above."""

    accumulates: bool
    step_time: StepTime
    norm_source: NormSource

    @property
    def norm_is_read_before_step(self) -> bool:
        """Whether ``step`` reads the norm on the host. Otherwise it is read a step later, and nothing waits for it."""
        return self.step_time is StepTime.NORM_KNOWN or self.norm_source is not NormSource.GPU

    def on_complete(self, *, boundary: bool) -> SubGroupAction:
        """Return what to do with a sub-group whose gradients are complete; ``boundary`` in a step's last micro-batch."""
        if boundary and self.step_time is StepTime.GRADIENT_COMPLETE:
            return SubGroupAction.STEP
        return SubGroupAction.ACCUMULATE if self.accumulates else SubGroupAction.HOLD

    def gradient_source(self, micro_batch: int) -> GradientSource:
        """Return where the worker finds the gradient to step with.

        Args:
            micro_batch: Index of the step's last micro-batch, counted from 0. It matters only with ``StepTime.GRADIENT_COMPLETE``,
                where the last gradient is added inside the Adam pass.
        """
        if not self.accumulates:
            return GradientSource.STAGING
        if self.step_time is StepTime.NORM_KNOWN:
            return GradientSource.ACCUMULATED
        # A step may be cut short to a single micro-batch: then nothing has been accumulated.
        return GradientSource.ACCUMULATED_AND_STAGING if micro_batch > 0 else GradientSource.STAGING


def step_policy(gradient_accumulation_steps: int, clipping: float) -> StepPolicy:
    """Return the policy for these settings; ``clipping`` is the largest gradient norm, 0 for no limit."""
    accumulates = gradient_accumulation_steps > 1
    step_time = StepTime.NORM_KNOWN if clipping else StepTime.GRADIENT_COMPLETE
    if not accumulates:
        return StepPolicy(accumulates, step_time, NormSource.GPU)
    norm_source = NormSource.WORKER_ACCUMULATE if step_time is StepTime.NORM_KNOWN else NormSource.WORKER_STEP
    return StepPolicy(accumulates, step_time, norm_source)
