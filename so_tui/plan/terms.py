"""The terms that a plan's memory is summed from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from msgspec import Struct

from so_tui.units import count

Location = Literal["gpu", "node", "shm", "disk"]
"""Where memory is allocated: on each GPU, on a rank's CPU node, in /dev/shm, on disk."""
Confidence = Literal["exact", "calibrated", "estimate"]
"""Follows from the parameter table and the code; measured and stored as data; derived from how the
code is known to behave.
"""
Phase = Literal["loss", "backward", "optimizer"]
"""Parts of a step that hold different memory."""


TermKind = Literal[
    "unknown",
    "weights",
    "master-weights",
    "moments",
    "gradients",
    "sub-group-gradients",
    "states-on-gpu",
    "staging-buffer",
    "accumulated-gradients",
    "second-states",
    "copies",
    "gradient-partition",
    "pinned-rounding",
    "layer-inputs",
    "offloaded-inputs",
    "attention-results",
    "offloaded-results",
    "host-weights",
    "fetched-weights",
    "activations",
    "block-working-set",
    "attention-scores",
    "sequence-exchange",
    "gradients-waiting",
    "expert-fragmentation",
    "result-fragmentation",
    "router-logits",
    "loss",
    "head-gradient",
    "hidden-states",
    "cuda-context",
    "nccl-buffers",
    "worker-context",
    "allocator-slack",
    "probe-excess",
    "reduce-bucket",
    "buckets-in-reduction",
    "small-parameters",
    "gathered-parameters",
    "all-gather-pools",
    "gradients-in-flight",
    "largest-parameter",
    "training-process",
    "libraries",
    "nccl-on-host",
    "launcher",
    "adam-worker",
    "worker-gradient-copy",
    "worker-rounding",
    "saving",
    "unused-pinned-blocks",
    "loading",
    "shared-states",
    "rank-messages",
    "checkpoint",
    "export",
]
"""What a term counts; ``TERM_NAMES`` has the names for people. ``unknown`` is a term of a plan that
was saved before terms had kinds.
"""
TERM_NAMES: dict[TermKind, str] = {
    **{kind: kind.replace("-", " ") for kind in get_args(TermKind)},
    "sub-group-gradients": "fp32 gradients of one sub-group",
    "states-on-gpu": "states on the GPU",
    "second-states": "second states, for clipping without waiting",
    "copies": "copies of states, while checkpoints are written",
    "pinned-rounding": "rounding of pinned blocks",
    "layer-inputs": "checkpointed layer inputs",
    "offloaded-inputs": "layer inputs on the host",
    "attention-results": "attention's results",
    "offloaded-results": "attention's results on the host",
    "host-weights": "weights on the host",
    "fetched-weights": "weights fetched from the host",
    "activations": "stored activations",
    "block-working-set": "working set of one block",
    "sequence-exchange": "exchange of tokens for heads",
    "gradients-waiting": "gradients waiting for reduction",
    "expert-fragmentation": "room lost between the rows of experts",
    "result-fragmentation": "room lost between attention's results",
    "router-logits": "logits of the routers",
    "loss": "logits and loss",
    "head-gradient": "gradient of the head",
    "hidden-states": "hidden states and their gradient",
    "cuda-context": "CUDA context",
    "nccl-buffers": "NCCL buffers",
    "worker-context": "context of the Adam worker",
    "probe-excess": "measured beyond the formulas",
    "buckets-in-reduction": "buckets being reduced",
    "small-parameters": "small parameters, whole on every rank",
    "gathered-parameters": "all-gathered parameters",
    "all-gather-pools": "memory pools of the all-gather",
    "largest-parameter": "temporaries of the largest parameter",
    "libraries": "libraries of the training processes",
    "nccl-on-host": "NCCL on the host",
    "launcher": "launcher and supervisor",
    "adam-worker": "Adam worker",
    "worker-gradient-copy": "gradient copy of the Adam worker",
    "worker-rounding": "rounding of the Adam worker's block",
    "saving": "saving, one array at a time",
    "loading": "loading, beyond what training needs later",
    "shared-states": "master weights and gradients in /dev/shm",
    "rank-messages": "messages between ranks",
    "checkpoint": "one checkpoint",
}
"""Names of memory terms in tables and JSON."""

OUTSIDE_ALLOCATOR = frozenset({"cuda-context", "nccl-buffers", "worker-context"})
"""GPU terms that torch's allocator does not see: it reserves the others."""
ACTIVATION_STACK = frozenset({"layer-inputs", "attention-results", "activations"})
"""GPU terms that grow during forward and shrink during backward, so that no memory is lost between
them.
"""
NOT_STEADY = frozenset({"loading", "saving"})
"""Host terms outside of training steps."""


class Formula(Struct, frozen=True):
    """The arithmetic behind a term: a text with ``{}`` for each value. Formatted for shown plans
    only, not for all that are tried.
    """

    template: str
    values: tuple[int | float | str, ...]

    def __str__(self) -> str:
        return self.template.format(
            *(count(value) if isinstance(value, int) else value for value in self.values)
        )


class MemoryTerm(Struct, frozen=True, rename={"location": "place"}):
    """One summand. ``gpu`` and ``node`` terms count for each rank, ``shm`` and ``disk`` terms for
    the whole host.
    """

    kind: TermKind = "unknown"
    location: Location = "gpu"
    bytes: int = 0
    confidence: Confidence = "estimate"
    formula: Formula | str = ""
    """The arithmetic in words and numbers; a text once the plan is complete."""
    rank: int | None = None
    """The only rank that has this term; None when every rank does."""
    phase: Phase | None = None
    """The phase of a step that holds it; None for what is always there. A plan lists the terms of
    the fullest phase.
    """
    name: str = ""
    """The kind in words, filled in when the plan is complete."""


Terms = Iterator[MemoryTerm]


def term(
    kind: TermKind,
    location: Location,
    size: int,
    confidence: Confidence,
    formula: str,
    *values: int | float | str,
    rank: int | None = None,
    phase: Phase | None = None,
) -> MemoryTerm:
    """Return a term with a ``Formula`` of this text and these values."""
    return MemoryTerm(kind, location, size, confidence, Formula(formula, values), rank, phase)


def sized(
    kind: TermKind,
    location: Location,
    confidence: Confidence,
    each: float,
    numel: int,
    note: str = "",
    *,
    phase: Phase | None = None,
) -> MemoryTerm:
    """Return a term of ``each`` bytes for so many elements, with a note on what they are."""
    formula = f"{each:g} B x {{}}{note}"
    return term(kind, location, int(each * numel), confidence, formula, numel, phase=phase)
