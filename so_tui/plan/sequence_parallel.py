"""Sequence parallelism in plans: who can share sequences, what travels between the ranks that do, and what more sharing would be."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from so_tui.model.architecture import Architecture
from so_tui.model.profile import profile_of
from so_tui.plan.attention import attention_of
from so_tui.plan.facts.blockers import SequencesNotShareable
from so_tui.plan.resources import Resources
from so_tui.spec.attention import MASKED_BACKENDS
from so_tui.spec.layers import layer_kinds
from so_tui.spec.sharing import sharing_problem
from so_tui.spec.types import RunSpec


def not_shareable(spec: RunSpec, resources: Resources) -> SequencesNotShareable | None:
    """Return why the ranks of a spec cannot share sequences as it asks; None if they can, or it does not ask."""
    ranks = spec.train.sequence_parallel
    if ranks == 1:
        return None
    profile = profile_of(spec.model)
    shape, backend = profile.architecture, attention_of(spec, profile, resources).backend
    if backend not in MASKED_BACKENDS and _divides_heads(ranks, shape):
        return None
    return SequencesNotShareable(
        ranks=ranks, backend=backend, heads=shape.heads, key_heads=shape.kv_heads
    )


def more_sharing(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the spec with more ranks for each sequence, and the same sequences in a step."""
    train, shape = spec.train, profile_of(spec.model).architecture
    ranks = 2 * train.sequence_parallel
    shareable = (
        not train.router_loss_coefficient
        and sharing_problem(layer_kinds(spec.model.config), ranks) is None
    )
    while shareable and ranks <= spec.ranks_per_host:
        if (
            spec.ranks_per_host % ranks == 0
            and spec.data.sequence_length % ranks == 0
            and _divides_heads(ranks, shape)
        ):
            # With a target of tokens, accumulation follows from it.
            times = 1 if train.tokens_per_step else ranks // train.sequence_parallel
            accumulation = times * train.gradient_accumulation
            yield replace(
                spec,
                train=replace(train, sequence_parallel=ranks, gradient_accumulation=accumulation),
            )
        ranks *= 2


def exchanged_bytes(shape: Architecture, ranks: int) -> float:
    """Return what a rank sends, and receives, for one token of its part in one layer's forward pass: queries, keys, values and results."""
    copies = max(1, ranks // shape.kv_heads)
    return 4.0 * (shape.query_width + copies * shape.key_value_width) * (ranks - 1) / ranks


def _divides_heads(ranks: int, shape: Architecture) -> bool:
    return shape.heads % ranks == 0 and (shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0)
