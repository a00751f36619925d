"""When a CPU sub-group is stepped, with which gradient, and who takes the gradient norm.

Clipping needs the norm of all gradients before any sub-group's step is final. A sub-group that has a second set of states is stepped
before that all the same, as if the norm were within the limit (``speculation``); the others are held back. Gradient accumulation sums
gradients in fp32 on the host, so only the Adam worker sees a whole gradient. That costs 4 bytes of host memory a parameter and none of the
GPU's, which offloading is there to save; the 10 bytes of host traffic per parameter and micro-batch are hidden by that micro-batch. The
three together decide everything below:

    gradient      clipping  speculates  a CPU sub-group is stepped        the worker finds its       norm is taken
    accumulation                                                          gradient in
    1 step        off                   when its gradient is complete     the staging buffer         on the GPU, in backward
    1 step        on        no          when the norm is known            the staging buffer         on the GPU, in backward
    1 step        on        yes         when its gradient is complete,    the staging buffer         on the GPU, in backward
                                        out of place
    several       off                   when its gradient is complete     accumulated and staging    by the worker, when it steps
    several       on        no          when the norm is known            accumulated                by the worker, accumulating
    several       on        yes         when its gradient is complete,    accumulated and staging    by the worker, when it steps
                                        out of place

At the accumulation boundary (a step's last micro-batch) a gradient is added inside the Adam pass where nothing holds the step back.
Otherwise it is accumulated like the ones before, because the worker must know the whole gradient's norm first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from superoffload.commands import GradientSource


class StepTime(Enum):
    """When a CPU sub-group may be stepped."""

    GRADIENT_COMPLETE = "gradient complete"
    """As soon as all of its gradients have arrived, while backward goes on."""
    SPECULATIVE = "speculative"
    """Likewise, but out of place: the step is final, or discarded, when the norm of all gradients is known."""
    NORM_KNOWN = "norm known"
    """Held back until the norm of all gradients is known, after backward."""


class NormSource(Enum):
    """Who takes the sum of squares of a CPU sub-group's gradient."""

    GPU = "gpu"
    """The GPU, while backward runs."""
    WORKER = "worker"
    """The Adam worker, when it steps the sub-group, or adds the last micro-batch's gradient to one that is held back."""


class SubGroupAction(Enum):
    """What happens to a CPU sub-group whose gradients of one micro-batch are complete."""

    STEP = "step"
    SPECULATE = "speculate"
    ACCUMULATE = "accumulate"
    HOLD = "hold"
    """The gradient waits in the staging buffer until the norm is known."""


@dataclass(frozen=True)
class StepPolicy:
    """One row of the table above."""

    accumulates: bool
    step_time: StepTime

    @property
    def norm_source(self) -> NormSource:
        return NormSource.WORKER if self.accumulates else NormSource.GPU

    @property
    def norm_is_read_before_step(self) -> bool:
        """Whether ``step`` reads the norm on the host. Otherwise it is read a step later, and nothing waits for it."""
        return self.accumulates or self.step_time is not StepTime.GRADIENT_COMPLETE

    def on_complete(self, *, boundary: bool) -> SubGroupAction:
        """Return what to do with a sub-group whose gradients are complete; ``boundary`` in a step's last micro-batch."""
        if boundary and self.step_time is StepTime.GRADIENT_COMPLETE:
            return SubGroupAction.STEP
        if boundary and self.step_time is StepTime.SPECULATIVE:
            return SubGroupAction.SPECULATE
        return SubGroupAction.ACCUMULATE if self.accumulates else SubGroupAction.HOLD

    def gradient_source(self, micro_batch: int) -> GradientSource:
        """Return where the worker finds the gradient to step with.

        Args:
            micro_batch: Index of the step's last micro-batch, counted from 0. It does not matter where sub-groups are held back;
                otherwise the last gradient is added inside the Adam pass.
        """
        if not self.accumulates:
            return GradientSource.STAGING
        if self.step_time is StepTime.NORM_KNOWN:
            return GradientSource.ACCUMULATED
        # A step may be cut short to a single micro-batch: then nothing has been accumulated.
        return GradientSource.ACCUMULATED_AND_STAGING if micro_batch > 0 else GradientSource.STAGING


def step_policy(
    gradient_accumulation_steps: int, clipping: float, *, speculates: bool = False
) -> StepPolicy:
    """Return the policy for a sub-group.

    Args:
        gradient_accumulation_steps: Micro-batches per step.
        clipping: The largest gradient norm, 0 for no limit.
        speculates: Whether the sub-group is stepped before the norm is known. Of no effect without clipping.
    """
    step_time = StepTime.GRADIENT_COMPLETE
    if clipping:
        step_time = StepTime.SPECULATIVE if speculates else StepTime.NORM_KNOWN
    return StepPolicy(gradient_accumulation_steps > 1, step_time)
