"""The settings that are tried for a run, and the best of those that fit. Pure functions.

Tried are: where the states live (without offload, else SuperOffload at the smallest ratio that
leaves the margin; what is chosen also at larger ones), what is recomputed, how an optimizer step is
split into micro-batches, and, where nothing fits, feed-forward blocks in tiles, layer inputs and
weights on the host, and ranks that share sequences; attention's results on the host also where that
is faster. The tokens of an optimizer step and the sequence length stay as given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.model.profile import (
    MLP_TILE_TOKENS,
    POLICIES,
    TILED_POLICIES,
    Policy,
    offloads_results,
    policy_of,
    profile_of,
)
from so_tui.plan.fit import (
    RATIOS,
    Assessment,
    Candidates,
    Target,
    assess,
    best,
    in_mode,
    mode_without_gpu,
    step_with,
)
from so_tui.plan.notes import AutoMode, Change, LargerSteps
from so_tui.plan.plan import Verdict
from so_tui.plan.rates import about_as_fast, clearly_faster
from so_tui.plan.resources import more_sharing, not_shareable
from so_tui.plan.step_time import can_speculate
from so_tui.plan.workload import MICRO_BATCHES
from so_tui.spec.run_spec import ModelSpec, RunSpec, StatesFormat

# Changes of a spec that need less memory or split its steps differently: what the search tries and
# what advice proposes. Pure.
#
# Generators yield the smallest change first. Each alternative is relative to the spec that it was
# made from.


_FORMATS: tuple[StatesFormat, ...] = ("fp32", "bf16-moments", "int8-moments")
_ON_HOST: tuple[Literal["attention", "on"], ...] = ("attention", "on")
"""Where attention's results are kept, what may be in host memory: they alone, which takes the least
of it, or layer inputs too.
"""
SHORTEST = 512
"""Fewest tokens of a sequence that are proposed."""
ADVICE_RATIO_STEP = 0.2
"""By how much one piece of advice raises or lowers the offload ratio."""


class Alternative(Struct, frozen=True):
    """A spec that differs from another in a few keys."""

    changes: tuple[Change, ...]
    spec: RunSpec


def alternatives(spec: RunSpec, pool: Literal["gpu", "node"]) -> Iterator[Alternative]:
    """Yield the next step of each change that needs less GPU memory, or less host memory, of a spec
    whose mode is decided.
    """
    offload = spec.offload
    if pool == "gpu":
        yield from islice(smaller_batches(spec), 1)
        if spec.model.activation_checkpointing != "full":
            yield alternative_to(spec, with_policy(spec, "full"))
        if offload.mode == "gpu":
            yield _changed(spec, "offload", mode="superoffload", ratio=offload.ratio)
        elif offload.ratio < 1:
            larger = min(1.0, round(offload.ratio + ADVICE_RATIO_STEP, 2))
            yield _changed(spec, "offload", ratio=larger)
        savings = smaller_activations(spec) if offload.mode == "gpu" else memory_savings(spec)
        yield from (
            alternative_to(spec, other) for other in (*savings, *islice(more_sharing(spec), 1))
        )
        yield from islice(shorter_sequences(spec), 1)
    else:
        yield from less_speculation(spec, "off")
        if offload.mode != "gpu" and offload.ratio > 0:
            smaller = max(0.0, round(offload.ratio - ADVICE_RATIO_STEP, 2))
            yield _changed(spec, "offload", ratio=smaller)
        if offload.mode != "gpu" and spec.gradient_accumulation_steps > 1:
            # The sum of gradients over several micro-batches is stored on the host.
            yield _changed(spec, "train", gradient_accumulation=1, tokens_per_step=0)
        yield from compact_states(spec)


def smaller_batches(spec: RunSpec, *, exact: bool = False) -> Iterator[Alternative]:
    """Yield halved micro-batches with twice the accumulation; with ``exact`` only as long as the
    tokens of a step stay the same.
    """
    train = spec.train
    size, accumulation = train.micro_batch, train.gradient_accumulation
    while size > 1 and not (exact and size % 2):
        size //= 2
        if train.tokens_per_step:  # accumulation follows from the target
            yield _changed(spec, "train", micro_batch=size)
        else:
            accumulation *= 2
            yield _changed(spec, "train", micro_batch=size, gradient_accumulation=accumulation)


def _batch_splits(spec: RunSpec) -> tuple[int, ...]:
    """Return the micro-batches, ascending, that split the same step (nearly, where it is a target)
    into whole micro-batches.
    """
    train = spec.train
    sequences = train.micro_batch * spec.gradient_accumulation_steps
    if train.tokens_per_step:
        most = train.tokens_per_step / (spec.data.sequence_length * spec.replicas)
        return tuple(sorted({train.micro_batch, *(size for size in MICRO_BATCHES if size <= most)}))
    return tuple(
        sorted(
            {
                train.micro_batch,
                *(size for size in MICRO_BATCHES if size <= sequences and sequences % size == 0),
            }
        )
    )


def with_micro_batch(spec: RunSpec, micro_batch: int) -> RunSpec:
    """Return the spec with another micro-batch and the same sequences in a step."""
    train = spec.train
    if micro_batch == train.micro_batch:
        return spec
    accumulation = (
        train.gradient_accumulation
        if train.tokens_per_step
        else train.micro_batch * train.gradient_accumulation // micro_batch
    )
    return replace(
        spec, train=replace(train, micro_batch=micro_batch, gradient_accumulation=accumulation)
    )


def with_policy(spec: RunSpec, policy: Policy) -> RunSpec:
    """Return the spec with another activation checkpointing."""
    model = spec.model
    if model.activation_checkpointing == policy:
        return spec
    nothing_left = model.activation_offload == "attention" and policy != "attention"
    offload = "auto" if nothing_left else model.activation_offload
    return replace(
        spec, model=replace(model, activation_checkpointing=policy, activation_offload=offload)
    )


def memory_savings(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield a spec with feed-forward blocks in tiles, with what layers keep on the host, and with
    both, as far as it leaves them open.

    Where attention's results are kept, they are moved alone first. The same follow with weights on
    the host.
    """
    activations = tuple(smaller_activations(spec))
    yield from activations
    for each in (spec, *activations):
        yield from weights_on_host(each)


