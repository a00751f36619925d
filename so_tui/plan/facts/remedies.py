"""What would fit, and what would need less memory."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from so_tui.plan.facts.coded import CodedFact
from so_tui.spec.sections.offload import StatesFormat


class Change(Struct, frozen=True):
    """One key of the spec, and its value before and after."""

    key: str
    before: str | int | float
    after: str | int | float


class FitsHere(CodedFact, frozen=True):
    """Changes with which the run fits on the same GPUs."""

    changes: tuple[Change, ...]


class CompactStatesFit(CodedFact, frozen=True):
    """A format of the moments in host memory with which the run fits on the same GPUs. Losses differ slightly from those with fp32."""

    states: StatesFormat
    saved_bytes: int
    """Of host memory, on all ranks of this machine."""


class MoreGpusFit(CodedFact, frozen=True):
    gpus: int
    micro_batch: int | None = None
    """The smaller micro-batch that it takes there; None where the given one fits."""


class LargerHostFits(CodedFact, frozen=True):
    """As many GH200 parts with more host memory."""

    gpus: int
    host_bytes: int
    needs_bytes: int
    """On the fullest node."""
    micro_batch: int | None = None


class MoreMachinesFit(CodedFact, frozen=True):
    machines: int
    gpus: int
    micro_batch: int | None = None


class OtherMachineNeeded(CodedFact, frozen=True):
    """On a machine without GPUs, where no setting fits."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    """Changes that need less memory, and how much less by the plan's arithmetic."""

    changes: tuple[Change, ...]
    saves_bytes: int


class MemoryAdvice(CodedFact, frozen=True):
    """After memory ran out: what would need less, the least painful first; on each GPU, or on the host for each rank."""

    pool: Literal["gpu", "node"]
    savings: tuple[MemorySaving, ...]


Remedy = (
    FitsHere
    | CompactStatesFit
    | MoreGpusFit
    | LargerHostFits
    | MoreMachinesFit
    | OtherMachineNeeded
)
