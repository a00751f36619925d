"""The settings that are tried for a run, and the best of those that fit. Pure functions.

Tried are: where the states live (without offload, else SuperOffload at the smallest ratio that
leaves the margin; what is chosen also at larger ones), what is recomputed, how an optimizer step is
split into micro-batches, and, where nothing fits, feed-forward blocks in tiles, layer inputs and
weights on the host, and ranks that share sequences; attention's results on the host also where that
is faster. The tokens of an optimizer step and the sequence length stay as given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from so_tui.model.profile import (
    MLP_TILE_TOKENS,
    POLICIES,
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
    in_mode_without_gpu,
)
from so_tui.plan.notes import AdvicePool, AutoMode, AutoReason, Change, LargerSteps
from so_tui.plan.plan import Verdict
from so_tui.plan.rates import about_as_fast, clearly_faster
from so_tui.plan.resources import more_sharing, not_shareable
from so_tui.plan.step_time import can_speculate
from so_tui.plan.workload import MICRO_BATCHES
from so_tui.spec.run_spec import (
    MACHINE_DECIDES,
    SPLIT,
    ModelSpec,
    OffloadSpec,
    Policy,
    RunSpec,
    StatesFormat,
)

# Changes of a spec that need less memory or split its steps differently: what the search tries and
# what advice proposes. Pure.
#
# Generators yield the smallest change first.


_FORMATS: tuple[StatesFormat, ...] = ("fp32", "bf16-moments", "int8-moments")
OnHost = Literal["attention", "on"]
_ON_HOST: tuple[OnHost, ...] = ("attention", "on")
"""Where attention's results are kept, what may be in host memory: they alone, which takes the least
of it, or layer inputs too.
"""
_KEYS = (
    "offload.mode",
    "offload.ratio",
    "offload.speculation",
    "offload.states",
    "offload.parameters",
    "model.activation_checkpointing",
    "model.tiled_mlp",
    "model.activation_offload",
    "train.micro_batch",
    "train.sequence_parallel",
    "train.gradient_accumulation",
    "train.tokens_per_step",
    "data.sequence_length",
)
"""What alternatives change, in the order in which changes are named."""
SEARCHED = tuple(
    key for key in MACHINE_DECIDES if key != "gpus" and not key.startswith("checkpoint.")
)
"""What the search decides, unless a person set it."""
SHORTEST = 512
"""Fewest tokens of a sequence that are proposed."""
ADVICE_RATIO_STEP = 0.2
"""By how much one piece of advice raises or lowers the offload ratio."""


def left_open(spec: RunSpec) -> RunSpec:
    """Return the spec with which a search begins: keys that the machine decides have their
    defaults, unless a person set them.
    """
    shared = spec.train.sequence_parallel
    if shared > 1 and not spec.fixes("train.sequence_parallel"):
        each, rest = divmod(spec.train.gradient_accumulation, shared)
        if not rest:  # the sequences of a step stay
            spec = spec.changed("train", sequence_parallel=1, gradient_accumulation=each)
    published = spec.offload.config != "so-tui"  # of one mode only
    for section, defaults in (("offload", OffloadSpec()), ("model", _MODEL)):
        before, opened = getattr(spec, section), {}
        for key in SEARCHED:
            name = key.removeprefix(f"{section}.")
            if name == key or spec.fixes(key) or (published and name == "mode"):
                continue
            if getattr(before, name) != getattr(defaults, name):
                opened[name] = getattr(defaults, name)
        if opened:
            spec = spec.changed(section, **opened)
    return spec


_MODEL = ModelSpec(id="")


def released(spec: RunSpec, keys: Collection[str]) -> RunSpec:
    """Return the spec with some fixed keys left open."""
    return left_open(replace(spec, fixed=tuple(key for key in spec.fixed if key not in keys)))


def changes_of(before: RunSpec, after: RunSpec) -> tuple[Change, ...]:
    """Return the keys in which an alternative differs, with the ratio of one that offloads only
    then.
    """
    moved = before.offload.mode != after.offload.mode
    pairs = ((key, attrgetter(key)(before), attrgetter(key)(after)) for key in _KEYS)
    return tuple(
        Change(key, old, new)
        for key, old, new in pairs
        if old != new or (moved and key == "offload.ratio")
    )


def alternatives(spec: RunSpec, pool: AdvicePool) -> Iterator[RunSpec]:
    """Yield the next step of each change that needs less GPU memory, or less host memory, of a spec
    whose mode is decided.
    """
    offload = spec.offload
    if pool == "gpu":
        yield from islice(smaller_batches(spec), 1)
        if spec.model.activation_checkpointing != "full":
            yield with_policy(spec, "full")
        if offload.mode == "gpu":
            yield in_mode(spec, "superoffload")
        elif offload.ratio < 1:
            larger = min(1.0, round(offload.ratio + ADVICE_RATIO_STEP, 2))
            yield spec.changed("offload", ratio=larger)
        yield from smaller_activations(spec) if offload.mode == "gpu" else memory_savings(spec)
        yield from islice(more_sharing(spec), 1)
        yield from islice(shorter_sequences(spec), 1)
    else:
        yield from less_speculation(spec, "off")
        if offload.mode != "gpu" and offload.ratio > 0:
            smaller = max(0.0, round(offload.ratio - ADVICE_RATIO_STEP, 2))
            yield spec.changed("offload", ratio=smaller)
        if offload.mode != "gpu" and spec.gradient_accumulation_steps > 1:
            # The sum of gradients over several micro-batches is stored on the host.
            yield spec.changed("train", gradient_accumulation=1, tokens_per_step=0)
        yield from compact_states(spec)


def smaller_batches(spec: RunSpec, *, exact: bool = False) -> Iterator[RunSpec]:
    """Yield halved micro-batches with twice the accumulation; with ``exact`` only as long as the
    tokens of a step stay the same.
    """
    train = spec.train
    size, accumulation = train.micro_batch, train.gradient_accumulation
    while size > 1 and not (exact and size % 2):
        size //= 2
        if train.tokens_per_step:  # accumulation follows from the target
            yield spec.changed("train", micro_batch=size)
        else:
            accumulation *= 2
            yield spec.changed("train", micro_batch=size, gradient_accumulation=accumulation)


def _batch_splits(spec: RunSpec) -> tuple[int, ...]:
    """Return the micro-batches, ascending, that split the same step (nearly, where it is a target)
    into whole micro-batches; the given one where the split is fixed.
    """
    train = spec.train
    if spec.fixes(*SPLIT):
        return (train.micro_batch,)
    sequences = train.micro_batch * spec.gradient_accumulation_steps
    if train.tokens_per_step:
        most = train.tokens_per_step / (spec.data.sequence_length * spec.replicas)
        splits = [size for size in MICRO_BATCHES if size <= most]
    else:
        splits = [size for size in MICRO_BATCHES if size <= sequences and sequences % size == 0]
    return tuple(sorted({train.micro_batch, *splits}))


def with_micro_batch(spec: RunSpec, micro_batch: int) -> RunSpec:
    """Return the spec with another micro-batch and the same sequences in a step."""
    train, accumulation = spec.train, spec.train.gradient_accumulation
    if micro_batch == train.micro_batch:
        return spec
    if not train.tokens_per_step:
        accumulation = train.micro_batch * accumulation // micro_batch
    return spec.changed("train", micro_batch=micro_batch, gradient_accumulation=accumulation)


def with_policy(spec: RunSpec, policy: Policy) -> RunSpec:
    """Return the spec with another activation checkpointing."""
    offload = spec.model.activation_offload
    if spec.model.activation_checkpointing == policy:
        return spec
    if offload == "attention" and policy != "attention":
        offload = "auto"  # nothing is left to offload
    return spec.changed("model", activation_checkpointing=policy, activation_offload=offload)


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
    policy = spec.model.activation_checkpointing
    tiles: dict[str, str] = {"tiled_mlp": "on"} if _can_tile(spec, spec.model) else {}
    ways: tuple[OnHost, ...] = ()
    if spec.model.activation_offload == "auto" and policy != "none":
        ways = _ON_HOST if policy == "attention" else ("on",)
    hosts: list[dict[str, str]] = [{"activation_offload": way} for way in ways]
    for values in (tiles, *hosts, *(tiles | host for host in hosts if tiles)):
        if values:
            yield spec.changed("model", **values)


def _results_on_host(spec: RunSpec, found: RunSpec) -> Iterator[RunSpec]:
    """Yield a spec that keeps attention's results in host memory, where it leaves that open, then
    layer inputs too; both also with tiles.

    Args:
        spec: As given.
        found: The same with what was decided, whose tiles and weights on the host stay.
    """
    model, given = spec.model, spec.model.activation_offload
    if model.activation_checkpointing not in ("auto", "attention") or given in ("inputs", "off"):
        return
    ways = _ON_HOST if given == "auto" else (given,)
    keeping = replace(model, activation_checkpointing="attention", tiled_mlp=found.model.tiled_mlp)
    tiles = ("on",) if _can_tile(spec, keeping) else ()
    weights = spec.changed("offload", parameters=found.offload.parameters)
    for tiled in (keeping.tiled_mlp, *tiles):
        for way in ways:
            yield replace(weights, model=replace(keeping, activation_offload=way, tiled_mlp=tiled))


def weights_on_host(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the spec with weights on the host, where it leaves them open and its optimizer can have
    them there.
    """
    offload = spec.offload
    can = offload.engine == "so-tui" or offload.mode == "zerooffload"
    if offload.parameters == "auto" and can:
        yield spec.changed("offload", parameters="cpu")