def smaller_activations(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield what ``memory_savings`` yields without moving weights."""
    model, policy = spec.model, spec.model.activation_checkpointing
    tiles = (
        {"tiled_mlp": "on"}
        if spec.micro_batch_tokens > MLP_TILE_TOKENS and _can_tile(model)
        else {}
    )
    ways: tuple[Literal["attention", "on"], ...] = ()
    if model.activation_offload == "auto" and policy != "none":
        ways = _ON_HOST if policy == "attention" else ("on",)
    hosts: list[dict[str, str]] = [{"activation_offload": way} for way in ways]
    for values in (tiles, *hosts, *({**tiles, **host} for host in hosts if tiles)):
        if values:
            yield replace(spec, model=replace(model, **values))


def _results_on_host(spec: RunSpec, found: RunSpec) -> Iterator[RunSpec]:
    """Yield a spec that keeps attention's results in host memory, where it leaves that open, then
    layer inputs too; both also with tiles.

    Args:
        spec: As given.
        found: The same with what was decided, whose tiles and weights on the host stay.
    """
    model, offload = spec.model, replace(spec.offload, parameters=found.offload.parameters)
    if model.activation_checkpointing not in (
        "auto",
        "attention",
    ) or model.activation_offload not in ("auto", "on", "attention"):
        return
    ways = _ON_HOST if model.activation_offload == "auto" else (model.activation_offload,)
    keeping = replace(model, activation_checkpointing="attention", tiled_mlp=found.model.tiled_mlp)
    tiles = ("on",) if spec.micro_batch_tokens > MLP_TILE_TOKENS and _can_tile(keeping) else ()
    for tiled in (keeping.tiled_mlp, *tiles):
        for way in ways:
            yield replace(
                spec,
                model=replace(keeping, activation_offload=way, tiled_mlp=tiled),
                offload=offload,
            )


def weights_on_host(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the spec with weights on the host, where it leaves them open and its optimizer can have
    them there.
    """
    offload = spec.offload
    if offload.parameters == "auto" and (
        offload.engine == "so-tui" or offload.mode == "zerooffload"
    ):
        yield replace(spec, offload=replace(offload, parameters="cpu"))


def _can_tile(model: ModelSpec) -> bool:
    recomputed = model.activation_checkpointing in ("auto", *TILED_POLICIES)
    return model.tiled_mlp == "auto" and recomputed and not profile_of(model).architecture.experts


def less_speculation(spec: RunSpec, instead: Literal["auto", "off"]) -> Iterator[Alternative]:
    """Yield second states as far as the host has memory, or none, where the spec asks for them
    whatever the host has.
    """
    if can_speculate(spec) and spec.offload.speculation == "on":
        yield _changed(spec, "offload", speculation=instead)


def compact_states(spec: RunSpec) -> Iterator[Alternative]:
    """Yield smaller formats of the moments in host memory, where our engine has them there."""
    offload = spec.offload
    if offload.mode in ("auto", "superoffload") and offload.engine == "so-tui":
        for states in _FORMATS[_FORMATS.index(offload.states) + 1 :]:
            yield _changed(spec, "offload", states=states)


def shorter_sequences(spec: RunSpec) -> Iterator[Alternative]:
    """Yield halved sequence lengths."""
    length = spec.data.sequence_length // 2
    while length >= SHORTEST:
        yield _changed(spec, "data", sequence_length=length)
        length //= 2


def alternative_to(before: RunSpec, after: RunSpec) -> Alternative:
    """Return a spec as an alternative to another that differs in what its activations take."""
    keys = {
        "offload": ("parameters",),
        "model": ("activation_checkpointing", "tiled_mlp", "activation_offload"),
        "train": ("micro_batch", "sequence_parallel", "gradient_accumulation"),
    }
    values = [
        Change(
            f"{section}.{key}",
            getattr(getattr(before, section), key),
            getattr(getattr(after, section), key),
        )
        for section, names in keys.items()
        for key in names
    ]
    return Alternative(tuple(change for change in values if change.before != change.after), after)


def more_gpus(spec: RunSpec, counts: Sequence[int]) -> Iterator[Alternative]:
    """Yield the spec on each larger number of GPUs among ``counts``."""
    for count in counts:
        if count > spec.ranks_per_host:
            yield Alternative(
                (Change("gpus", spec.ranks_per_host, count),), replace(spec, gpus=count)
            )


def _changed(spec: RunSpec, section: str, **values: str | int | float) -> Alternative:
    """Return the spec with these values in one of its sections."""
    before = getattr(spec, section)
    changes = tuple(
        Change(f"{section}.{name}", getattr(before, name), value) for name, value in values.items()
    )
    return Alternative(changes, replace(spec, **{section: replace(before, **values)}))


# The offload ratio at which settings that fit are the fastest. Pure.


_COARSE = 3
"""Every third ratio is tried first."""
_SLOWER = 0.8
"""CPU Adam on a slow host over that on a fast one with the same processors: 3.9 and 4.7 G
parameters a second on 16 cores.
"""
_ALIKE = 0.001
"""Two ratios of the same settings whose speeds differ by less than this count as equally fast."""


def rate(found: Assessment) -> float:
    """Return the sequences per second of one rank, of a shared one its part; 0 where no speed is
    known.
    """
    train = found.spec.train
    return (
        train.micro_batch
        * found.spec.gradient_accumulation_steps
        / train.sequence_parallel
        / found.step.total_s
        if found.step
        else 0.0
    )


def at_fastest_ratio(given: RunSpec, chosen: Assessment) -> Assessment:
    """Return the chosen settings at the ratio at which they are the fastest, of those that fit.

    The chosen ratio is the smallest that fits. A larger one is a little faster as long as Adam on
    the host is hidden, since the GPU then has less to step itself; from there on every sub-group
    more makes the step longer, and by much. Where that is depends on the rate of Adam: if it was
    not measured here, ratios are judged by the mean of a step at the rate of another host and of
    one at a slower host's.

    The ratios in between are tried coarsely, then closely around the best. Of ratios that are as
    good, the smallest stays, which takes the least host memory; otherwise the given one.
    """
    if (
        chosen.spec.offload.mode != "superoffload"
        or chosen.verdict != "fits"
        or chosen.step is None
    ):
        return chosen
    larger = [ratio for ratio in RATIOS if ratio > chosen.spec.offload.ratio]
    known = {chosen.spec.offload.ratio: chosen}
    seconds = {chosen.spec.offload.ratio: _expected_s(chosen)}

    def try_all(ratios: Iterable[float]) -> float:
        for ratio in set(ratios).difference(known):
            found = known[ratio] = assess(
                in_mode(chosen.spec, "superoffload", ratio), chosen.target
            )
            if found.verdict == "fits":
                seconds[ratio] = _expected_s(found)
        return min(seconds, key=lambda ratio: seconds[ratio])

    asked = max(chosen.spec.offload.ratio, given.offload.ratio)
    best = try_all([*larger[::_COARSE], *larger[-1:], asked])
    best = try_all(ratio for ratio in larger if abs(ratio - best) < _COARSE * RATIOS[1])
    alike = [ratio for ratio in seconds if seconds[ratio] <= (1 + _ALIKE) * seconds[best]]
    return known[
        next((ratio for ratio in (chosen.spec.offload.ratio, asked) if ratio in alike), best)
    ]


def _expected_s(found: Assessment) -> float:
    """Return the seconds of a step; where Adam's rate is that of another host, the mean of these
    and of those on a slower one.
    """
    target, speed = found.target, found.target.resources.speed
    if found.step is None:
        return float("inf")
    if speed is None or speed.calibrated or target.probes:
        return found.step.total_s
    slower = msgspec.structs.replace(
        speed,
        adam=tuple((cores, _SLOWER * rate) for cores, rate in speed.adam),
        adam_together=tuple((ranks, _SLOWER * rate) for ranks, rate in speed.adam_together),
        node_bytes_per_s=_SLOWER * speed.node_bytes_per_s,
    )
    there = step_with(
        found,
        found.spec,
        dataclasses.replace(target, resources=dataclasses.replace(target.resources, speed=slower)),
    )
    return found.step.total_s if there is None else (found.step.total_s + there.total_s) / 2


CORE_FRACTIONS = (0.7, 0.8, 0.9)
_ORDER: dict[Verdict, int] = {"fits": 0, "tight": 1, "does not fit": 2}
_LONG_WAIT = 0.3
"""Share of a step that waits for the optimizer, from which larger steps are tried."""
_LARGER = 4
"""How many times the tokens of a step are tried then."""
_WORTHWHILE = 1.2
"""Least gain in tokens per second for which they are proposed."""


class Found(NamedTuple):
    """What a search chose for a spec."""

    best: Assessment
    tried: tuple[Assessment, ...] = ()
    """Everything that was assessed, fastest first."""
    why: tuple[AutoMode, ...] = ()
    """Where the spec left its mode open."""


_Search = Callable[[RunSpec, Target], Found]


def best_settings(spec: RunSpec, target: Target) -> Found:
    """Return the best settings for ``spec``, and everything that was tried, fastest first.

    What fits with a margin comes before what is tight, and that before what does not fit; then the
    most tokens per second. Of settings that are about as fast as the fastest, the simplest and
    safest are the best.
    """
    found = _with_savings(_best_of_variants, spec, target)
    for shared in more_sharing(spec):
        if found.best.verdict == "fits" or not_shareable(shared, target.resources):
            break
        found = min(found, _with_savings(_best_of_variants, shared, target), key=_order)
    return found


def decided_settings(spec: RunSpec, target: Target) -> Found:
    """Return ``spec`` as given, with only that decided which it leaves open."""
    return _with_savings(_decided, spec, target)


def _order(found: Found) -> int:
    return _ORDER[found.best.verdict]


def _with_savings(search: _Search, spec: RunSpec, target: Target) -> Found:
    """Return what is found for a spec, or for one with feed-forward tiles, layer inputs on the
    host, weights there, or several of these.

    Each is tried only where nothing fits before, and taken only where it helps.
    """
    found = search(spec, target)
    if not target.resources.has_gpu:
        return found
    for saving in memory_savings(spec):
        if found.best.verdict == "fits":
            break
        short_of_gpu = any(shortage.pool == "gpu" for shortage in found.best.shortages)
        if saving.offload != spec.offload and not short_of_gpu:
            break  # weights on the host take more of what is short
        found = min(found, search(saving, target), key=_order)
    return _or_results_on_host(search, spec, target, found)


def _or_results_on_host(search: _Search, spec: RunSpec, target: Target, found: Found) -> Found:
    """Return what was found, or what is found with attention's results on the host, where that is
    faster.

    It is where they have no room on the GPU, so that attention would be computed again, or where
    they would drive states to the host whose steps nothing hides.
    """
    best, policy = found.best, policy_of(found.best.spec.model)
    if best.verdict != "fits" or target.resources.supply.one_memory or not rate(best):
        return found
    if policy not in TILED_POLICIES or (policy == "attention" and best.spec.offload.mode == "gpu"):
        return found
    chosen = found
    for keeping in _results_on_host(spec, best.spec):
        other = search(keeping, target)
        if (
            other.best.verdict == "fits"
            and offloads_results(other.best.spec.model)
            and clearly_faster(rate(other.best), rate(chosen.best))
        ):
            chosen = other
    if chosen is found:
        return found
    return chosen._replace(tried=_best_first((*chosen.tried, *found.tried)))


def _decided(spec: RunSpec, target: Target) -> Found:
    if spec.offload.mode != "auto":
        return Found(_fastest_policy(spec, target))
    if not target.resources.has_gpu:
        mode = mode_without_gpu(spec)
        found = _fastest_policy(in_mode(spec, mode), target)
        return Found(found, why=(AutoMode(mode=mode, why="no-gpu"),))
    offloaded = _fastest_policy(in_mode(spec, "superoffload"), target)
    if target.resources.gpu_memory_unknown:
        return Found(offloaded, why=(AutoMode(mode="superoffload", why="gpu-memory-unknown"),))
    if spec.offload.parameters == "cpu":
        return Found(offloaded, why=(AutoMode(mode="superoffload", why="weights-on-host"),))
    on_gpu = _fastest_policy(in_mode(spec, "gpu"), target)
    if on_gpu.verdict == "fits" and (
        offloaded.verdict != "fits" or not clearly_faster(rate(offloaded), rate(on_gpu))
    ):
        return Found(on_gpu, why=(AutoMode(mode="gpu", why="fits-on-gpu"),))
    if on_gpu.verdict == "tight" and offloaded.verdict == "does not fit":
        why = AutoMode(
            mode="gpu",
            why="offload-does-not-fit",
            ratio=spec.offload.ratio,
            shortage=offloaded.worst,
        )
        return Found(on_gpu, why=(why,))
    if on_gpu.verdict == "fits":
        alike = policy_of(offloaded.spec.model) == policy_of(on_gpu.spec.model)
        why = AutoMode(mode="superoffload", why="overlaps" if alike else "less-recomputation")
    else:
        why = AutoMode(mode="superoffload", why="gpu-does-not-fit", shortage=on_gpu.worst)
    return Found(offloaded, why=(why,))


def _best_first(tried: Sequence[Assessment]) -> tuple[Assessment, ...]:
    return tuple(sorted(tried, key=lambda found: (_ORDER[found.verdict], -rate(found))))


def _best_of_variants(spec: RunSpec, target: Target) -> Found:
    """Return the best of what differs in mode, ratio, recomputation and micro-batch alone."""
    variants = _Variants(spec, target)
    least_memory = _least_memory(variants)
    nothing_fits = all(found.verdict == "does not fit" for found in least_memory)
    if nothing_fits or target.resources.speed is None or target.resources.gpu_memory_unknown:
        tried = sorted([best(spec, target), *least_memory], key=lambda found: _ORDER[found.verdict])
        return Found(tried[0], tuple(tried))
    tried = [*_tried(variants)]
    if "full" in policies(spec, target) or all(found.verdict == "does not fit" for found in tried):
        tried += least_memory
    ordered = _best_first(tried)
    return Found(_simplest(spec, ordered), ordered)


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


def _fastest_policy(spec: RunSpec, target: Target) -> Assessment:
    """Return a spec whose mode and ratio are decided, with the fastest recomputation where it is
    left open.
    """
    found = [assess(with_policy(spec, policy), target) for policy in policies(spec, target)]
    return min(found, key=lambda found: (_ORDER[found.verdict], -rate(found)))


def policies(spec: RunSpec, target: Target) -> tuple[Policy, ...]:
    """Return the recomputation to try: the given one; all where it is left open and speeds are
    known; else ``full``.
    """
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
    """Return the spec with the smallest share of cores for CPU Adam that makes no step longer: the
    training process can use the others.
    """
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
    """Assess what takes the least memory: on the GPU the smallest micro-batch; on the host the
    largest, with fewest gradients to sum.
    """
    sizes = _batch_splits(variants.spec)
    return [
        variants.of("full", size).best
        for size in dict.fromkeys((sizes[0], variants.spec.train.micro_batch, sizes[-1]))
    ]


def _tried(variants: _Variants) -> Iterator[Assessment]:
    for policy in policies(variants.spec, variants.target):
        for micro_batch in _batch_splits(variants.spec):
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
    """Return the simplest and safest settings that are about as fast as the first, each at its
    fastest ratio.

    What does not offload comes first, then what keeps the given micro-batch, then what leaves twice
    the margin of each GPU (what offloads leaves as much as its ratio), then the fastest. The format
    of the states is always the given one.
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
    """Yield what more tokens in a step would gain, where much of it waits for the optimizer. It
    changes training, so the user decides.
    """
    if (
        chosen.verdict != "fits"
        or not chosen.step
        or chosen.step.exposed_optimizer_s < _LONG_WAIT * chosen.step.total_s
    ):
        return
    larger = best_settings(_with_more_tokens(given), chosen.target).best
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
