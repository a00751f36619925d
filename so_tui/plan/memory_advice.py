"""What would need less memory, for a run that ran out of it. Pure functions.

Supervisor and ranks ask for it: they know the spec and what its plan had to give, and no machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from so_tui.model.profile import profile_of
from so_tui.plan.alternatives import alternatives
from so_tui.plan.facts.remedies import Change, MemoryAdvice, MemorySaving
from so_tui.plan.memory import memory_terms
from so_tui.plan.messages import message
from so_tui.plan.placement import Placement
from so_tui.plan.speculation import second_states
from so_tui.plan.types import NOTHING_KNOWN, GivenMemory, OptionalMemory
from so_tui.spec.errors import InputError
from so_tui.spec.types import RunSpec

_MOST_SAVINGS = 3
_LEAST_BYTES = 2**20
"""Savings below this are not proposed."""


def memory_advice(
    spec: RunSpec, pool: Literal["gpu", "node"], given: GivenMemory = NOTHING_KNOWN
) -> MemoryAdvice:
    """Return what would need less memory, for a run that ran out of it and whose mode is decided.

    Args:
        spec: The run's.
        pool: The memory of which it had too little; where CPU and GPU have one memory, it does not matter which of them asked.
        given: What its plan had to give.
    """
    sides: tuple[Literal["gpu", "node"], ...] = ("gpu", "node") if given.one_memory else (pool,)
    pool = "node" if given.one_memory else pool
    spared = list(_without_optional(spec, given.optional)) if pool == "node" else []
    try:
        now = _bytes(spec, pool, given)
        found = [
            MemorySaving(changes=other.changes, saves_bytes=now - _bytes(other.spec, pool, given))
            for side in sides
            for other in alternatives(spec, side)
        ]
    except InputError:  # without a parameter table nothing can be said about a model's memory
        found = []
    savings = tuple(saving for saving in (*spared, *found) if saving.saves_bytes >= _LEAST_BYTES)
    return MemoryAdvice(pool=pool, savings=savings[:_MOST_SAVINGS])


def _without_optional(spec: RunSpec, optional: OptionalMemory) -> Iterator[MemorySaving]:
    """Yield what a run saves without copies, and without second states where the plan chose them."""
    if optional.copies_bytes:
        yield MemorySaving(
            changes=(Change("checkpoint.background", "true", "false"),),
            saves_bytes=optional.copies_bytes,
        )
    if optional.second_states_bytes and spec.offload.speculation == "auto":
        yield MemorySaving(
            changes=(Change("offload.speculation", "auto", "off"),),
            saves_bytes=optional.second_states_bytes,
        )


def less_gpu_memory(spec: RunSpec, given: GivenMemory = NOTHING_KNOWN) -> str:
    """Return ``memory_advice`` in words for a run that ran out of GPU memory."""
    return message(memory_advice(spec, "gpu", given))


def less_host_memory(spec: RunSpec, given: GivenMemory = NOTHING_KNOWN) -> str:
    """Return ``memory_advice`` in words for a run that ran out of host memory."""
    return message(memory_advice(spec, "node", given))


def _bytes(spec: RunSpec, pool: Literal["gpu", "node"], given: GivenMemory) -> int:
    profile = profile_of(spec.model)
    layout = profile.layout(spec.ranks, spec.offload)
    placement = Placement(
        spec=spec,
        profile=profile,
        layout=layout,
        local_ranks=spec.ranks_per_host,
        one_memory=given.one_memory,
    )
    second = second_states(placement, lambda: 0)
    terms = (*memory_terms(placement), *([second.term] if second else ()))
    return sum(term.bytes for term in terms if term.location == pool and term.rank is None)
