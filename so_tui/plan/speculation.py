"""How many sub-groups can be stepped before the gradient norm is known. Each needs a second set of states in host memory.

The host's memory goes to the states first, then to what a run needs beside them; speculation gets what is left. It changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from so_tui.model.layout import WEIGHT_BYTES, PlannedSubGroup
from so_tui.model.sharding import speculating, speculation_bytes
from so_tui.plan.placement import Placement, keeps_weights_on_host, own_engine
from so_tui.plan.terms import Formula, MemoryTerm, TermKind
from so_tui.plan.types import StepTime
from so_tui.spec.types import RunSpec

_LONG_WAIT = 0.1
"""Share of a step that waits for the optimizer, from which fewer second states are tried."""
_SHARES = (0.75, 0.5, 0.25)
"""Of the memory that there is for them."""


class SecondStates(Struct, frozen=True):
    """The sub-groups of one rank that have a second set of states."""

    sub_groups: tuple[int, ...]
    numel: int
    budget_bytes: int
    """What they may take, and what they were chosen for: with the same budget, the engine chooses the same."""
    parameter_bytes: float

    @property
    def bytes(self) -> int:
        return int(self.parameter_bytes * self.numel)

    @property
    def term(self) -> MemoryTerm:
        formula = Formula(
            "{} B x {} (a second set of states and weights)",
            (f"{self.parameter_bytes:g}", self.numel),
        )
        return MemoryTerm(TermKind.SECOND_STATES, "node", self.bytes, "exact", formula)


def second_states_bytes(spec: RunSpec) -> float:
    """Return the bytes per parameter of a second set of states."""
    return speculation_bytes(
        WEIGHT_BYTES, spec.offload.states, host_weights=keeps_weights_on_host(spec)
    )


def can_speculate(spec: RunSpec) -> bool:
    """Return whether the spec has a gradient norm to wait for, an engine that need not wait for it, and leave to do so."""
    return (
        own_engine(spec) and spec.train.gradient_clipping > 0 and spec.offload.speculation != "off"
    )


def second_states(placement: Placement, room: Callable[[], int]) -> SecondStates | None:
    """Return which sub-groups speculate; None if none does.

    Args:
        placement: The states.
        room: Returns the bytes of host memory that each rank may still take. Asked only where the spec leaves that to the plan.
    """
    spec = placement.spec
    if not can_speculate(spec) or not placement.layout.cpu_numel:
        return None
    most = [int(spec.offload.speculation_gib * 2**30)] if spec.offload.speculation_gib else []
    if spec.offload.speculation == "auto":
        most.append(max(0, room()))
    groups = _in_order_of_use(placement)
    each = second_states_bytes(spec)
    budget = min([*most, math.ceil(each * placement.layout.cpu_numel)])
    found = [
        groups[position]
        for position in speculating([group.numel for group in groups], int(budget / each))
    ]
    if not found:
        return None
    return SecondStates(
        tuple(sorted(group.index for group in found)),
        sum(group.numel for group in found),
        budget,
        each,
    )


class Choice(Struct, frozen=True):
    """What the plan gives to second states."""

    second: SecondStates | None
    step: StepTime | None
    """With it, where the choice needed to know."""
    gains_nothing: bool = False
    """Whether there was memory for second states, but they would make the step no faster."""


def choose(
    placement: Placement,
    room: Callable[[], int],
    step_of: Callable[[SecondStates | None], StepTime | None],
) -> Choice:
    """Return the second states with which a step is the fastest, where the spec leaves that to the plan.

    Where Adam has more to do than backward hides, fewer are faster: what backward cannot hide is stepped in place, at a higher rate.

    Args:
        placement: The states.
        room: As for ``second_states``.
        step_of: Returns the predicted step with these second states; None where speeds are not known.
    """
    second = second_states(placement, room)
    if second is None or placement.spec.offload.speculation != "auto":
        return Choice(second, None)
    held_back, step = step_of(None), step_of(second)
    if held_back is None or step is None:
        return Choice(second, None)
    tried: list[tuple[SecondStates, StepTime]] = [(second, step)]
    if step.exposed_optimizer_s > _LONG_WAIT * step.total_s:
        for share in _SHARES:
            fewer = second_states(placement, partial(int, share * second.budget_bytes))
            if fewer and (found := step_of(fewer)):
                tried.append((fewer, found))
    best, step = min(tried, key=lambda found: found[1].total_s)
    return (
        Choice(None, held_back, gains_nothing=True)
        if step.total_s >= held_back.total_s
        else Choice(best, step)
    )


def _in_order_of_use(placement: Placement) -> Sequence[PlannedSubGroup]:
    """Return the sub-groups on the CPU in the order in which a forward pass first uses them."""
    layout = placement.layout
    spans = placement.profile.compute_spans(layout.ranks, placement.spec.offload.sub_group_size)
    return sorted(
        (group for group in layout.sub_groups if group.device == "cpu"),
        key=lambda group: spans[group.index][0],
    )
