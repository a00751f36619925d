"""The settings that are tried for a run, and the best of those that fit. Pure functions.

Tried are: where the states live (without offload, else SuperOffload at the smallest ratio that leaves the margin; what is chosen also at
larger ones), what is recomputed, how an optimizer step is split into micro-batches, and, where nothing fits, feed-forward blocks in tiles,
layer inputs and weights on the host, and ranks that share sequences; attention's results on the host also where that is faster. The tokens
of an optimizer step and the sequence length stay as given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace

from so_tui.model.activations import POLICIES, TILED_POLICIES, Policy, offloads_results, policy_of
from so_tui.plan.accuracy import about_as_fast, clearly_faster
from so_tui.plan.alternatives import (
    batch_splits,
    memory_savings,
    results_on_host,
    with_micro_batch,
    with_policy,
)
from so_tui.plan.facts.cautions import LargerSteps
from so_tui.plan.fastest_ratio import at_fastest_ratio, rate
from so_tui.plan.fit import Assessment, Candidates, Target, assess, best, step_with
from so_tui.plan.sequence_parallel import more_sharing, not_shareable
from so_tui.plan.types import Verdict
from so_tui.spec.types import RunSpec

_T = TypeVar("_T")
CORE_FRACTIONS = (0.7, 0.8, 0.9)
_ORDER: dict[Verdict, int] = {"fits": 0, "tight": 1, "does not fit": 2}
_LONG_WAIT = 0.3
"""Share of a step that waits for the optimizer, from which larger steps are tried."""
_LARGER = 4
"""How many times the tokens of a step are tried then."""
_WORTHWHILE = 1.2
"""Least gain in tokens per second for which they are proposed."""


def best_settings(spec: RunSpec, target: Target) -> tuple[Assessment, tuple[Assessment, ...]]:
    """Return the best settings for ``spec``, and everything that was tried, fastest first.

    What fits with a margin comes before what is tight, and that before what does not fit; then the most tokens per second. Of settings that
    are about as fast as the fastest, the simplest and safest are the best.
    """
    found = _best_as_shared(spec, target)
    for shared in more_sharing(spec):
        if found[0].verdict == "fits" or not_shareable(shared, target.resources):
            break
        other = _best_as_shared(shared, target)
        found = other if _ORDER[other[0].verdict] < _ORDER[found[0].verdict] else found
    return found


def _best_as_shared(spec: RunSpec, target: Target) -> tuple[Assessment, tuple[Assessment, ...]]:
    """Return the same with as many ranks sharing each sequence as the spec says."""
    found = or_with_less_memory(
        spec, _best_of_variants(spec, target), lambda other: _best_of_variants(other, target)
    )
    other = or_faster_on_host(spec, found, lambda other: _best_of_variants(other, target))
    return (other[0], _best_first((*other[1], *found[1]))) if other is not found else found


def or_with_less_memory(
    spec: RunSpec, found: tuple[Assessment, _T], find: Callable[[RunSpec], tuple[Assessment, _T]]
) -> tuple[Assessment, _T]:
    """Return what was found for a spec, or what is found with feed-forward tiles, layer inputs on the host, weights there, or several.

    Each is tried only where nothing fits before, and taken only where it helps.

    Args:
        spec: As given.
        found: The best without, and what belongs to it.
        find: Finds the same for another spec.
    """
    if not found[0].target.resources.has_gpu:
        return found
    for saving in memory_savings(spec):
        if found[0].verdict == "fits":
            break
        if saving.offload != spec.offload and all(
            shortage.pool != "gpu" for shortage in found[0].shortages
        ):
            break  # weights on the host take more of what is short
        other = find(saving)
        found = other if _ORDER[other[0].verdict] < _ORDER[found[0].verdict] else found
    return found


def or_faster_on_host(
    spec: RunSpec, found: tuple[Assessment, _T], find: Callable[[RunSpec], tuple[Assessment, _T]]
) -> tuple[Assessment, _T]:
    """Return what was found for a spec, or what is found with attention's results on the host, where that is faster.

    It is where they have no room on the GPU, so that attention would be computed again, or where they would drive states to the host whose
    steps nothing hides. Arguments as for ``or_with_less_memory``.
    """
    resources = found[0].target.resources
    if (
        found[0].verdict != "fits"
        or not resources.has_gpu
        or resources.supply.one_memory
        or not rate(found[0])
    ):
        return found
    policy = policy_of(found[0].spec.model)
    if policy not in TILED_POLICIES or (
        policy == "attention" and found[0].spec.offload.mode == "gpu"
    ):
        return found
    for keeping in results_on_host(spec, found[0].spec):
        other = find(keeping)
        if (
            other[0].verdict == "fits"
            and offloads_results(other[0].spec.model)
            and clearly_faster(rate(other[0]), rate(found[0]))
        ):
            found = other
    return found


def _best_first(tried: Sequence[Assessment]) -> tuple[Assessment, ...]:
    return tuple(sorted(tried, key=lambda found: (_ORDER[found.verdict], -rate(found))))


def _best_of_variants(spec: RunSpec, target: Target) -> tuple[Assessment, tuple[Assessment, ...]]:
    """Return the same of what differs in mode, ratio, recomputation and micro-batch alone."""
    variants = _Variants(spec, target)
    least_memory = _least_memory(variants)
    nothing_fits = all(found.verdict == "does not fit" for found in least_memory)
    if nothing_fits or target.resources.speed is None or target.resources.gpu_memory_unknown:
        tried = sorted([best(spec, target), *least_memory], key=lambda found: _ORDER[found.verdict])
        return tried[0], tuple(tried)
    tried = [*_tried(variants)]
    if "full" in policies(spec, target) or all(found.verdict == "does not fit" for found in tried):
        tried += least_memory
    ordered = _best_first(tried)
    return _simplest(spec, ordered), ordered


class _Variants:
    """A spec with other micro-batches and other recomputation. Each variant is assessed once."""

    def __init__(self, spec: RunSpec, target: Target) -> None:
        self.spec, self.target = spec, target
        self._known: dict[tuple[Policy, int], Candidates] = {}

    def of(self, policy: Policy, micro_batch: int) -> Candidates:
        key = (policy, micro_batch)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = Candidates(
                with_policy(with_micro_batch(self.spec, micro_batch), policy), self.target
            )
        return found


def fastest_policy(spec: RunSpec, target: Target) -> Assessment:
    """Return a spec whose mode and ratio are decided, with the fastest recomputation where it is left open."""
    found = [assess(with_policy(spec, policy), target) for policy in policies(spec, target)]
    return min(found, key=lambda found: (_ORDER[found.verdict], -rate(found)))


def policies(spec: RunSpec, target: Target) -> tuple[Policy, ...]:
    """Return the recomputation to try: the given one; all where it is left open and speeds are known; else ``full``."""
    given = spec.model.activation_checkpointing
    if given != "auto":
        return (given,)
    if target.resources.speed is None:
        return ("full",)
    if spec.model.tiled_mlp == "on" and spec.model.activation_offload != "attention":
        return TILED_POLICIES
    if spec.model.activation_offload == "attention":
        return ("attention",)
    return (
        tuple(policy for policy in POLICIES if policy != "none")
        if spec.model.activation_offload in ("on", "inputs")
        else POLICIES
    )


def with_fitting_cores(chosen: Assessment, target: Target) -> RunSpec:
    """Return the spec with the smallest share of cores for CPU Adam that makes no step longer: the training process can use the others."""
    spec = chosen.spec
    if (
        spec.offload.mode != "superoffload"
        or not spec.offload.ratio
        or target.resources.speed is None
        or target.resources.problem
    ):
        return spec
    found = []
    for fraction in sorted({*CORE_FRACTIONS, spec.offload.cpu_adam_cores_fraction}):
        varied = replace(spec, offload=replace(spec.offload, cpu_adam_cores_fraction=fraction))
        step = step_with(chosen, varied, target.on(target.resources.gpus, fraction))
        if step is not None:
            found.append((step.total_s, varied))
    quickest = min((seconds for seconds, _ in found), default=0.0)
    return next((varied for seconds, varied in found if seconds <= 1.002 * quickest), spec)


def _least_memory(variants: _Variants) -> list[Assessment]:
    """Assess what takes the least memory: on the GPU the smallest micro-batch; on the host the largest, with fewest gradients to sum."""
    sizes = batch_splits(variants.spec)
    return [
        variants.of("full", size).best
        for size in dict.fromkeys((sizes[0], variants.spec.train.micro_batch, sizes[-1]))
    ]


def _tried(variants: _Variants) -> Iterator[Assessment]:
    for policy in policies(variants.spec, variants.target):
        for micro_batch in batch_splits(variants.spec):
            variant = variants.of(policy, micro_batch)
            if variant.on_gpu is not None:
                yield variant.on_gpu
                if variant.on_gpu.verdict == "fits":
                    continue
            yield variant.offloaded
            if any(
                shortage.fatal and shortage.pool == "gpu"
                for shortage in variant.offloaded.shortages
            ):
                break  # nor would a larger micro-batch


def _simplest(spec: RunSpec, tried: Sequence[Assessment]) -> Assessment:
    """Return the simplest and safest settings that are about as fast as the first, each at its fastest ratio.

    What does not offload comes first, then what keeps the given micro-batch, then what leaves twice the margin of each GPU (what offloads
    leaves as much as its ratio), then the fastest. The format of the states is always the given one.
    """
    fastest = at_fastest_ratio(spec, tried[0])

    def departures(found: Assessment) -> tuple[bool, bool, bool, float]:
        offloads = found.spec.offload.mode != "gpu"
        return (
            offloads,
            found.spec.train.micro_batch != spec.train.micro_batch,
            not (offloads or found.roomy),
            -rate(found),
        )

    alike = [
        found
        for found in tried
        if found.verdict == fastest.verdict and about_as_fast(rate(found), rate(fastest))
    ]
    chosen = min((tried[0], *alike), key=departures)
    return fastest if chosen is tried[0] else at_fastest_ratio(spec, chosen)


def larger_steps(given: RunSpec, chosen: Assessment) -> Iterator[LargerSteps]:
    """Yield what more tokens in a step would gain, where much of it waits for the optimizer. It changes training, so the user decides."""
    if (
        chosen.verdict != "fits"
        or not chosen.step
        or chosen.step.exposed_optimizer_s < _LONG_WAIT * chosen.step.total_s
    ):
        return
    larger, _ = best_settings(_with_more_tokens(given), chosen.target)
    if larger.verdict != "fits" or not larger.step or rate(larger) < _WORTHWHILE * rate(chosen):
        return
    sequences = (
        chosen.target.ranks
        // given.train.sequence_parallel
        * larger.spec.gradient_accumulation_steps
        * larger.spec.train.micro_batch
    )
    yield LargerSteps(
        step_s=chosen.step.total_s,
        exposed_optimizer_s=chosen.step.exposed_optimizer_s,
        times=_LARGER,
        tokens=given.data.sequence_length * sequences,
        key="train.tokens_per_step"
        if given.train.tokens_per_step
        else "train.gradient_accumulation",
        value=larger.spec.train.tokens_per_step or given.train.gradient_accumulation * _LARGER,
        faster=rate(larger) / rate(chosen),
    )


def _with_more_tokens(given: RunSpec) -> RunSpec:
    train = given.train
    if train.tokens_per_step:
        return replace(given, train=replace(train, tokens_per_step=_LARGER * train.tokens_per_step))
    return replace(
        given, train=replace(train, gradient_accumulation=_LARGER * train.gradient_accumulation)
    )
