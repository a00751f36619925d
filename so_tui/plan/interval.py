"""How often to save a checkpoint, so that saving and what failures make a run repeat cost the least together (Young 1974, Daly 2006)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from so_tui.plan.facts.choices import CheckpointInterval
from so_tui.plan.fit import Assessment, assess
from so_tui.spec.types import RunSpec

GPU_HOURS_BETWEEN_FAILURES = 50_000
"""Hours that one GPU with its share of a host runs, on average, until something ends the run. Meta's training of Llama 3 405B: 419
unexpected interruptions in 54 days on 16,384 GPUs."""
DISK_BYTES_PER_S = 1e9
"""Rate at which a shared file system takes a checkpoint, until one has been measured."""
_USUAL_MINUTES = 60.0


def best_interval_s(cost_s: float, failure_s: float) -> float:
    """Return the seconds of training between checkpoints that lose the least time, by Daly's formula of higher order.

    Args:
        cost_s: How long training stands still for a checkpoint.
        failure_s: Mean time between failures of the whole run.
    """
    if cost_s >= 2 * failure_s:
        return failure_s
    share = cost_s / (2 * failure_s)
    return math.sqrt(2 * cost_s * failure_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def checkpoint_interval(found: Assessment) -> Iterator[CheckpointInterval]:
    """Yield the best interval for a run that a failure would cost much: in a job, on several hosts, or longer than the interval."""
    spec, target, speed = found.spec, found.target, found.target.resources.speed
    if (
        not target.resources.has_gpu
        or speed is None
        or found.step is None
        or found.verdict == "does not fit"
    ):
        return
    saving = found if spec.checkpoint.repeats else assess(_repeating(found), target)
    bytes_ = sum(term.bytes for term in saving.terms if term.location == "disk")
    write_s, copied = bytes_ / DISK_BYTES_PER_S, saving.copies.share if saving.copies else 0.0
    copy_s = 2 * bytes_ / target.ranks * target.resources.ranks_per_node / speed.node_bytes_per_s
    pause_s = (1 - copied) * write_s + copied * copy_s
    failure_s = 3600 * GPU_HOURS_BETWEEN_FAILURES / target.ranks
    interval_s = max(best_interval_s(pause_s, failure_s), write_s)
    lasts_s = spec.train.steps * found.step.total_s
    if not (spec.slurm.partition or target.hosts > 1 or lasts_s > interval_s):
        return
    yield CheckpointInterval(
        minutes=interval_s / 60,
        pause_s=pause_s,
        gpus=target.ranks,
        failure_hours=failure_s / 3600,
        given_minutes=_given_minutes(found),
    )


def _repeating(found: Assessment) -> RunSpec:
    return replace(
        found.spec, checkpoint=replace(found.spec.checkpoint, every_minutes=_USUAL_MINUTES)
    )


def _given_minutes(found: Assessment) -> float | None:
    """Return the interval that the spec sets; None if nothing is saved before the end."""
    checkpoint, step = found.spec.checkpoint, found.step
    given = [checkpoint.every_minutes] if checkpoint.every_minutes else []
    if checkpoint.every_steps and step is not None:
        given.append(checkpoint.every_steps * step.total_s / 60)
    return min(given, default=None)
