"""The settings that are tried for a run, and the fastest of those that fit. Pure functions.

Tried are: where the states live (without offload, else SuperOffload at the smallest ratio that keeps the margin), what is recomputed, and
how an optimizer step is cut into micro-batches. The tokens of an optimizer step and the sequence length stay as they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from so_tui.model.activations import POLICIES, Policy
from so_tui.plan.assess import Assessment, assess, best, in_mode, smallest_ratio, states_fit, step_of
from so_tui.plan.site import Site, other_site
from so_tui.plan.types import Verdict
from so_tui.plan.verdict import EACH_GPU, GPU_MARGIN
from so_tui.spec.types import RunSpec

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CORE_FRACTIONS = (0.7, 0.8, 0.9)
ALIKE = 0.015
"""Settings that differ in speed by less than this are as good as each other: predictions tell them no better apart."""
_ORDER: dict[Verdict, int] = {"fits": 0, "tight": 1, "does not fit": 2}


def fastest(spec: RunSpec, site: Site, *, ranks: int | None = None) -> tuple[Assessment, tuple[Assessment, ...]]:
    """The best setting for ``spec`` here, and everything that was tried, best first.

    What fits with a margin comes before what is tight, and that before what does not fit; then the most tokens per second.
    """
    frugal = _frugal(spec, site, ranks)
    lost = all(found.verdict == "does not fit" for found in frugal)
    if lost or site.speed is None or site.gpu_memory_unknown:
        tried = sorted([best(spec, site, ranks=ranks), *frugal], key=lambda found: _ORDER[found.verdict])
        return tried[0], tuple(tried)
    tried = [*_tried(spec, site, ranks)]
    if "full" in policies(spec, site) or all(found.verdict == "does not fit" for found in tried):
        tried += frugal
    tried = sorted(tried, key=lambda found: (_ORDER[found.verdict], -rate(found)))
    return _simplest(spec, tried), tuple(tried)


def rate(found: Assessment) -> float:
    """Sequences per second of one rank; 0 where no speed is known."""
    return found.spec.train.micro_batch * found.spec.gradient_accumulation_steps / found.step.total_s if found.step else 0.0


def runner_up(chosen: Assessment, tried: Sequence[Assessment]) -> Assessment | None:
    """The next best that fits with a margin and differs in more than the ratio; None where there is none."""
    others = (found for found in tried if found.verdict == "fits" and _kind(found) != _kind(chosen))
    return next(others, None)


def with_fitting_cores(chosen: Assessment, site: Site) -> RunSpec:
    """The smallest share of cores for CPU Adam with which a step takes no longer: what Adam cannot use, the training process can."""
    spec = chosen.spec
    if spec.offload.mode != "superoffload" or not spec.offload.ratio or site.speed is None or site.problem:
        return spec
    found = []
    for fraction in sorted({*CORE_FRACTIONS, spec.offload.cpu_adam_cores_fraction}):
        varied = replace(spec, offload=replace(spec.offload, cpu_adam_cores_fraction=fraction))
        step = step_of(chosen, varied, other_site(site, site.gpus, fraction))
        if step is not None:
            found.append((step.total_s, varied))
    quickest = min((seconds for seconds, _ in found), default=0.0)
    return next((varied for seconds, varied in found if seconds <= 1.002 * quickest), spec)


def fastest_policy(spec: RunSpec, site: Site) -> Assessment:
    """A spec whose mode and ratio are decided, with the recomputing that makes it fastest where it is left open."""
    found = [assess(with_policy(spec, policy), site) for policy in policies(spec, site)]
    return min(found, key=lambda found: (_ORDER[found.verdict], -rate(found)))


def policies(spec: RunSpec, site: Site) -> tuple[Policy, ...]:
    """What may be recomputed: what the spec says, all of it where it leaves that open and speeds are known, else everything."""
    given = spec.model.activation_checkpointing
    if given != "auto":
        return (given,)
    return ("full",) if site.speed is None else POLICIES


def micro_batches(spec: RunSpec) -> tuple[int, ...]:
    """Micro-batches, ascending, that cut the same optimizer step (nearly, where it is a target) into whole micro-steps."""
    train = spec.train
    sequences = train.micro_batch * spec.gradient_accumulation_steps
    if train.tokens_per_step:
        most = train.tokens_per_step / (spec.data.sequence_length * spec.ranks)
        return tuple(sorted({train.micro_batch, *(size for size in MICRO_BATCHES if size <= most)}))
    return tuple(sorted({train.micro_batch, *(size for size in MICRO_BATCHES if size <= sequences and sequences % size == 0)}))


def with_micro_batch(spec: RunSpec, micro_batch: int) -> RunSpec:
    """The same sequences in an optimizer step, cut differently."""
    train = spec.train
    if micro_batch == train.micro_batch:
        return spec
    accumulation = train.gradient_accumulation if train.tokens_per_step else train.micro_batch * train.gradient_accumulation // micro_batch
    return replace(spec, train=replace(train, micro_batch=micro_batch, gradient_accumulation=accumulation))


def with_policy(spec: RunSpec, policy: Policy) -> RunSpec:
    if spec.model.activation_checkpointing == policy:
        return spec
    return replace(spec, model=replace(spec.model, activation_checkpointing=policy))


def _frugal(spec: RunSpec, site: Site, ranks: int | None) -> list[Assessment]:
    """What takes the least memory: on the GPU the smallest micro-batch, on the host the largest, which has the fewest gradients to sum."""
    sizes = micro_batches(spec)
    repeating = with_policy(spec, "full")
    return [
        best(with_micro_batch(repeating, size), site, ranks=ranks) for size in dict.fromkeys((sizes[0], spec.train.micro_batch, sizes[-1]))
    ]


def _tried(spec: RunSpec, site: Site, ranks: int | None) -> Iterator[Assessment]:
    without_offload = states_fit(spec, site, ranks)
    for policy in policies(spec, site):
        for micro_batch in micro_batches(spec):
            varied = with_policy(with_micro_batch(spec, micro_batch), policy)
            if without_offload:
                on_gpu = assess(in_mode(varied, "gpu"), site, ranks=ranks)
                yield on_gpu
                if on_gpu.verdict == "fits":
                    continue
            offloaded = smallest_ratio(varied, site, margin=GPU_MARGIN, ranks=ranks)
            yield offloaded
            if any(shortage.fatal and shortage.place == EACH_GPU for shortage in offloaded.shortages):
                break  # nor would a larger micro-batch


def _simplest(spec: RunSpec, tried: Sequence[Assessment]) -> Assessment:
    """Of what is as good as the first: without offload before with, then the given micro-batch, then the fastest."""
    first = tried[0]
    alike = [found for found in tried if found.verdict == first.verdict and rate(found) >= (1 - ALIKE) * rate(first)]
    given = spec.train.micro_batch
    return min(alike, key=lambda found: (found.spec.offload.mode != "gpu", found.spec.train.micro_batch != given, -rate(found)))


def _kind(found: Assessment) -> tuple[str, str, int]:
    return found.spec.offload.mode, found.spec.model.activation_checkpointing, found.spec.train.micro_batch
