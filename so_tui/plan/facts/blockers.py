"""Why a run can never start here."""

from __future__ import annotations

from so_tui.plan.facts.coded import CodedFact
from so_tui.spec.attention import AttentionBackend
from so_tui.spec.errors import Problem


class AmdGpu(CodedFact, frozen=True):
    """A GPU of AMD's with memory of its own. Only APUs are planned for."""

    gpu: int
    name: str


class ModeNeedsGpu(CodedFact, frozen=True):
    """``offload.mode = gpu`` on a machine without GPUs."""

    machine: str


class EngineNeedsGpu(CodedFact, frozen=True):
    """DeepSpeed's SuperOffload on a machine without GPUs."""


class TooFewGpus(CodedFact, frozen=True):
    machine: str
    asked: int
    present: int


class NoSuchGpu(CodedFact, frozen=True):
    machine: str
    asked: tuple[int, ...]
    missing: int
    present: tuple[int, ...]


class SequencesNotShareable(CodedFact, frozen=True):
    """``train.sequence_parallel`` with attention that takes no document boundaries, or with heads that the ranks do not divide."""

    ranks: int
    backend: AttentionBackend
    heads: int
    key_heads: int


class NotBindable(CodedFact, frozen=True):
    """The ranks cannot be bound to cores or GPUs."""

    problems: tuple[Problem, ...]


Blocker = (
    AmdGpu
    | ModeNeedsGpu
    | EngineNeedsGpu
    | TooFewGpus
    | NoSuchGpu
    | SequencesNotShareable
    | NotBindable
)
