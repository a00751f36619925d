"""Room for copies of the states, from which checkpoints are written while training goes on.

The host's memory goes to the states first, then to what a run needs beside them, then to second states, which hold copies too. Copies get
what is left. They change no result: what has no copy is written before training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from so_tui.model.sharding import copied, copy_bytes
from so_tui.plan.placement import Placement, own_engine
from so_tui.plan.terms import Formula, MemoryTerm, TermKind
from so_tui.spec.types import RunSpec


class Copies(Struct, frozen=True):
    """The copies of one rank."""

    bytes: int
    """What they take, and the budget from which the engine chooses the same."""
    share: float
    """Of the states, in bytes, what is copied, in second states or here."""

    @property
    def term(self) -> MemoryTerm:
        formula = Formula("of {:.0%} of the states, second states included", (self.share,))
        return MemoryTerm(TermKind.COPIES, "node", self.bytes, "exact", formula)


def makes_copies(spec: RunSpec) -> bool:
    """Return whether a run that trains with these settings writes checkpoints behind its training."""
    return own_engine(spec) and spec.checkpoint.background and spec.checkpoint.repeats


def copies(placement: Placement, room: Callable[[], int]) -> Copies | None:
    """Return which copies the sub-groups of one rank have; None for a run that makes none.

    Args:
        placement: The states, with the sub-groups that speculate.
        room: Returns the bytes of host memory that each rank may still take.
    """
    spec = placement.spec
    if not makes_copies(spec):
        return None
    states = spec.offload.states
    sizes = [
        copy_bytes(states if group.device == "cpu" else "fp32") * group.numel
        for group in placement.layout.sub_groups
    ]
    given = [int(spec.checkpoint.copies_gib * 2**30)] if spec.checkpoint.copies_gib else []
    chosen = copied(sizes, placement.speculating, min([*given, max(0, room())]))
    have = {*chosen, *placement.speculating}
    share = sum(sizes[index] for index in have) / sum(sizes)
    return Copies(math.ceil(sum(sizes[index] for index in chosen)), share)
