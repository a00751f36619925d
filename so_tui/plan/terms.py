"""The terms that a plan's memory is summed from."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

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


class TermKind(StrEnum):
    """What a term counts; ``TERM_NAMES`` has the names for people."""

    UNKNOWN = "unknown"
    """A term of a plan that was saved before terms had kinds."""
    WEIGHTS = "weights"
    MASTER_WEIGHTS = "master-weights"
    MOMENTS = "moments"
    GRADIENTS = "gradients"
    SUB_GROUP_GRADIENTS = "sub-group-gradients"
    STATES_ON_GPU = "states-on-gpu"
    STAGING_BUFFER = "staging-buffer"
    ACCUMULATED_GRADIENTS = "accumulated-gradients"
    SECOND_STATES = "second-states"
    COPIES = "copies"
    GRADIENT_PARTITION = "gradient-partition"
    PINNED_ROUNDING = "pinned-rounding"
    LAYER_INPUTS = "layer-inputs"
    OFFLOADED_INPUTS = "offloaded-inputs"
    ATTENTION_RESULTS = "attention-results"
    OFFLOADED_RESULTS = "offloaded-results"
    HOST_WEIGHTS = "host-weights"
    FETCHED_WEIGHTS = "fetched-weights"
    ACTIVATIONS = "activations"
    BLOCK_WORKING_SET = "block-working-set"
    ATTENTION_SCORES = "attention-scores"
    SEQUENCE_EXCHANGE = "sequence-exchange"
    GRADIENTS_WAITING = "gradients-waiting"
    EXPERT_FRAGMENTATION = "expert-fragmentation"
    RESULT_FRAGMENTATION = "result-fragmentation"
    ROUTER_LOGITS = "router-logits"
    LOSS = "loss"
    HEAD_GRADIENT = "head-gradient"
    HIDDEN_STATES = "hidden-states"
    CUDA_CONTEXT = "cuda-context"
    NCCL_BUFFERS = "nccl-buffers"
    WORKER_CONTEXT = "worker-context"
    ALLOCATOR_SLACK = "allocator-slack"
    PROBE_EXCESS = "probe-excess"
    REDUCE_BUCKET = "reduce-bucket"
    BUCKETS_IN_REDUCTION = "buckets-in-reduction"
    SMALL_PARAMETERS = "small-parameters"
    GATHERED_PARAMETERS = "gathered-parameters"
    ALL_GATHER_POOLS = "all-gather-pools"
    GRADIENTS_IN_FLIGHT = "gradients-in-flight"
    LARGEST_PARAMETER = "largest-parameter"
    TRAINING_PROCESS = "training-process"
    LIBRARIES = "libraries"
    NCCL_ON_HOST = "nccl-on-host"
    LAUNCHER = "launcher"
    ADAM_WORKER = "adam-worker"
    WORKER_GRADIENT_COPY = "worker-gradient-copy"
    WORKER_ROUNDING = "worker-rounding"
    SAVING = "saving"
    UNUSED_PINNED_BLOCKS = "unused-pinned-blocks"
    LOADING = "loading"
    SHARED_STATES = "shared-states"
    RANK_MESSAGES = "rank-messages"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"


TERM_NAMES: dict[TermKind, str] = {
    TermKind.WEIGHTS: "weights",
    TermKind.MASTER_WEIGHTS: "master weights",
    TermKind.MOMENTS: "moments",
    TermKind.GRADIENTS: "gradients",
    TermKind.SUB_GROUP_GRADIENTS: "fp32 gradients of one sub-group",
    TermKind.STATES_ON_GPU: "states on the GPU",
    TermKind.STAGING_BUFFER: "staging buffer",
    TermKind.ACCUMULATED_GRADIENTS: "accumulated gradients",
    TermKind.SECOND_STATES: "second states, for clipping without waiting",
    TermKind.COPIES: "copies of states, while checkpoints are written",
    TermKind.GRADIENT_PARTITION: "gradient partition",
    TermKind.PINNED_ROUNDING: "rounding of pinned blocks",
    TermKind.LAYER_INPUTS: "checkpointed layer inputs",
    TermKind.OFFLOADED_INPUTS: "layer inputs on the host",
    TermKind.ATTENTION_RESULTS: "attention's results",
    TermKind.OFFLOADED_RESULTS: "attention's results on the host",
    TermKind.HOST_WEIGHTS: "weights on the host",
    TermKind.FETCHED_WEIGHTS: "weights fetched from the host",
    TermKind.ACTIVATIONS: "stored activations",
    TermKind.BLOCK_WORKING_SET: "working set of one block",
    TermKind.ATTENTION_SCORES: "attention scores",
    TermKind.SEQUENCE_EXCHANGE: "exchange of tokens for heads",
    TermKind.GRADIENTS_WAITING: "gradients waiting for reduction",
    TermKind.EXPERT_FRAGMENTATION: "room lost between the rows of experts",
    TermKind.RESULT_FRAGMENTATION: "room lost between attention's results",
    TermKind.ROUTER_LOGITS: "logits of the routers",
    TermKind.LOSS: "logits and loss",
    TermKind.HEAD_GRADIENT: "gradient of the head",
    TermKind.HIDDEN_STATES: "hidden states and their gradient",
    TermKind.CUDA_CONTEXT: "CUDA context",
    TermKind.NCCL_BUFFERS: "NCCL buffers",
    TermKind.WORKER_CONTEXT: "context of the Adam worker",
    TermKind.ALLOCATOR_SLACK: "allocator slack",
    TermKind.PROBE_EXCESS: "measured beyond the formulas",
    TermKind.REDUCE_BUCKET: "reduce bucket",
    TermKind.BUCKETS_IN_REDUCTION: "buckets being reduced",
    TermKind.SMALL_PARAMETERS: "small parameters, whole on every rank",
    TermKind.GATHERED_PARAMETERS: "all-gathered parameters",
    TermKind.ALL_GATHER_POOLS: "memory pools of the all-gather",
    TermKind.GRADIENTS_IN_FLIGHT: "gradients in flight",
    TermKind.LARGEST_PARAMETER: "temporaries of the largest parameter",
    TermKind.TRAINING_PROCESS: "training process",
    TermKind.LIBRARIES: "libraries of the training processes",
    TermKind.NCCL_ON_HOST: "NCCL on the host",
    TermKind.LAUNCHER: "launcher and supervisor",
    TermKind.ADAM_WORKER: "Adam worker",
    TermKind.WORKER_GRADIENT_COPY: "gradient copy of the Adam worker",
    TermKind.WORKER_ROUNDING: "rounding of the Adam worker's block",
    TermKind.SAVING: "saving, one array at a time",
    TermKind.UNUSED_PINNED_BLOCKS: "unused pinned blocks",
    TermKind.LOADING: "loading, beyond what training needs later",
    TermKind.SHARED_STATES: "master weights and gradients in /dev/shm",
    TermKind.RANK_MESSAGES: "messages between ranks",
    TermKind.CHECKPOINT: "one checkpoint",
    TermKind.EXPORT: "export",
}
"""Names of memory terms in tables and JSON."""

OUTSIDE_ALLOCATOR = frozenset(
    {TermKind.CUDA_CONTEXT, TermKind.NCCL_BUFFERS, TermKind.WORKER_CONTEXT}
)
"""GPU terms that torch's allocator does not see: it reserves the others."""
ACTIVATION_STACK = frozenset(
    {TermKind.LAYER_INPUTS, TermKind.ATTENTION_RESULTS, TermKind.ACTIVATIONS}
)
"""GPU terms that grow during forward and shrink during backward, so that no memory is lost between
them.
"""
HOST_PARTS: dict[str, frozenset[TermKind]] = {
    "states": frozenset(
        {
            TermKind.MASTER_WEIGHTS,
            TermKind.MOMENTS,
            TermKind.STAGING_BUFFER,
            TermKind.ACCUMULATED_GRADIENTS,
            TermKind.GRADIENTS,
            TermKind.GRADIENT_PARTITION,
            TermKind.HOST_WEIGHTS,
        }
    ),
    "activations": frozenset({TermKind.OFFLOADED_INPUTS, TermKind.OFFLOADED_RESULTS}),
    "second states": frozenset({TermKind.SECOND_STATES}),
    "copies": frozenset({TermKind.COPIES}),
}
"""What a plan shares a host's memory out to, in the order in which it does. The rest goes to
processes, loading and saving.
"""
NOT_STEADY = frozenset({TermKind.LOADING, TermKind.SAVING})
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

    kind: TermKind = TermKind.UNKNOWN
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
