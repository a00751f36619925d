"""What would make a run fit that does not, leave the margin where it is tight, or need less memory
after that ran out. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from so_tui.model.profile import profile_of
from so_tui.model.sharding import moments_bytes
from so_tui.plan.fit import Assessment, Target, assess, best, in_mode
from so_tui.plan.gpu_memory import memory_terms
from so_tui.plan.notes import (
    AdvicePool,
    Change,
    CompactStatesFit,
    FitsHere,
    LargerHostFits,
    MemoryAdvice,
    MemorySaving,
    MoreGpusFit,
    MoreGpusKeepMargin,
    MoreMachinesFit,
    OtherMachineNeeded,
    Remedy,
)
from so_tui.plan.placement import Placement
from so_tui.plan.plan import OptionalMemory, Plan
from so_tui.plan.resources import more_sharing, not_shareable, rank_counts, usable_bytes
from so_tui.plan.search import (
    SEARCHED,
    Search,
    alternatives,
    best_settings,
    changes_of,
    compact_states,
    decided_settings,
    less_speculation,
    memory_savings,
    released,
    shorter_sequences,
    smaller_activations,
    smaller_batches,
    weights_on_host,
    with_policy,
)
from so_tui.plan.step_time import second_states
from so_tui.spec.errors import InputError
from so_tui.spec.run_spec import RunSpec

LARGE_GRACE_BYTES = 480_000_000_000
"""Host memory of the larger GH200 part."""
MOST_HOSTS = 16


def remedies(spec: RunSpec, target: Target, *, searched: bool) -> Iterator[Remedy]:
    """Yield what would make a run fit that does not, the least painful first.

    Args:
        spec: As the user gave it.
        target: Where it does not fit.
        searched: Whether a search has found that nothing fits here with what a person set.
    """
    here = _fitting_otherwise if searched else _fitting_here
    if (fitting := here(spec, target)) is not None:
        yield fitting
        if not searched:
            return
    yield from _fitting_with_compact_states(spec, target)
    if not target.resources.has_gpu:
        yield OtherMachineNeeded()
    elif larger := next(_fitting_on_more_gpus(spec, target), None):
        yield larger
    else:
        yield from _fitting_when_shorter(spec, target, searched=searched)
        yield from _fitting_elsewhere(spec, target)


def _fitting_otherwise(spec: RunSpec, target: Target) -> FitsHere | None:
    """Return other values of what a person set with which it fits on the same GPUs, the rest as it
    is chosen then. The format of the states stays.
    """
    keys = {key for key in SEARCHED if key in spec.fixed and key != "offload.states"}
    if not keys:
        return None
    found = best_settings(released(spec, keys), target).best
    changes = tuple(each for each in changes_of(spec, found.spec) if each.key in keys)
    return FitsHere(changes=changes) if found.fits and changes else None


def _fitting_here(spec: RunSpec, target: Target) -> FitsHere | None:
    """Return the keys to change with which it fits on the same GPUs, those that a person set
    included.
    """
    spec = msgspec.structs.replace(spec, fixed=())
    for alternative in less_speculation(spec, "auto"):
        if assess(alternative, target).fits:
            return FitsHere(changes=changes_of(spec, alternative))
    if (here := best(spec, target)).fits:
        before, after = spec.offload, here.spec.offload
        changes = [Change("offload.mode", before.mode, after.mode)]
        if after.mode != "gpu":
            changes.append(Change("offload.ratio", before.ratio, after.ratio))
        return FitsHere(changes=tuple(changes))
    full = with_policy(spec, "full")
    for other in (full, *memory_savings(full)):
        if (found := best(other, target)).fits:
            return _least_change(spec, target, found, other)
    recomputing = _recomputing(spec)
    if (smaller := _fitting_batch(recomputing, target)) is not None:
        return _least_change(spec, target, smaller)
    # The fewest ranks for each sequence with which it fits, at the smallest micro-batch.
    *_, smallest = recomputing, *smaller_batches(recomputing, exact=True)
    for shared in more_sharing(smallest):
        if not_shareable(shared, target.resources):
            return None
        if (found := best(shared, target)).fits:
            return _least_change(spec, target, found, shared)
    return None


def _least_change(
    spec: RunSpec,
    target: Target,
    found: Assessment,
    *proposed: RunSpec,
    search: Search = decided_settings,
) -> FitsHere:
    """Return the fewest keys with which the plan of a spec fits, since it decides the rest itself.

    Args:
        spec: As the user gave it.
        target: Where it does not fit.
        found: What fits there.
        proposed: What to name if that suffices; by default batch and length, then also ``full``.
        search: How the plan is made.
    """
    alone = msgspec.structs.replace(spec, train=found.spec.train, data=found.spec.data)
    others = proposed or (alone, with_policy(alone, "full"))
    moved = (in_mode(other, found.mode, found.spec.offload.ratio) for other in others)
    for other in (*others, *moved):
        if search(other, target).best.fits:
            return FitsHere(changes=changes_of(spec, other))
    return FitsHere(changes=changes_of(spec, found.spec))


def _fitting_with_compact_states(spec: RunSpec, target: Target) -> Iterator[CompactStatesFit]:
    """Yield the most exact format of the moments with which it fits on the same GPUs, where fp32
    moments do not.
    """
    for alternative in compact_states(spec):
        found, states = best(alternative, target), alternative.offload.states
        if found.fits:
            each = moments_bytes(spec.offload.states) - moments_bytes(states)
            yield CompactStatesFit(
                states=states,
                saved_bytes=int(each * found.placement.layout.cpu_numel) * target.resources.ranks,
            )
            return


def _recomputing(spec: RunSpec) -> RunSpec:
    """Return the spec with the recomputation that takes the least memory, and with what saves some
    beside it.
    """
    recomputing = with_policy(spec, "full")
    return [recomputing, *smaller_activations(recomputing)][-1]


def _fitting_when_shorter(spec: RunSpec, target: Target, *, searched: bool) -> Iterator[FitsHere]:
    """Yield the longest sequences that would fit, where activations are what does not."""
    for alternative in shorter_sequences(_recomputing(spec)):
        found = best(alternative, target)
        moved = (best(other, target) for other in weights_on_host(alternative))
        for fitting in (found, *moved):
            if fitting.fits:
                search = best_settings if searched else decided_settings
                yield _least_change(spec, target, fitting, search=search)
                return
        apart = not target.resources.supply.one_memory and not found.spec.model.offloads_inputs
        if apart and found.worst and found.worst.pool != "gpu":
            return  # sequences take no host memory


def _fitting_batch(spec: RunSpec, target: Target) -> Assessment | None:
    """Return the largest smaller micro-batch that fits with the same tokens in a step, else the
    largest that is tight.
    """
    tight = None
    for alternative in smaller_batches(spec, exact=True):
        found = best(alternative, target)
        if found.verdict == "fits":
            return found
        if found.verdict == "tight":
            tight = tight or found
    return tight


def _fits_split(spec: RunSpec, target: Target) -> tuple[bool, int | None]:
    """Return whether ``spec`` fits on a target, and the smaller micro-batch with which it does
    where the given one is too large.
    """
    if best(spec, target).fits:
        return True, None
    smaller = _fitting_batch(spec, target)
    return (False, None) if smaller is None else (True, smaller.spec.train.micro_batch)


def _larger_targets(spec: RunSpec, target: Target) -> Iterator[tuple[RunSpec, Target]]:
    """Yield the spec on more GPUs of the machine, up to all of them."""
    for count in rank_counts(target.resources.machine) if target.resources.has_gpu else ():
        if count > spec.ranks_per_host:
            larger = msgspec.structs.replace(spec, gpus=count)
            yield larger, target.on(larger)


def _fitting_on_more_gpus(spec: RunSpec, target: Target) -> Iterator[MoreGpusFit]:
    for larger_spec, larger in _larger_targets(spec, target):
        fits, micro_batch = _fits_split(larger_spec, larger)
        if fits:
            yield MoreGpusFit(gpus=larger.resources.ranks, micro_batch=micro_batch)


def gpus_with_margin(spec: RunSpec, target: Target) -> Iterator[MoreGpusKeepMargin]:
    """Yield the fewest GPUs of the machine on which a spec that is tight here leaves the margin."""
    for larger_spec, larger in _larger_targets(spec, target):
        if best(larger_spec, larger).verdict == "fits":
            yield MoreGpusKeepMargin(gpus=larger.resources.ranks)
            return


def _fitting_elsewhere(spec: RunSpec, target: Target) -> Iterator[Remedy]:
    """Yield the machines that would fit the run: GH200 parts with more host memory, or several
    machines like this one.
    """
    counts = range(target.hosts + 1, MOST_HOSTS + 1)
    most = max(rank_counts(target.resources.machine))
    whole = target.on(msgspec.structs.replace(spec, gpus=most))
    supply = whole.resources.supply
    least = min(supply.node_bytes.values(), default=0)
    if "GH200" in target.resources.gpu_name and least < LARGE_GRACE_BYTES / 2:
        roomy = msgspec.structs.replace(
            supply, node_bytes=dict.fromkeys(supply.node_bytes, usable_bytes(LARGE_GRACE_BYTES))
        )
        larger = replace(whole, resources=replace(whole.resources, supply=roomy))
        fits, micro_batch = _fits_split(spec, larger)
        if fits:
            yield LargerHostFits(
                gpus=whole.ranks,
                host_bytes=LARGE_GRACE_BYTES,
                needs_bytes=max(best(spec, larger).demand.node_bytes.values(), default=0),
                micro_batch=micro_batch,
            )

    def hosts(count: int) -> Target:
        return replace(whole, hosts=count)

    # The more machines share a model, the less each of them holds, so the fewest are found by
    # bisection.
    found = bisect_left(counts, True, key=lambda count: _fits_split(spec, hosts(count))[0])
    if found < len(counts):
        shared = hosts(counts[found])
        yield MoreMachinesFit(
            machines=counts[found], gpus=shared.ranks, micro_batch=_fits_split(spec, shared)[1]
        )


_MOST_SAVINGS = 3
_LEAST_BYTES = 2**20
"""Savings below this are not proposed."""


def memory_advice(spec: RunSpec, pool: AdvicePool, plan: Plan | None = None) -> MemoryAdvice:
    """Return what would need less memory, for a run that ran out of it and whose mode is decided.

    Args:
        spec: The run's.
        pool: The memory of which it had too little; where CPU and GPU have one memory, it does not
            matter which of them asked.
        plan: Its plan, which says what it had to give.
    """
    one_memory = plan is not None and plan.one_memory
    sides: tuple[AdvicePool, ...] = ("gpu", "node") if one_memory else (pool,)
    pool = "node" if one_memory else pool
    spared = list(_without_optional(spec, plan.optional)) if plan and pool == "node" else []
    try:
        now = _bytes(spec, pool, one_memory)
        found = [
            MemorySaving(
                changes=changes_of(spec, other), saves_bytes=now - _bytes(other, pool, one_memory)
            )
            for side in sides
            for other in alternatives(spec, side)
        ]
    except InputError:  # without a parameter table nothing can be said about a model's memory
        found = []
    savings = tuple(saving for saving in (*spared, *found) if saving.saves_bytes >= _LEAST_BYTES)
    return MemoryAdvice(pool=pool, savings=savings[:_MOST_SAVINGS])


def _without_optional(spec: RunSpec, optional: OptionalMemory) -> Iterator[MemorySaving]:
    """Yield what a run saves without copies, and without second states where the plan chose
    them.
    """
    if size := optional.copies_bytes:
        off = Change("checkpoint.background", "true", "false")
        yield MemorySaving(changes=(off,), saves_bytes=size)
    if (size := optional.second_states_bytes) and spec.offload.speculation == "auto":
        off = Change("offload.speculation", "auto", "off")
        yield MemorySaving(changes=(off,), saves_bytes=size)


def _bytes(spec: RunSpec, pool: AdvicePool, one_memory: bool) -> int:
    profile = profile_of(spec.model)
    placement = Placement(
        spec=spec,
        profile=profile,
        layout=profile.layout(spec.ranks, spec.offload),
        local_ranks=spec.ranks_per_host,
        one_memory=one_memory,
    )
    second = second_states(placement, lambda: 0)
    terms = (*memory_terms(placement), *([second.term] if second else ()))
    return sum(term.bytes for term in terms if term.location == pool and term.rank is None)
