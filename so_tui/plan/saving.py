"""Checkpoints in a plan: how often they are saved by default, what one costs, and the sentence that
people read. Pure functions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from so_tui.spec.run_spec import CheckpointSpec, RunSpec
from so_tui.units import disk_size, interval, plural, small_share

if TYPE_CHECKING:
    from so_tui.plan.fit import Assessment
    from so_tui.plan.plan import Plan

DISK_BYTES_PER_S = 1e9
"""Rate at which a disk takes a checkpoint, until one has been measured. Three pairs of GPUs wrote
at 0.8 to 1.5 GB/s (``benchmarks/results/checkpoints-*.json``).
"""
_SLOWED = 0.1
"""Share of the time of writing that training loses while it goes on. There it was 0.06 to 0.12."""
MOST_SHARE = 0.02
"""Largest share of a run's time that checkpoints cost by default."""
_WHOLE_MINUTES = 30
"""Longer intervals are multiples of so many."""


def with_wanted_saving(spec: RunSpec) -> RunSpec:
    """Return the spec without the default interval where that would be wrong: checkpoints are saved
    by steps already, or would be measured by a benchmark.
    """
    replaced = spec.checkpoint.every_steps or spec.benchmark.measured_steps
    if not replaced or spec.fixes("checkpoint.every_minutes"):
        return spec
    return spec.changed("checkpoint", every_minutes=0.0)


def checkpoint_cost_s(found: Assessment) -> float:
    """Return the seconds of training that one checkpoint costs."""
    behind = found.copies.share if found.copies else 0.0
    return found.bytes_of("checkpoint") / DISK_BYTES_PER_S * (1 - behind + _SLOWED * behind)


def affordable_minutes(spec: RunSpec, cost_s: float) -> float:
    """Return the minutes between checkpoints of which each costs ``cost_s``: those of the spec, or
    more where they would cost more than ``MOST_SHARE`` and no person set them.
    """
    given, least = spec.checkpoint.every_minutes, cost_s / MOST_SHARE / 60
    if not given or least <= given or spec.fixes("checkpoint.every_minutes"):
        return given
    return float(_WHOLE_MINUTES * math.ceil(least / _WHOLE_MINUTES))


def saving_text(plan: Plan) -> str:
    """Return ``saves every 30 min (177 GB each, 1.2 % of the time)``, or that nothing is saved
    before the end.
    """
    checkpoint = plan.spec.checkpoint
    if not checkpoint.repeats:
        return "nothing is saved" + (" before the end" if checkpoint.saves_at_end else "")
    steps, minutes = checkpoint.every_steps, checkpoint.every_minutes
    by_steps = f"every {plural(steps, 'step')}" if steps > 1 else "every step" if steps else ""
    when = " and ".join(filter(None, (by_steps, f"every {interval(minutes)}" if minutes else "")))
    share = _share(plan)
    cost = "" if share is None else f", {small_share(share)} of the time"
    late = "; the run ends before the first" if may_lose_much(plan) else ""
    return f"saves {when} ({disk_size(plan.checkpoint_bytes)} each{cost}){late}"


def may_lose_much(plan: Plan) -> bool:
    """Return whether nothing is saved before the end of a run that is longer than the usual
    interval, or may be.
    """
    checkpoint, lasts_s = plan.spec.checkpoint, _lasts_s(plan)
    if lasts_s is not None and lasts_s <= 60 * CheckpointSpec().every_minutes:
        return False
    if checkpoint.every_steps or lasts_s is None:
        return not checkpoint.repeats
    return not 0 < 60 * checkpoint.every_minutes < lasts_s


def _share(plan: Plan) -> float | None:
    """Return what checkpoints cost of the time; None where that is not known."""
    if plan.checkpoint_cost_s is None:
        return None
    checkpoint = plan.spec.checkpoint
    share = 0.0
    if checkpoint.every_minutes:
        share += plan.checkpoint_cost_s / (60 * checkpoint.every_minutes)
    if checkpoint.every_steps:
        if plan.step_s is None:
            return None
        steps_s = checkpoint.every_steps * plan.step_s
        share += plan.checkpoint_cost_s / ((steps_s + plan.checkpoint_cost_s) or 1.0)
    return min(1.0, share)


def _lasts_s(plan: Plan) -> float | None:
    """Return the length of the run, where it and the speed are known."""
    train, benchmark = plan.spec.train, plan.spec.benchmark
    steps = train.tokens / max(1, plan.tokens_per_step) or float(train.steps)
    if benchmark.measured_steps:
        steps = float(benchmark.warmup_steps + benchmark.measured_steps)
    return steps * plan.step_s if steps and plan.step_s else None
