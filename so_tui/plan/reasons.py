"""Why a run can never start, why its settings were chosen, what follows from them, and what is
worth knowing. Pure functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from math import prod
from typing import cast

from msgspec.structs import replace

from so_tui.model.profile import offloads_inputs, offloads_results, policy_of
from so_tui.plan.fit import Assessment, assess, best, in_mode, step_model
from so_tui.plan.notes import (
    AcrossHosts,
    AdamCoresChosen,
    AllOnGpu,
    AmdGpu,
    BeyondPositions,
    Blocker,
    Caution,
    CheckpointingChosen,
    CheckpointInterval,
    Choice,
    ClippingWaits,
    DeepSpeedNvidiaOnly,
    EngineNeedsGpu,
    FasterAttention,
    FasterOffload,
    FasterRatio,
    FasterStates,
    GpuMemoryUnknown,
    IndexersUntrained,
    LeastGpuMemory,
    MicroBatchChosen,
    ModeNeedsGpu,
    ModeWithoutGpu,
    NeverRun,
    NextBest,
    NoNextBest,
    Note,
    NothingOffloaded,
    PackingOff,
    PcieOffload,
    Preference,
    RemoteCode,
    SequencesShared,
    SlowWithoutGpu,
    SmallestRatio,
    SpeedUnknown,
)
from so_tui.plan.rates import about_as_fast, surely_faster
from so_tui.plan.resources import Resources, attention_of, not_shareable
from so_tui.plan.search import compact_states, rate, with_micro_batch, with_policy
from so_tui.spec.attention import MASKED_BACKENDS
from so_tui.spec.model_table import layer_kinds, mixing_kinds
from so_tui.spec.run_spec import Mode, RunSpec, is_indexer


def blockers(spec: RunSpec, resources: Resources) -> Iterator[Blocker]:
    """Yield why ``spec`` can never run on these resources, whatever the memory."""
    machine, offload = resources.machine, spec.offload
    if amd := next(
        (gpu for gpu in machine.gpus if gpu.vendor == "amd" and not gpu.shares_memory), None
    ):
        yield AmdGpu(gpu=amd.index, name=amd.name)
    if not machine.gpus and offload.mode == "gpu":
        yield ModeNeedsGpu(machine=machine.label)
    if not machine.gpus and offload.mode == "superoffload" and offload.engine == "deepspeed":
        yield EngineNeedsGpu()
    if (not_shared := not_shareable(spec, resources)) is not None:
        yield not_shared
    if resources.problem:
        yield resources.problem


def choices(given: RunSpec, chosen: Assessment, tried: Sequence[Assessment]) -> Iterator[Choice]:
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


def _offload_choice(given: RunSpec, chosen: Assessment) -> Choice:
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
    """Return why settings are preferred to others that are about as fast and planned to be faster;
    None where they are not.
    """
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


_COLLECTIVES = 3
"""For each micro-batch: weights are all-gathered for forward and for backward, and gradients are
reduced.
"""


def across_hosts(found: Assessment) -> Iterator[AcrossHosts]:
    """Yield what travels between the hosts of a run in a step, and how long that takes; nothing for
    one host.
    """
    target, layout = found.target, found.layout
    if target.hosts == 1:
        return
    times = _COLLECTIVES * found.spec.gradient_accumulation_steps
    gathered = 2 * layout.parameters * (layout.ranks - 1) // layout.ranks
    model = step_model(found.placement, target)
    longer_s = None
    if model:
        on_one_host = dataclasses.replace(model, between_hosts_bytes_per_s=None)
        longer_s = model.step_time().total_s - on_one_host.step_time().total_s
    yield AcrossHosts(
        machines=target.hosts,
        ranks=layout.ranks,
        bytes_per_step=times * gathered,
        network=target.resources.network,
        seconds=times * model.all_gather_s if model else None,
        longer_s=longer_s,
    )


GPU_HOURS_BETWEEN_FAILURES = 50_000
"""Hours that one GPU with its share of a host runs, on average, until something ends the run.
Meta's training of Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs.
"""
DISK_BYTES_PER_S = 1e9
"""Rate at which a shared file system takes a checkpoint, until one has been measured."""
_USUAL_MINUTES = 60.0


def _best_interval_s(cost_s: float, failure_s: float) -> float:
    """Return the seconds of training between checkpoints that lose the least time, by Daly's
    formula of higher order.

    Args:
        cost_s: How long training stands still for a checkpoint.
        failure_s: Mean time between failures of the whole run.
    """
    if cost_s >= 2 * failure_s:
        return failure_s
    share = cost_s / (2 * failure_s)
    return math.sqrt(2 * cost_s * failure_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def checkpoint_interval(found: Assessment) -> Iterator[CheckpointInterval]:
    """Yield the best interval for a run that a failure would cost much: in a job, on several hosts,
    or longer than the interval.
    """
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
    interval_s = max(_best_interval_s(pause_s, failure_s), write_s)
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


_FOLDERS = ("/", "./", "../", "~")
"""How the id of a model begins that is a folder."""
_SLOW_LINK_BYTES_PER_S = 100e9
_SLOW_ON_CPU = 1_000_000_000
_NOTICEABLE_ATTENTION = 0.1
"""Share of a step that a package is worth installing for."""
_NOTICEABLE = 0.03
"""Share of a step that a smaller ratio must save to be mentioned."""


def cautions(spec: RunSpec, found: Assessment, *, searched: bool = False) -> Iterator[Caution]:
    """Yield what runs others' code, costs time or cannot be foreseen.

    Args:
        spec: As the user gave it.
        found: The spec with its mode decided, assessed.
        searched: Whether it is the fastest that a search found.
    """
    resources, offload = found.target.resources, found.spec.offload
    if any(gpu.vendor == "amd" for gpu in resources.machine.gpus):
        yield NeverRun(name=resources.gpu_name)
        if offload.mode == "superoffload" and offload.engine == "deepspeed":
            yield DeepSpeedNvidiaOnly()
    if spec.model.trust_remote_code:
        in_folder = spec.model.id.startswith(_FOLDERS)
        yield RemoteCode(model=spec.model.id, revision="" if in_folder else spec.model.revision)
    if 0 < spec.model.positions < spec.data.sequence_length:
        yield BeyondPositions(
            sequence_length=spec.data.sequence_length, positions=spec.model.positions
        )
    indexers = sum(
        block.repeat * prod(tensor.shape)
        for block in spec.model.parameters
        for tensor in block.tensors
        if is_indexer(tensor.name)
    )
    if indexers:
        yield IndexersUntrained(parameters=indexers)
    if (
        offload.mode == "superoffload"
        and offload.engine == "deepspeed"
        and spec.train.gradient_clipping > 0
    ):
        yield _clipping(found)
    if offload.mode != "gpu" and resources.has_gpu:
        if not searched:
            yield from _needless_offload(found)
        if (
            offload.ratio
            and resources.speed is not None
            and resources.speed.d2h_bytes_per_s < _SLOW_LINK_BYTES_PER_S
        ):
            yield PcieOffload()
    yield from _faster_states(found)
    yield from _faster_attention(found)
    if resources.gpu_memory_unknown:
        yield GpuMemoryUnknown()
    if not resources.has_gpu and found.layout.parameters > _SLOW_ON_CPU:
        yield SlowWithoutGpu(parameters=found.layout.parameters)
    if (
        not spec.data.packing
        and attention_of(found.spec, found.target.profile, resources).backend in MASKED_BACKENDS
    ):
        useful = found.target.workload.useful_share / found.target.workload.row_share(
            spec.train.micro_batch
        )
        mixing = mixing_kinds(layer_kinds(spec.model.config))
        yield PackingOff(padding_share=1 - useful if useful < 1 else None, mixing=mixing)
    yield from (Note(text=note) for note in resources.machine.notes)


def _clipping(found: Assessment) -> ClippingWaits:
    train = replace(found.spec.train, gradient_clipping=0.0)
    unclipped = assess(replace(found.spec, train=train), found.target)
    return ClippingWaits(
        seconds=found.step.total_s - unclipped.step.total_s
        if found.step and unclipped.step
        else None
    )


def _faster_states(found: Assessment) -> Iterator[FasterStates]:
    """Yield the most exact smaller format of the moments that is about as fast as the fastest,
    where that makes steps much faster.

    A format takes no time of its own in a plan: it leaves memory to second states, which hide what
    the optimizer adds to a step.
    """
    step = found.step
    if found.verdict == "does not fit" or step is None:
        return
    all_hidden_s = step.total_s - step.exposed_optimizer_s
    if not surely_faster(1 / all_hidden_s, 1 / step.total_s):
        return
    others = [assess(alternative.spec, found.target) for alternative in compact_states(found.spec)]
    fitting = [other for other in others if other.verdict == "fits"]
    fastest = max(map(rate, fitting), default=0.0)
    if not surely_faster(fastest, rate(found)):
        return
    chosen = next(
        other
        for other in fitting
        if about_as_fast(rate(other), fastest) and surely_faster(rate(other), rate(found))
    )
    if chosen.step is not None:
        yield FasterStates(
            states=chosen.spec.offload.states,
            step_s=chosen.step.total_s,
            given_step_s=step.total_s,
            early_share=chosen.placement.early_share,
            given_early_share=found.placement.early_share,
        )


def _faster_attention(found: Assessment) -> Iterator[FasterAttention]:
    """Yield the fastest attention backend that is not installed, where it would make steps
    noticeably faster.
    """
    chosen = attention_of(found.spec, found.target.profile, found.target.resources)
    missing = next(
        (passed.backend for passed in chosen.passed_over if passed.obstacle == "not-installed"),
        None,
    )
    if missing is None or found.step is None:
        return
    model = replace(found.spec.model, attention=missing)
    other = assess(replace(found.spec, model=model), found.target)
    if (
        other.step
        and found.step.total_s - other.step.total_s > _NOTICEABLE_ATTENTION * found.step.total_s
    ):
        yield FasterAttention(
            backend=missing,
            used=chosen.backend,
            step_s=other.step.total_s,
            given_step_s=found.step.total_s,
        )


def _needless_offload(found: Assessment) -> Iterator[FasterOffload]:
    """Yield the smaller ratio that fits too, where the CPU does noticeable work for which the GPU
    has memory.
    """
    smaller = best(found.spec, found.target)
    if (
        found.verdict == "does not fit"
        or smaller.verdict != "fits"
        or not smaller.step
        or not found.step
    ):
        return
    if found.step.total_s - smaller.step.total_s > _NOTICEABLE * found.step.total_s:
        offload = smaller.spec.offload
        yield FasterOffload(
            mode=cast(Mode, offload.mode),
            ratio=offload.ratio,
            step_s=smaller.step.total_s,
            given_step_s=found.step.total_s,
        )
