"""What a plan comes to: what limits its speed, what would make it faster, and how much of the
host's memory is a spare copy. Pure functions, which tell facts by their type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from so_tui.plan.notes import (
    Caution,
    ClippingWaits,
    FasterAttention,
    FasterOffload,
    FasterWithout,
    LargerSteps,
)
from so_tui.units import duration

if TYPE_CHECKING:
    from so_tui.plan.plan import Plan

_FASTER = (FasterWithout, FasterOffload, FasterAttention, LargerSteps, ClippingWaits)
"""What would make steps faster, the least painful first. Compact moments are an option instead."""

_PARTS = {
    "gpu": "work of the GPU",
    "optimizer": "the optimizer, which the GPU waits for",
    "data": "reading data",
}


class Limit(Struct, frozen=True):
    """The part of a step that takes the longest."""

    part: Literal["gpu", "optimizer", "data"]
    share: float
    """Of the step."""
    waits_s: float
    """What the GPU waits for the optimizer in a step."""

    @property
    def message(self) -> str:
        text = f"{_PARTS[self.part]}: {self.share:.0%} of a step"
        if self.part == "gpu" and self.waits_s > 0.005 and self.share < 0.995:
            text += f"; it waits {duration(self.waits_s)} for the optimizer"
        return text


def limit_of(plan: Plan) -> Limit | None:
    """Return what limits the speed of a plan; None where no speed is predicted."""
    step = plan.step
    if step is None or not plan.fits or not plan.step_s:
        return None
    parts: dict[Literal["gpu", "optimizer", "data"], float] = {
        "gpu": step.forward_s + step.backward_s,
        "optimizer": step.exposed_optimizer_s,
        "data": step.data_s,
    }
    longest = max(parts, key=lambda part: parts[part])
    return Limit(longest, parts[longest] / step.total_s, step.exposed_optimizer_s)


def faster_than(plan: Plan) -> list[Caution]:
    """Return what would make a plan that fits faster."""
    found = [fact for fact in plan.warnings if isinstance(fact, _FASTER)] if plan.fits else []
    return sorted(found, key=lambda fact: _FASTER.index(type(fact)))


def other_cautions(plan: Plan) -> list[Caution]:
    """Return what else is worth knowing of a plan."""
    faster = faster_than(plan)
    return [fact for fact in plan.warnings if fact not in faster]


def compact_moments(plan: Plan) -> str:
    """Return ``bf16 moments`` where a plan offloads moments in a smaller format; else nothing."""
    states = plan.spec.offload.states
    return "" if plan.mode == "gpu" or states == "fp32" else states.replace("-", " ")


def spare_bytes(plan: Plan, node: int) -> int:
    """Return how much of a CPU node holds second states: a spare copy of the states, which makes
    steps faster and which a run does without where memory is short.
    """
    terms = [term for term in plan.breakdown if term.kind == "second-states"]
    ranks = [rank.rank for rank in plan.binding if rank.numa_node in (node, None)]
    return sum(term.bytes for term in terms for rank in ranks if term.rank in (rank, None))
