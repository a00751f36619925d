"""Changes of a spec that need less memory or split its steps differently: what the search tries and what advice proposes. Pure.

Generators yield the smallest change first. Each alternative is relative to the spec that it was made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from so_tui.model.activations import MLP_TILE_TOKENS, TILED_POLICIES, Policy
from so_tui.model.profile import profile_of
from so_tui.plan.facts.remedies import Change
from so_tui.plan.sequence_parallel import more_sharing
from so_tui.plan.speculation import can_speculate
from so_tui.plan.workload import MICRO_BATCHES
from so_tui.spec.sections.model import ModelSpec
from so_tui.spec.sections.offload import StatesFormat
from so_tui.spec.types import RunSpec

_FORMATS: tuple[StatesFormat, ...] = ("fp32", "bf16-moments", "int8-moments")
_ON_HOST: tuple[Literal["attention", "on"], ...] = ("attention", "on")
"""Where attention's results are kept, what may be in host memory: they alone, which takes the least of it, or layer inputs too."""
SHORTEST = 512
"""Fewest tokens of a sequence that are proposed."""
ADVICE_RATIO_STEP = 0.2
"""By how much one piece of advice raises or lowers the offload ratio."""


class Alternative(Struct, frozen=True):
    """A spec that differs from another in a few keys."""

    changes: tuple[Change, ...]
    spec: RunSpec


def alternatives(spec: RunSpec, pool: Literal["gpu", "node"]) -> Iterator[Alternative]:
    """Yield the next step of each change that needs less GPU memory, or less host memory, of a spec whose mode is decided."""
    if pool == "gpu":
        yield from islice(smaller_batches(spec), 1)
        yield from more_recomputation(spec)
        yield from more_offload(spec)
        savings = smaller_activations(spec) if spec.offload.mode == "gpu" else memory_savings(spec)
        yield from (
            alternative_to(spec, other) for other in (*savings, *islice(more_sharing(spec), 1))
        )
        yield from islice(shorter_sequences(spec), 1)
    else:
        yield from less_speculation(spec, "off")
        yield from less_offload(spec)
        yield from no_accumulation(spec)
        yield from compact_states(spec)


def smaller_batches(spec: RunSpec, *, exact: bool = False) -> Iterator[Alternative]:
    """Yield halved micro-batches with twice the accumulation; with ``exact`` only as long as the tokens of a step stay the same."""
    train = spec.train
    size, accumulation = train.micro_batch, train.gradient_accumulation
    while size > 1 and not (exact and size % 2):
        size //= 2
        if train.tokens_per_step:  # accumulation follows from the target
            yield _changed(spec, "train", micro_batch=size)
        else:
            accumulation *= 2
            yield _changed(spec, "train", micro_batch=size, gradient_accumulation=accumulation)


def batch_splits(spec: RunSpec) -> tuple[int, ...]:
    """Return the micro-batches, ascending, that split the same step (nearly, where it is a target) into whole micro-batches."""
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


def more_recomputation(spec: RunSpec) -> Iterator[Alternative]:
    """Yield the recomputation that needs the least memory, where the spec has another."""
    if spec.model.activation_checkpointing != "full":
        yield alternative_to(spec, with_policy(spec, "full"))


def memory_savings(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield a spec with feed-forward blocks in tiles, with what layers keep on the host, and with both, as far as it leaves them open.

    Where attention's results are kept, they are moved alone first. The same follow with weights on the host.
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


def results_on_host(spec: RunSpec, found: RunSpec) -> Iterator[RunSpec]:
    """Yield a spec that keeps attention's results in host memory, where it leaves that open, then layer inputs too; both also with tiles.

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
    """Yield the spec with weights on the host, where it leaves them open and its optimizer can have them there."""
    offload = spec.offload
    if offload.parameters == "auto" and (
        offload.engine == "so-tui" or offload.mode == "zerooffload"
    ):
        yield replace(spec, offload=replace(offload, parameters="cpu"))


def _can_tile(model: ModelSpec) -> bool:
    recomputed = model.activation_checkpointing in ("auto", *TILED_POLICIES)
    return model.tiled_mlp == "auto" and recomputed and not profile_of(model).architecture.experts


def more_offload(spec: RunSpec) -> Iterator[Alternative]:
    """Yield a larger offload ratio, or offloading where there is none."""
    offload = spec.offload
    if offload.mode == "gpu":
        yield _changed(spec, "offload", mode="superoffload", ratio=offload.ratio)
    elif offload.ratio < 1:
        yield _changed(spec, "offload", ratio=min(1.0, round(offload.ratio + ADVICE_RATIO_STEP, 2)))


def less_offload(spec: RunSpec) -> Iterator[Alternative]:
    """Yield a smaller offload ratio."""
    offload = spec.offload
    if offload.mode != "gpu" and offload.ratio > 0:
        yield _changed(spec, "offload", ratio=max(0.0, round(offload.ratio - ADVICE_RATIO_STEP, 2)))


def less_speculation(spec: RunSpec, instead: Literal["auto", "off"]) -> Iterator[Alternative]:
    """Yield second states as far as the host has memory, or none, where the spec asks for them whatever the host has."""
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
    }
    keys["train"] = ("micro_batch", "sequence_parallel", "gradient_accumulation")
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


def no_accumulation(spec: RunSpec) -> Iterator[Alternative]:
    """Yield steps of one micro-batch: the sum of gradients over several is stored on the host."""
    if spec.offload.mode != "gpu" and spec.gradient_accumulation_steps > 1:
        yield _changed(spec, "train", gradient_accumulation=1, tokens_per_step=0)


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
