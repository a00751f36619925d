"""Why a run can never start, why its settings were chosen, what follows from them, and what is
worth knowing. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter

from msgspec.structs import asdict

from so_tui.plan.fit import Assessment, assess, in_mode
from so_tui.plan.notes import (
    AcrossHosts,
    AdamCoresChosen,
    AllOnGpu,
    AmdGpu,
    BeyondPositions,
    Blocker,
    Caution,
    CheckpointingChosen,
    Choice,
    ClippingWaits,
    CompactStatesOption,
    DataFound,
    DeepSpeedNvidiaOnly,
    Dropout,
    DropoutOff,
    EngineNeedsGpu,
    FasterAttention,
    FasterRatio,
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
    SetByPerson,
    SlowWithoutGpu,
    SmallestRatio,
    SpeedUnknown,
    StatesChosen,
    Value,
)
from so_tui.plan.rates import about_as_fast, surely_faster
from so_tui.plan.resources import Resources, attention_of, not_shareable
from so_tui.plan.search import SEARCHED, compact_states, with_micro_batch, with_policy
from so_tui.plan.workload import seen
from so_tui.spec.attention import MASKED_BACKENDS
from so_tui.spec.model_table import dropouts, layer_kinds, mixing_kinds
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
    if not machine.gpus and offload.deepspeed_superoffload:
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
    resources, spec = chosen.target.resources, chosen.spec
    if not resources.has_gpu:
        yield ModeWithoutGpu(mode=chosen.mode)
        return
    if resources.problem:
        return
    if kept := _kept(chosen):
        yield SetByPerson(settings=kept)
    if spec.offload.states != given.offload.states:
        yield StatesChosen(states=spec.offload.states)
    mine = _settings(chosen)
    smallest = next((found for found in tried if _settings(found) == mine), chosen)
    if not spec.fixes("offload.ratio", "offload.mode"):
        yield _larger_ratio(chosen, smallest) or _offload_choice(chosen)
    if resources.speed is not None and not spec.fixes("model.activation_checkpointing"):
        yield _checkpointing_choice(chosen)
    if spec.train.micro_batch != given.train.micro_batch:
        yield _micro_batch_choice(given, chosen)
    if (shared := spec.train.sequence_parallel) != given.train.sequence_parallel:
        yield SequencesShared(ranks=shared, given=given.train.sequence_parallel)
    fraction, before = spec.offload.cpu_adam_cores_fraction, given.offload.cpu_adam_cores_fraction
    if fraction != before and spec.offload.ratio:
        yield AdamCoresChosen(
            adam_cores=resources.adam_cores,
            cores=resources.cores,
            fraction=fraction,
            raised=not fraction < before,
        )
    if resources.speed is None:
        yield SpeedUnknown()
        return
    # The next best that fits with a margin and differs in more than the ratio.
    others = (found for found in tried if found.verdict == "fits" and _settings(found) != mine)
    if (other := next(others, None)) is not None:
        yield NextBest(
            mode=other.mode,
            ratio=other.spec.offload.ratio,
            micro_batch=other.spec.train.micro_batch,
            policy=other.spec.model.policy,
            on_host=_on_host(other),
            slower=_slower(chosen, other),
            alike=about_as_fast(chosen.rate, other.rate),
            chosen_for=_preference(given, chosen, other),
            more_gpu_bytes=chosen.gpu_bytes_left - other.gpu_bytes_left,
        )
    elif not resources.gpu_memory_unknown:
        yield NoNextBest(fits=chosen.verdict == "fits")


def _larger_ratio(chosen: Assessment, smallest: Assessment) -> FasterRatio | None:
    ratio, least = chosen.spec.offload.ratio, smallest.spec.offload.ratio
    if chosen.mode == "gpu" or ratio <= least or not chosen.step or not smallest.step:
        return None
    return FasterRatio(
        ratio=ratio,
        step_s=chosen.step.total_s,
        smallest_ratio=least,
        smallest_step_s=smallest.step.total_s,
        alike=about_as_fast(chosen.rate, smallest.rate),
        more_gpu_bytes=chosen.gpu_bytes_left - smallest.gpu_bytes_left,
    )


def _kept(chosen: Assessment) -> tuple[tuple[str, Value], ...]:
    """Return what a person set of that on which memory and speed depend, with its values."""
    kept = ((key, attrgetter(key)(chosen.spec)) for key in chosen.spec.fixed if key in SEARCHED)
    return tuple((key, value) for key, value in kept if value != "auto")


def _offload_choice(chosen: Assessment) -> Choice:
    ratio = chosen.spec.offload.ratio
    if chosen.mode == "gpu":
        return AllOnGpu()
    if not ratio:
        return NothingOffloaded()
    if chosen.target.resources.gpu_memory_unknown:
        return LeastGpuMemory(ratio=ratio)
    return SmallestRatio(ratio=ratio, keeps_margin=chosen.verdict == "fits")


def _checkpointing_choice(chosen: Assessment) -> CheckpointingChosen:
    policy, step, full = chosen.spec.model.policy, chosen.step, None
    if step and policy != "full":
        full = assess(with_policy(chosen.spec, "full"), chosen.target).step
    if not step or not full or round(step.total_s, 2) == round(full.total_s, 2):
        return CheckpointingChosen(policy=policy)
    return CheckpointingChosen(policy=policy, step_s=step.total_s, full_step_s=full.total_s)


def _micro_batch_choice(given: RunSpec, chosen: Assessment) -> MicroBatchChosen:
    micro_batch, spec = given.train.micro_batch, chosen.spec
    mode: Mode = "gpu" if chosen.mode == "gpu" else "superoffload"
    before = assess(
        in_mode(with_micro_batch(spec, micro_batch), mode, spec.offload.ratio), chosen.target
    )
    return MicroBatchChosen(
        micro_batch=spec.train.micro_batch,
        accumulation=spec.gradient_accumulation_steps,
        given_micro_batch=micro_batch,
        given_shortage=before.worst,
        given_slower=_slower(chosen, before) if before.rate and not before.worst else None,
    )


def _preference(given: RunSpec, chosen: Assessment, other: Assessment) -> Preference | None:
    """Return why settings are preferred to others that are about as fast and planned to be faster;
    None where they are not.
    """
    if chosen.rate >= other.rate or not about_as_fast(chosen.rate, other.rate):
        return None
    if (chosen.mode == "gpu") != (other.mode == "gpu"):
        return "no-offload"
    kept, others = chosen.spec.train.micro_batch, other.spec.train.micro_batch
    return "given-micro-batch" if kept == given.train.micro_batch != others else "memory"


def _settings(found: Assessment) -> tuple[str, str, bool, int]:
    spec = found.spec
    checkpointing = spec.model.activation_checkpointing
    return found.mode, checkpointing, _on_host(found), spec.train.micro_batch


def _on_host(found: Assessment) -> bool:
    """Return whether what layers keep is in host memory, or a part of it."""
    return found.spec.model.offloads_inputs or found.spec.model.offloads_results


def _slower(chosen: Assessment, other: Assessment) -> float:
    """Return how much longer the other takes for the same tokens, as a share."""
    return chosen.rate / other.rate - 1


_COLLECTIVES = 3
"""For each micro-batch: weights are all-gathered for forward and for backward, and gradients are
reduced.
"""


def across_hosts(found: Assessment) -> Iterator[AcrossHosts]:
    """Yield what travels between the hosts of a run in a step, and how long that takes; nothing for
    one host.
    """
    target, model, ranks = found.target, found.model, found.target.ranks
    if target.hosts == 1:
        return
    times = _COLLECTIVES * found.spec.gradient_accumulation_steps
    seconds = longer_s = None
    if model:
        seconds = times * model.all_gather_s
        on_one_host = dataclasses.replace(model, between_hosts_bytes_per_s=None)
        longer_s = model.step_time().total_s - on_one_host.step_time().total_s
    yield AcrossHosts(
        machines=target.hosts,
        ranks=ranks,
        bytes_per_step=times * (2 * target.profile.parameters * (ranks - 1) // ranks),
        network=target.resources.network,
        seconds=seconds,
        longer_s=longer_s,
    )


_FOLDERS = ("/", "./", "../", "~")
"""How the id of a model begins that is a folder."""
_SLOW_LINK_BYTES_PER_S = 100e9
_SLOW_ON_CPU = 1_000_000_000
_NOTICEABLE_ATTENTION = 0.1
"""Share of a step that a package is worth installing for."""


def cautions(spec: RunSpec, found: Assessment) -> Iterator[Caution]:
    """Yield what runs others' code, costs time or cannot be foreseen.

    Args:
        spec: As the user gave it.
        found: The spec with its mode decided, assessed.
    """
    target, resources, offload = found.target, found.target.resources, found.spec.offload
    model, length = spec.model, spec.data.sequence_length
    if any(gpu.vendor == "amd" for gpu in resources.machine.gpus):
        yield NeverRun(name=resources.gpu_name)
        if offload.deepspeed_superoffload:
            yield DeepSpeedNvidiaOnly()
    if model.trust_remote_code:
        in_folder = model.id.startswith(_FOLDERS)
        yield RemoteCode(model=model.id, revision="" if in_folder else model.revision)
    if 0 < model.positions < length:
        yield BeyondPositions(sequence_length=length, positions=model.positions)
    indexers = sum(
        block.repeat * tensor.numel
        for block in model.parameters
        for tensor in block.tensors
        if is_indexer(tensor.name)
    )
    if indexers:
        yield IndexersUntrained(parameters=indexers)
    if asked := dropouts(model.config):
        yield DropoutOff(found=tuple(Dropout(*each) for each in asked.items()))
    if offload.deepspeed_superoffload and spec.train.gradient_clipping > 0:
        unclipped = assess(found.spec.changed("train", gradient_clipping=0.0), target).step
        waits = found.step.total_s - unclipped.total_s if found.step and unclipped else None
        yield ClippingWaits(seconds=waits)
    if offload.mode != "gpu" and resources.has_gpu:
        speed = resources.speed
        if offload.ratio and speed and speed.d2h_bytes_per_s < _SLOW_LINK_BYTES_PER_S:
            yield PcieOffload()
    yield from _compact_option(found)
    yield from _faster_attention(found)
    if resources.gpu_memory_unknown:
        yield GpuMemoryUnknown()
    if not resources.has_gpu and (parameters := target.profile.parameters) > _SLOW_ON_CPU:
        yield SlowWithoutGpu(parameters=parameters)
    if (known := seen(spec)) is not None:
        for kind, one in sorted(known.kinds.items()):
            yield DataFound(kind=kind, **asdict(one))
    masked = attention_of(found.spec, target.profile, resources).backend in MASKED_BACKENDS
    if masked and not spec.data.packing and spec.data.loss != "padded":
        rows = target.workload.row_share(spec.train.micro_batch)
        useful = target.workload.useful_share / rows
        mixing = mixing_kinds(layer_kinds(model.config))
        yield PackingOff(padding_share=1 - useful if useful < 1 else None, mixing=mixing)
    yield from (Note(text=note) for note in resources.machine.notes)


def _compact_option(found: Assessment) -> Iterator[CompactStatesOption]:
    """Yield the most exact smaller format of the moments that is about as fast as the fastest,
    where that makes steps much faster.

    A format takes no time of its own in a plan: it leaves memory to second states, which hide what
    the optimizer adds to a step.
    """
    step = found.step
    if not found.fits or step is None:
        return
    all_hidden_s = step.total_s - step.exposed_optimizer_s
    if not surely_faster(1 / all_hidden_s, 1 / step.total_s):
        return
    others = [assess(alternative, found.target) for alternative in compact_states(found.spec)]
    fitting = [other for other in others if other.verdict == "fits"]
    fastest = max((other.rate for other in fitting), default=0.0)
    for other in fitting:
        fast = about_as_fast(other.rate, fastest) and surely_faster(other.rate, found.rate)
        if fast and other.step:
            yield CompactStatesOption(
                states=other.spec.offload.states,
                step_s=other.step.total_s,
                given_step_s=step.total_s,
                early_share=other.placement.early_share,
                given_early_share=found.placement.early_share,
            )
            return


def _faster_attention(found: Assessment) -> Iterator[FasterAttention]:
    """Yield the fastest attention backend that is not installed, where it would make steps
    noticeably faster.
    """
    target, step = found.target, found.step
    chosen = attention_of(found.spec, target.profile, target.resources)
    absent = [backend for backend, why in chosen.passed_over if why == "not-installed"]
    if not absent or step is None:
        return
    missing = absent[0]
    other = assess(found.spec.changed("model", attention=missing), target).step
    if other and step.total_s - other.total_s > _NOTICEABLE_ATTENTION * step.total_s:
        yield FasterAttention(
            backend=missing, used=chosen.backend, step_s=other.total_s, given_step_s=step.total_s
        )