def _can_tile(spec: RunSpec, model: ModelSpec) -> bool:
    return (
        spec.micro_batch_tokens > MLP_TILE_TOKENS
        and model.tiled_mlp == "auto"
        and model.repeats_products
        and not profile_of(model).architecture.experts
    )


def less_speculation(spec: RunSpec, instead: Literal["auto", "off"]) -> Iterator[RunSpec]:
    """Yield second states as far as the host has memory, or none, where the spec asks for them
    whatever the host has.
    """
    if can_speculate(spec) and spec.offload.speculation == "on":
        yield spec.changed("offload", speculation=instead)


def compact_states(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield smaller formats of the moments in host memory, where our engine has them there."""
    offload = spec.offload
    if offload.mode in ("auto", "superoffload") and offload.engine == "so-tui":
        for states in _FORMATS[_FORMATS.index(offload.states) + 1 :]:
            yield spec.changed("offload", states=states)


def shorter_sequences(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield halved sequence lengths."""
    length = spec.data.sequence_length // 2
    while length >= SHORTEST:
        yield spec.changed("data", sequence_length=length)
        length //= 2


# The offload ratio at which settings that fit are the fastest. Pure.


_COARSE = 3
"""Every third ratio is tried first."""
_SLOWER = 0.8
"""CPU Adam on a slow host over that on a fast one with the same processors: 3.9 and 4.7 G
parameters a second on 16 cores.
"""
_ALIKE = 0.001
"""Two ratios of the same settings whose speeds differ by less than this count as equally fast."""


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
    least = chosen.spec.offload.ratio
    if chosen.mode != "superoffload" or chosen.verdict != "fits" or chosen.step is None:
        return chosen
    if given.fixes("offload.ratio"):
        return chosen
    larger = [ratio for ratio in RATIOS if ratio > least]
    known, seconds = {least: chosen}, {least: _expected_s(chosen)}

    def try_all(ratios: Iterable[float]) -> float:
        for ratio in set(ratios).difference(known):
            known[ratio] = assess(in_mode(chosen.spec, "superoffload", ratio), chosen.target)
            if known[ratio].verdict == "fits":
                seconds[ratio] = _expected_s(known[ratio])
        return min(seconds, key=lambda ratio: seconds[ratio])

    asked = max(least, given.offload.ratio)
    best = try_all([*larger[::_COARSE], *larger[-1:], asked])
    best = try_all(ratio for ratio in larger if abs(ratio - best) < _COARSE * RATIOS[1])
    alike = [ratio for ratio in seconds if seconds[ratio] <= (1 + _ALIKE) * seconds[best]]
    return known[next((ratio for ratio in (least, asked) if ratio in alike), best)]


def _expected_s(found: Assessment) -> float:
    """Return the seconds of a step; where Adam's rate is that of another host, the mean of these
    and of those on a slower one.
    """
    target, speed = found.target, found.target.resources.speed
    if found.step is None:
        return float("inf")
    if speed is None or speed.calibrated or target.probes:
        return found.step.total_s
    slower = replace(
        speed,
        adam=tuple((cores, _SLOWER * rate) for cores, rate in speed.adam),
        adam_together=tuple((ranks, _SLOWER * rate) for ranks, rate in speed.adam_together),
        node_bytes_per_s=_SLOWER * speed.node_bytes_per_s,
    )
    resources = dataclasses.replace(target.resources, speed=slower)
    there = found.step_with(dataclasses.replace(target, resources=resources))
    return found.step.total_s if there is None else (found.step.total_s + there.total_s) / 2


CORE_FRACTIONS = (0.7, 0.8, 0.9)
VERDICTS: dict[Verdict, int] = {"fits": 0, "tight": 1, "does not fit": 2}
"""Better ones first."""
_LONG_WAIT = 0.3
"""Share of a step that waits for the optimizer, from which larger steps are tried."""
_LARGER = 4
"""How many times the tokens of a step are tried then."""
_WORTHWHILE = 1.2
"""Least gain in tokens per second for which they are proposed."""


class _Found(NamedTuple):
    """What a search chose for a spec."""

    best: Assessment
    tried: tuple[Assessment, ...] = ()
    """Everything that was assessed, fastest first."""
    why: tuple[AutoMode, ...] = ()
    """Where the spec left its mode open."""


Search = Callable[[RunSpec, Target], _Found]


def best_settings(spec: RunSpec, target: Target) -> _Found:
    """Return the best settings for ``spec``, and everything that was tried, fastest first.

    What fits with a margin comes before what is tight, and that before what does not fit; then the
    most tokens per second. Of settings that are about as fast as the fastest, the simplest and
    safest are the best. What the spec fixes stays. The moments are compact only where nothing fits
    with fp32.
    """
    found = _best_in_format(spec, target)
    short_of_host = any(shortage.pool != "gpu" for shortage in found.best.shortages)
    if found.best.verdict == "fits" or spec.fixes("offload.states") or not short_of_host:
        return found
    formats = list(compact_states(spec))
    if not formats:
        return found
    # What does not help in the smallest format helps in none.
    least = _best_in_format(formats.pop(), target)
    if _order(least) < _order(found):
        larger = (_best_in_format(each, target) for each in formats)
        found = min((*larger, least), key=_order)
    return found


def _best_in_format(spec: RunSpec, target: Target) -> _Found:
    """Return the best settings with the moments in the given format."""
    found = _with_savings(_best_of_variants, spec, target)
    split = spec.fixes(*SPLIT) and not spec.train.tokens_per_step
    if split or spec.fixes("train.sequence_parallel"):
        return found
    for shared in more_sharing(spec):
        if found.best.verdict == "fits" or not_shareable(shared, target.resources):
            break
        found = min(found, _with_savings(_best_of_variants, shared, target), key=_order)
    return found


def decided_settings(spec: RunSpec, target: Target) -> _Found:
    """Return ``spec`` as given, with only that decided which it leaves open."""
    return _with_savings(_decided, spec, target)


def _order(found: _Found) -> int:
    return VERDICTS[found.best.verdict]


def _with_savings(search: Search, spec: RunSpec, target: Target) -> _Found:
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


def _or_results_on_host(search: Search, spec: RunSpec, target: Target, found: _Found) -> _Found:
    """Return what was found, or what is found with attention's results on the host, where that is
    faster.

    It is where they have no room on the GPU, so that attention would be computed again, or where
    they would drive states to the host whose steps nothing hides.
    """
    best, model = found.best, found.best.spec.model
    if best.verdict != "fits" or target.resources.supply.one_memory or not best.rate:
        return found
    if not model.repeats_products or (model.policy == "attention" and best.mode == "gpu"):
        return found
    chosen = found
    for keeping in _results_on_host(spec, best.spec):
        other = search(keeping, target)
        fits = other.best.verdict == "fits" and other.best.spec.model.offloads_results
        if fits and clearly_faster(other.best.rate, chosen.best.rate):
            chosen = other
    if chosen is found:
        return found
    return chosen._replace(tried=tuple(sorted((*chosen.tried, *found.tried), key=_merit)))


def _decided(spec: RunSpec, target: Target) -> _Found:
    def decide(found: Assessment, why: AutoReason, **more: Any) -> _Found:
        return _Found(found, why=(AutoMode(mode=found.mode, why=why, **more),))

    if spec.offload.mode != "auto":
        return _Found(_fastest_policy(spec, target))
    if not target.resources.has_gpu:
        return decide(_fastest_policy(in_mode_without_gpu(spec), target), "no-gpu")
    offloaded = _fastest_policy(in_mode(spec, "superoffload"), target)
    if target.resources.gpu_memory_unknown:
        return decide(offloaded, "gpu-memory-unknown")
    if spec.offload.parameters == "cpu":
        return decide(offloaded, "weights-on-host")
    on_gpu = _fastest_policy(in_mode(spec, "gpu"), target)
    if on_gpu.verdict == "fits":
        if offloaded.verdict != "fits" or not clearly_faster(offloaded.rate, on_gpu.rate):
            return decide(on_gpu, "fits-on-gpu")
        alike = offloaded.spec.model.policy == on_gpu.spec.model.policy
        return decide(offloaded, "overlaps" if alike else "less-recomputation")
    if on_gpu.verdict == "tight" and not offloaded.fits:
        ratio = spec.offload.ratio
        return decide(on_gpu, "offload-does-not-fit", ratio=ratio, shortage=offloaded.worst)
    return decide(offloaded, "gpu-does-not-fit", shortage=on_gpu.worst)


def _merit(found: Assessment) -> tuple[int, float]:
    """Return the key by which the best settings come first."""
    return VERDICTS[found.verdict], -found.rate


def _best_of_variants(spec: RunSpec, target: Target) -> _Found:
    """Return the best of what differs in mode, ratio, recomputation and micro-batch alone."""

    @cache
    def variant(policy: Policy, micro_batch: int) -> Candidates:
        return Candidates(with_policy(with_micro_batch(spec, micro_batch), policy), target)

    # On the GPU the smallest micro-batch takes the least memory; on the host the largest, with
    # fewest gradients to sum.
    sizes = _batch_splits(spec)
    least_memory = [
        variant("full", size).best
        for size in dict.fromkeys((sizes[0], spec.train.micro_batch, sizes[-1]))
    ]
    nothing_fits = not any(found.fits for found in least_memory)
    if nothing_fits or target.resources.speed is None or target.resources.gpu_memory_unknown:
        tried = sorted(
            [best(spec, target), *least_memory], key=lambda found: VERDICTS[found.verdict]
        )
        return _Found(tried[0], tuple(tried))
    tried = []
    for policy in policies(spec, target):
        for size in sizes:
            on_gpu = variant(policy, size).on_gpu
            if on_gpu is not None:
                tried.append(on_gpu)
                if on_gpu.verdict == "fits":
                    continue
            offloaded = variant(policy, size).offloaded
            if offloaded is None:
                continue
            tried.append(offloaded)
            if any(short.fatal and short.pool == "gpu" for short in offloaded.shortages):
                break  # nor would a larger micro-batch
    if "full" in policies(spec, target) or not any(found.fits for found in tried):
        tried += least_memory
    tried.sort(key=_merit)
    return _Found(_simplest(spec, tried), tuple(tried))


def _fastest_policy(spec: RunSpec, target: Target) -> Assessment:
    """Return a spec whose mode and ratio are decided, with the fastest recomputation where it is
    left open.
    """
    tried = (assess(with_policy(spec, policy), target) for policy in policies(spec, target))
    return min(tried, key=_merit)


def policies(spec: RunSpec, target: Target) -> tuple[Policy, ...]:
    """Return the recomputation to try: the given one; all where it is left open and speeds are
    known; else ``full``.
    """
    given, offload = spec.model.activation_checkpointing, spec.model.activation_offload
    if given != "auto":
        return (given,)
    if target.resources.speed is None:
        return ("full",)
    if offload == "attention":
        return ("attention",)
    if spec.model.tiled_mlp == "on":
        return "attention", "full"
    if offload in ("on", "inputs"):
        return tuple(policy for policy in POLICIES if policy != "none")
    return POLICIES


def with_fitting_cores(chosen: Assessment) -> Assessment:
    """Return the chosen settings with the smallest share of cores for CPU Adam that makes no step
    longer: the training process can use the others.
    """
    spec, offload, target = chosen.spec, chosen.spec.offload, chosen.target
    if chosen.mode != "superoffload" or not offload.ratio:
        return chosen
    if spec.fixes("offload.cpu_adam_cores_fraction"):
        return chosen
    if target.resources.speed is None or target.resources.problem:
        return chosen
    fractions = sorted({*CORE_FRACTIONS, offload.cpu_adam_cores_fraction})
    varied = [spec.changed("offload", cpu_adam_cores_fraction=fraction) for fraction in fractions]
    steps = [(each, chosen.step_with(target.on(each), spec=each)) for each in varied]
    known = [(step.total_s, each) for each, step in steps if step]
    quickest = min((seconds for seconds, _ in known), default=0.0)
    fitting = next((each for seconds, each in known if seconds <= 1.002 * quickest), None)
    return assess(fitting, target.on(fitting)) if fitting else chosen


def _simplest(spec: RunSpec, tried: Sequence[Assessment]) -> Assessment:
    """Return the simplest and safest settings that are about as fast as the first, each at its
    fastest ratio.

    What does not offload comes first, then what keeps the given micro-batch, then what leaves twice
    the margin of each GPU (what offloads leaves as much as its ratio), then the fastest.
    """
    fastest = at_fastest_ratio(spec, tried[0])

    def departures(found: Assessment) -> tuple[bool, bool, bool, float]:
        offloads = found.mode != "gpu"
        other_batch = found.spec.train.micro_batch != spec.train.micro_batch
        return offloads, other_batch, not (offloads or found.roomy), -found.rate

    alike = [
        found
        for found in tried
        if found.verdict == fastest.verdict and about_as_fast(found.rate, fastest.rate)
    ]
    chosen = min((tried[0], *alike), key=departures)
    return fastest if chosen is tried[0] else at_fastest_ratio(spec, chosen)


def larger_steps(given: RunSpec, chosen: Assessment) -> Iterator[LargerSteps]:
    """Yield what more tokens in a step would gain, where much of it waits for the optimizer. It
    changes training, so the user decides.
    """
    step = chosen.step
    if chosen.verdict != "fits" or not step or step.exposed_optimizer_s < _LONG_WAIT * step.total_s:
        return
    now = given.replicas * given.train.micro_batch * given.gradient_accumulation_steps
    value = given.train.tokens_per_step or now * given.data.sequence_length
    wanted = given.changed("train", tokens_per_step=_LARGER * value, gradient_accumulation=1)
    larger = best_settings(wanted, chosen.target).best
    if larger.verdict != "fits" or not larger.step or larger.rate < _WORTHWHILE * chosen.rate:
        return
    accumulated = larger.spec.gradient_accumulation_steps
    sequences = larger.spec.replicas * accumulated * larger.spec.train.micro_batch
    yield LargerSteps(
        step_s=step.total_s,
        exposed_optimizer_s=step.exposed_optimizer_s,
        times=_LARGER,
        tokens=given.data.sequence_length * sequences,
        key="train.tokens_per_step",
        value=_LARGER * value,
        faster=larger.rate / chosen.rate,
    )
