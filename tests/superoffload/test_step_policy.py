"""How clipping and gradient accumulation decide when a sub-group is stepped, with which gradient,
and who takes the norm.
"""

from __future__ import annotations

import pytest

from superoffload.commands import GradientSource, Operation
from superoffload.steps import NormSource, StepTime, step_policy

EARLY, SPECULATIVE, HELD_BACK = (
    StepTime.GRADIENT_COMPLETE,
    StepTime.SPECULATIVE,
    StepTime.NORM_KNOWN,
)


GPU, WORKER = NormSource.GPU, NormSource.WORKER
STEP, SPECULATE, ACCUMULATE = Operation.STEP, Operation.SPECULATE, Operation.ACCUMULATE
STAGING, SUM, BOTH = (
    GradientSource.STAGING,
    GradientSource.ACCUMULATED,
    GradientSource.ACCUMULATED_AND_STAGING,
)


@pytest.mark.parametrize(
    ("accumulation", "clipping", "speculates", "time", "norm", "is_read", "operations", "sources"),
    [
        (1, 0.0, False, EARLY, GPU, False, (None, STEP), (STAGING, STAGING)),
        (1, 0.0, True, EARLY, GPU, False, (None, STEP), (STAGING, STAGING)),
        (1, 1.0, False, HELD_BACK, GPU, True, (None, None), (STAGING, STAGING)),
        (1, 1.0, True, SPECULATIVE, GPU, True, (None, SPECULATE), (STAGING, STAGING)),
        (3, 0.0, False, EARLY, WORKER, True, (ACCUMULATE, STEP), (STAGING, BOTH)),
        (3, 1.0, False, HELD_BACK, WORKER, True, (ACCUMULATE, ACCUMULATE), (SUM, SUM)),
        (3, 1.0, True, SPECULATIVE, WORKER, True, (ACCUMULATE, SPECULATE), (STAGING, BOTH)),
    ],
)
def test_step_policy_of_clipping_accumulation_and_speculation(
    accumulation: int,
    clipping: float,
    speculates: bool,
    time: StepTime,
    norm: NormSource,
    is_read: bool,
    operations: tuple[Operation | None, Operation | None],
    sources: tuple[GradientSource, GradientSource],
) -> None:
    """Operations on a complete sub-group before the boundary and at it. Sources of the gradient in
    the step's first micro-batch, if the step is cut short to it, and in a later one.
    """
    policy = step_policy(accumulation, clipping, speculates=speculates)
    assert (policy.step_time, policy.norm_source) == (time, norm)
    assert (policy.norm_is_read_before_step, policy.accumulates) == (is_read, accumulation > 1)
    assert (policy.on_complete(boundary=False), policy.on_complete(boundary=True)) == operations
    assert (policy.gradient_source(0), policy.gradient_source(2)) == sources
