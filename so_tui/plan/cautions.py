"""What is worth knowing of a plan: what runs others' code, costs time or cannot be foreseen. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import cast

from msgspec.structs import replace

from so_tui.plan.accuracy import about_as_fast, surely_faster
from so_tui.plan.alternatives import compact_states
from so_tui.plan.attention import attention_of
from so_tui.plan.facts.cautions import (
    BeyondPositions,
    Caution,
    ClippingWaits,
    DeepSpeedNvidiaOnly,
    FasterAttention,
    FasterOffload,
    FasterStates,
    GpuMemoryUnknown,
    IndexersUntrained,
    NeverRun,
    Note,
    PackingOff,
    PcieOffload,
    RemoteCode,
    SlowWithoutGpu,
)
from so_tui.plan.fastest_ratio import rate
from so_tui.plan.fit import Assessment, assess, best
from so_tui.spec.attention import MASKED_BACKENDS
from so_tui.spec.layers import layer_kinds, mixing_kinds
from so_tui.spec.sections.offload import Mode
from so_tui.spec.sections.parameters import is_indexer
from so_tui.spec.types import RunSpec

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
    if indexers := _indexer_parameters(spec):
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


def _indexer_parameters(spec: RunSpec) -> int:
    return sum(
        block.repeat * prod(tensor.shape)
        for block in spec.model.parameters
        for tensor in block.tensors
        if is_indexer(tensor.name)
    )


def _clipping(found: Assessment) -> ClippingWaits:
    train = replace(found.spec.train, gradient_clipping=0.0)
    unclipped = assess(replace(found.spec, train=train), found.target)
    return ClippingWaits(
        seconds=found.step.total_s - unclipped.step.total_s
        if found.step and unclipped.step
        else None
    )


def _faster_states(found: Assessment) -> Iterator[FasterStates]:
    """Yield the most exact smaller format of the moments that is about as fast as the fastest, where that makes steps much faster.

    A format takes no time of its own in a plan: it leaves memory to second states, which hide what the optimizer adds to a step.
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
    """Yield the fastest attention backend that is not installed, where it would make steps noticeably faster."""
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
    """Yield the smaller ratio that fits too, where the CPU does noticeable work for which the GPU has memory."""
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
