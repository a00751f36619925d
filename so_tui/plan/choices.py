"""Why recommended settings were chosen, and what is next best. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from msgspec.structs import replace

from so_tui.model.activations import offloads_inputs, offloads_results, policy_of
from so_tui.plan.accuracy import about_as_fast
from so_tui.plan.alternatives import with_micro_batch, with_policy
from so_tui.plan.facts.choices import (
    AdamCoresChosen,
    AllOnGpu,
    CheckpointingChosen,
    FasterRatio,
    LeastGpuMemory,
    MicroBatchChosen,
    ModeWithoutGpu,
    NextBest,
    NoNextBest,
    NothingOffloaded,
    Preference,
    Recommended,
    SequencesShared,
    SmallestRatio,
    SpeedUnknown,
)
from so_tui.plan.fastest_ratio import rate
from so_tui.plan.fit import Assessment, assess, in_mode
from so_tui.spec.sections.offload import Mode
from so_tui.spec.types import RunSpec


def choices(
    given: RunSpec, chosen: Assessment, tried: Sequence[Assessment]
) -> Iterator[Recommended]:
    """Yield why the recommended settings were chosen, and the next best with its price.

    Args:
        given: What the user asked for.
        chosen: What is recommended.
        tried: Everything that was assessed, best first.
    """
    resources = chosen.target.resources
    if not resources.has_gpu:
        yield ModeWithoutGpu(mode=_mode(chosen))
        return
    if resources.problem:
        return
    smallest = next((found for found in tried if _settings(found) == _settings(chosen)), chosen)
    yield _larger_ratio(chosen, smallest) or _offload_choice(given, chosen)
    if resources.speed is not None:
        yield _checkpointing_choice(chosen)
    if chosen.spec.train.micro_batch != given.train.micro_batch:
        yield _micro_batch_choice(given, chosen)
    if (shared := chosen.spec.train.sequence_parallel) != given.train.sequence_parallel:
        yield SequencesShared(ranks=shared, given=given.train.sequence_parallel)
    yield from _core_choice(given, chosen)
    if resources.speed is None:
        yield SpeedUnknown()
    elif (other := _runner_up(chosen, tried)) is not None:
        offload = other.spec.offload
        yield NextBest(
            mode=_mode(other),
            ratio=offload.ratio,
            micro_batch=other.spec.train.micro_batch,
            policy=policy_of(other.spec.model),
            on_host=_on_host(other),
            slower=_slower(chosen, other),
            alike=about_as_fast(rate(chosen), rate(other)),
            chosen_for=_preference(given, chosen, other),
            more_gpu_bytes=chosen.gpu_bytes_left - other.gpu_bytes_left,
        )
    elif not resources.gpu_memory_unknown:
        yield NoNextBest(fits=chosen.verdict == "fits")


def _larger_ratio(chosen: Assessment, smallest: Assessment) -> FasterRatio | None:
    ratio, least = chosen.spec.offload.ratio, smallest.spec.offload.ratio
    if chosen.spec.offload.mode == "gpu" or ratio <= least or not chosen.step or not smallest.step:
        return None
    return FasterRatio(
        ratio=ratio,
        step_s=chosen.step.total_s,
        smallest_ratio=least,
        smallest_step_s=smallest.step.total_s,
        alike=about_as_fast(rate(chosen), rate(smallest)),
        more_gpu_bytes=chosen.gpu_bytes_left - smallest.gpu_bytes_left,
    )


def _offload_choice(given: RunSpec, chosen: Assessment) -> Recommended:
    ratio, given_ratio = chosen.spec.offload.ratio, given.offload.ratio
    if chosen.spec.offload.mode == "gpu":
        return AllOnGpu()
    if not ratio:
        return NothingOffloaded()
    if chosen.target.resources.gpu_memory_unknown:
        return LeastGpuMemory(ratio=ratio)
    plain = SmallestRatio(ratio=ratio, keeps_margin=chosen.verdict == "fits")
    if ratio == given_ratio:
        return plain
    as_given = assess(in_mode(chosen.spec, "superoffload", given_ratio), chosen.target)
    if as_given.verdict == "does not fit":
        return replace(plain, given_ratio=given_ratio, given_shortage=as_given.shortages[0])
    if as_given.step and chosen.step and as_given.step.total_s >= chosen.step.total_s:
        return replace(
            plain,
            given_ratio=given_ratio,
            given_step_s=as_given.step.total_s,
            step_s=chosen.step.total_s,
        )
    return plain


def _checkpointing_choice(chosen: Assessment) -> CheckpointingChosen:
    policy = policy_of(chosen.spec.model)
    full = chosen if policy == "full" else assess(with_policy(chosen.spec, "full"), chosen.target)
    if policy == "full" or not full.step or not chosen.step:
        return CheckpointingChosen(policy=policy)
    return CheckpointingChosen(
        policy=policy, step_s=chosen.step.total_s, full_step_s=full.step.total_s
    )


def _micro_batch_choice(given: RunSpec, chosen: Assessment) -> MicroBatchChosen:
    mode: Mode = "gpu" if chosen.spec.offload.mode == "gpu" else "superoffload"
    spec = in_mode(
        with_micro_batch(chosen.spec, given.train.micro_batch), mode, chosen.spec.offload.ratio
    )
    before = assess(spec, chosen.target)
    found = MicroBatchChosen(
        micro_batch=chosen.spec.train.micro_batch,
        accumulation=chosen.spec.gradient_accumulation_steps,
        given_micro_batch=given.train.micro_batch,
    )
    if before.shortages:
        return replace(found, given_shortage=before.shortages[0])
    return replace(found, given_slower=_slower(chosen, before)) if rate(before) else found


def _core_choice(given: RunSpec, chosen: Assessment) -> Iterator[AdamCoresChosen]:
    fraction, given_fraction = (
        chosen.spec.offload.cpu_adam_cores_fraction,
        given.offload.cpu_adam_cores_fraction,
    )
    if fraction != given_fraction and chosen.spec.offload.ratio:
        resources = chosen.target.resources
        yield AdamCoresChosen(
            adam_cores=resources.adam_cores,
            cores=resources.cores,
            fraction=fraction,
            raised=not fraction < given_fraction,
        )


def _runner_up(chosen: Assessment, tried: Sequence[Assessment]) -> Assessment | None:
    """Return the next best that fits with a margin and differs in more than the ratio."""
    return next(
        (
            found
            for found in tried
            if found.verdict == "fits" and _settings(found) != _settings(chosen)
        ),
        None,
    )


def _preference(given: RunSpec, chosen: Assessment, other: Assessment) -> Preference | None:
    """Return why settings are preferred to others that are about as fast and planned to be faster; None where they are not."""
    if rate(chosen) >= rate(other) or not about_as_fast(rate(chosen), rate(other)):
        return None
    if (chosen.spec.offload.mode == "gpu") != (other.spec.offload.mode == "gpu"):
        return "no-offload"
    kept, others = chosen.spec.train.micro_batch, other.spec.train.micro_batch
    return "given-micro-batch" if kept == given.train.micro_batch != others else "memory"


def _settings(found: Assessment) -> tuple[str, str, bool, int]:
    return (
        found.spec.offload.mode,
        found.spec.model.activation_checkpointing,
        _on_host(found),
        found.spec.train.micro_batch,
    )


def _on_host(found: Assessment) -> bool:
    """Return whether what layers keep is in host memory, or a part of it."""
    return offloads_inputs(found.spec.model) or offloads_results(found.spec.model)


def _slower(chosen: Assessment, other: Assessment) -> float:
    """Return how much longer the other takes for the same tokens, as a share."""
    return rate(chosen) / rate(other) - 1


def _mode(found: Assessment) -> Mode:
    return cast(Mode, found.spec.offload.mode)
