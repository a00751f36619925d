"""How clipping and gradient accumulation decide when a sub-group is stepped, with which gradient, and who takes the norm."""

from __future__ import annotations

import pytest

from superoffload.step_policy import NormSource, StepTime, SubGroupAction, step_policy
from superoffload.worker import GradientSource

EARLY, HELD_BACK = StepTime.GRADIENT_COMPLETE, StepTime.NORM_KNOWN


@pytest.mark.parametrize(
    ("accumulation", "clipping", "step_time", "norm_source", "norm_is_read"),
    [
        (1, 0.0, EARLY, NormSource.GPU, False),
        (1, 1.0, HELD_BACK, NormSource.GPU, True),
        (3, 0.0, EARLY, NormSource.WORKER_STEP, True),
        (3, 1.0, HELD_BACK, NormSource.WORKER_ACCUMULATE, True),
    ],
)
def test_when_a_sub_group_is_stepped_and_who_takes_the_norm(
    accumulation: int, clipping: float, step_time: StepTime, norm_source: NormSource, norm_is_read: bool
) -> None:
    policy = step_policy(accumulation, clipping)
    assert (policy.step_time, policy.norm_source, policy.norm_is_read_before_step) == (step_time, norm_source, norm_is_read)
    assert policy.accumulates == (accumulation > 1)


@pytest.mark.parametrize(
    ("accumulation", "clipping", "before", "at_boundary"),
    [
        (1, 0.0, SubGroupAction.HOLD, SubGroupAction.STEP),
        (1, 1.0, SubGroupAction.HOLD, SubGroupAction.HOLD),
        (3, 0.0, SubGroupAction.ACCUMULATE, SubGroupAction.STEP),
        (3, 1.0, SubGroupAction.ACCUMULATE, SubGroupAction.ACCUMULATE),
    ],
)
def test_what_happens_to_a_complete_sub_group(
    accumulation: int, clipping: float, before: SubGroupAction, at_boundary: SubGroupAction
) -> None:
    policy = step_policy(accumulation, clipping)
    assert policy.on_complete(boundary=False) is before
    assert policy.on_complete(boundary=True) is at_boundary


@pytest.mark.parametrize(
    ("accumulation", "clipping", "first", "later"),
    [
        (1, 0.0, GradientSource.STAGING, GradientSource.STAGING),
        (1, 1.0, GradientSource.STAGING, GradientSource.STAGING),
        (3, 0.0, GradientSource.STAGING, GradientSource.ACCUMULATED_AND_STAGING),
        (3, 1.0, GradientSource.ACCUMULATED, GradientSource.ACCUMULATED),
    ],
)
def test_where_the_worker_finds_the_gradient(accumulation: int, clipping: float, first: GradientSource, later: GradientSource) -> None:
    """In the step's first micro-batch, if the step is cut short to it, and in a later one."""
    policy = step_policy(accumulation, clipping)
    assert policy.gradient_source(0) is first
    assert policy.gradient_source(2) is later
