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


@pytest.mark.parametrize(
    ("accumulation", "clipping", "speculates", "step_time", "norm_source", "norm_is_read"),
    [
        (1, 0.0, False, EARLY, NormSource.GPU, False),
        (1, 0.0, True, EARLY, NormSource.GPU, False),
        (1, 1.0, False, HELD_BACK, NormSource.GPU, True),
        (1, 1.0, True, SPECULATIVE, NormSource.GPU, True),
        (3, 0.0, False, EARLY, NormSource.WORKER, True),
        (3, 1.0, False, HELD_BACK, NormSource.WORKER, True),
        (3, 1.0, True, SPECULATIVE, NormSource.WORKER, True),
    ],
)
def test_when_a_sub_group_is_stepped_and_who_takes_the_norm(
    accumulation: int,
    clipping: float,
    speculates: bool,
    step_time: StepTime,
    norm_source: NormSource,
    norm_is_read: bool,
) -> None:
    policy = step_policy(accumulation, clipping, speculates=speculates)
    assert (policy.step_time, policy.norm_source, policy.norm_is_read_before_step) == (
        step_time,
        norm_source,
        norm_is_read,
    )
    assert policy.accumulates == (accumulation > 1)


@pytest.mark.parametrize(
    ("accumulation", "clipping", "speculates", "before", "at_boundary"),
    [
        (1, 0.0, False, None, Operation.STEP),
        (1, 1.0, False, None, None),
        (1, 1.0, True, None, Operation.SPECULATE),
        (3, 0.0, False, Operation.ACCUMULATE, Operation.STEP),
        (3, 1.0, False, Operation.ACCUMULATE, Operation.ACCUMULATE),
        (3, 1.0, True, Operation.ACCUMULATE, Operation.SPECULATE),
    ],
)
def test_what_happens_to_a_complete_sub_group(
    accumulation: int,
    clipping: float,
    speculates: bool,
    before: Operation | None,
    at_boundary: Operation | None,
) -> None:
    policy = step_policy(accumulation, clipping, speculates=speculates)
    assert policy.on_complete(boundary=False) is before
    assert policy.on_complete(boundary=True) is at_boundary


@pytest.mark.parametrize(
    ("accumulation", "clipping", "speculates", "first", "later"),
    [
        (1, 0.0, False, GradientSource.STAGING, GradientSource.STAGING),
        (1, 1.0, True, GradientSource.STAGING, GradientSource.STAGING),
        (3, 0.0, False, GradientSource.STAGING, GradientSource.ACCUMULATED_AND_STAGING),
        (3, 1.0, False, GradientSource.ACCUMULATED, GradientSource.ACCUMULATED),
        (3, 1.0, True, GradientSource.STAGING, GradientSource.ACCUMULATED_AND_STAGING),
    ],
)
def test_where_the_worker_finds_the_gradient(
    accumulation: int,
    clipping: float,
    speculates: bool,
    first: GradientSource,
    later: GradientSource,
) -> None:
    """In the step's first micro-batch, if the step is cut short to it, and in a later one."""
    policy = step_policy(accumulation, clipping, speculates=speculates)
    assert policy.gradient_source(0) is first
    assert policy.gradient_source(2) is later
