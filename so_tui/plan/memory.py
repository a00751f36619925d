"""Peak bytes of a run, term by term: on each GPU, on the host beside it, in /dev/shm and on disk.

Model states are exact: they follow from the parameter table. What libraries, contexts and the allocator take is calibrated: measured, kept
as data (``constants.json``). The rest is worked out from what the trainer does, and marked as an estimate. Some terms live in one phase of
a step only; the fullest phase counts, and only its terms are listed. For DeepSpeed 0.19.8 ZeRO-3 with bf16 weights.

Symbols: T tokens of a micro-batch, h hidden width, V vocabulary; n, Pc, Pg parameters of one rank, on the CPU, on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from so_tui.model.activations import block_bytes, fused_kernels, kept_bytes, policy_of, score_bytes
from so_tui.model.architecture import Architecture
from so_tui.model.layout import StateLayout
from so_tui.model.loss import LOSS_BLOCK_LOGITS, LOSS_KEPT_LOGITS, loss_bytes
from so_tui.plan.communication import communication_terms, gradients_waiting_bytes
from so_tui.plan.constants import constants
from so_tui.plan.host_memory import GRADIENT_PARTITION, ROUNDING, disk_terms, host_terms, shared_terms
from so_tui.plan.terms import count, own_engine, power_of_two
from so_tui.plan.types import MemoryTerm, Phase, Place
from so_tui.spec.types import ParameterBlock, RunSpec

EXPERT_HOLES = 3
"""Of the largest tensor's gradients: the room lost between activations that are as large as they, in mixtures of experts on an H200."""
KEPT = frozenset({"checkpointed layer inputs", "kept activations"})
"""GPU terms that fill up with forward and empty with backward: nothing is cut between them."""
OUTSIDE_ALLOCATOR = frozenset({"CUDA context", "NCCL buffers", "context of the Adam worker"})
"""GPU terms that torch's allocator does not see: the rest is what it reserves."""


def memory_terms(
    spec: RunSpec, layout: StateLayout, shape: Architecture, *, has_gpu: bool, local_ranks: int, pinned_rounded: bool = False
) -> tuple[MemoryTerm, ...]:
    """The terms of the peak, for a spec whose mode is decided. ``local_ranks`` share this host; ``layout.ranks`` may be more.

    Without a GPU, what would be its memory is the host's: those terms get the place ``node``. ``pinned_rounded``: whether torch rounds
    pinned blocks up to powers of two (before 2.13).
    """
    terms = all_terms(spec, layout, shape, has_gpu=has_gpu, local_ranks=local_ranks, pinned_rounded=pinned_rounded)
    fullest = {place: _fullest(terms, place) for place in ("gpu", "node")}
    return tuple(term for term in terms if not term.phase or term.phase == fullest[term.place])


def phase_bytes(terms: Sequence[MemoryTerm], place: Place) -> dict[Phase, int]:
    """Bytes of one rank at the peak of each phase, from ``all_terms``."""
    always = sum(term.bytes for term in terms if term.place == place and not term.phase and term.rank is None)
    totals: dict[Phase, int] = {}
    for term in terms:
        if term.place == place and term.phase:
            totals[term.phase] = totals.get(term.phase, always) + term.bytes
    return totals


def all_terms(
    spec: RunSpec, layout: StateLayout, shape: Architecture, *, has_gpu: bool, local_ranks: int, pinned_rounded: bool = False
) -> tuple[MemoryTerm, ...]:
    """Every term of every phase, as ``memory_terms``."""
    gpu: Place = "gpu" if has_gpu else "node"
    moving = (*communication_terms(spec, layout, gpu), *_activations(spec, layout, shape, gpu))
    states = tuple(_states(spec, layout, gpu, pinned_rounded and has_gpu))
    return (
        *states,
        *moving,
        *_gpu_overhead(spec, layout, moving, has_gpu),
        *host_terms(spec, layout, states, has_gpu, pinned_rounded and has_gpu),
        *shared_terms(spec, layout, local_ranks),
        *disk_terms(spec, layout),
    )


def gradient_buffer_bytes(spec: RunSpec) -> int:
    """Bytes per parameter of ZeRO-3's flat gradient partition: bf16, or fp32 where it sums over several micro-batches."""
    return 4 if spec.gradient_accumulation_steps > 1 else 2


def _states(spec: RunSpec, layout: StateLayout, gpu: Place, pinned_rounded: bool) -> Iterator[MemoryTerm]:
    kept, moved, whole = layout.gpu_numel, layout.cpu_numel, layout.numel
    buffer = gradient_buffer_bytes(spec)
    yield MemoryTerm("weights", gpu, layout.weights_bytes, "exact", f"2 B x {count(whole)} parameters (bf16)")
    if spec.offload.mode == "gpu":
        yield MemoryTerm("masters", gpu, layout.master_weights_bytes("gpu"), "exact", f"4 B x {count(kept)} (fp32 weights)")
        yield MemoryTerm("moments", gpu, layout.moments_bytes("gpu"), "exact", f"8 B x {count(kept)} (two fp32 moments)")
        yield MemoryTerm("gradients", gpu, buffer * whole, "exact", f"{buffer} B x {count(whole)}")
        largest = layout.largest_sub_group
        yield MemoryTerm("fp32 gradients of one sub-group", gpu, 4 * largest, "exact", f"4 B x {count(largest)}", phase="optimizer")
        return
    if kept:
        yield MemoryTerm("states kept on the GPU", gpu, 16 * kept, "exact", f"16 B x {count(kept)} (fp32 weights, gradients, two moments)")
    yield MemoryTerm("masters", "node", layout.master_weights_bytes("cpu"), "exact", f"4 B x {count(moved)} (fp32 weights)")
    if own_engine(spec):
        yield MemoryTerm("exchange with the GPU", "node", 2 * moved, "exact", f"2 B x {count(moved)} (bf16 gradients, then weights)")
        if spec.gradient_accumulation_steps > 1:
            yield MemoryTerm("accumulated gradients", "node", layout.gradients_bytes("cpu"), "exact", f"4 B x {count(moved)} (fp32)")
    else:
        yield MemoryTerm("gradients", "node", layout.gradients_bytes("cpu"), "exact", f"4 B x {count(moved)} (fp32), pinned")
    yield MemoryTerm("moments", "node", layout.moments_bytes("cpu"), "exact", f"8 B x {count(moved)} (two fp32 moments)")
    if not own_engine(spec):
        yield MemoryTerm(GRADIENT_PARTITION, "node", buffer * whole, "exact", f"{buffer} B x {count(whole)}, pinned, of any ratio")
        if pinned_rounded:
            pieces = [4 * group.numel for group in layout.sub_groups if group.device == "cpu"] + [buffer * whole]
            lost = sum(power_of_two(piece) - piece for piece in pieces)
            yield MemoryTerm(ROUNDING, "node", lost, "exact", "each to the next power of two by torch before 2.13")


def _activations(spec: RunSpec, layout: StateLayout, shape: Architecture, gpu: Place) -> Iterator[MemoryTerm]:
    memory = constants().memory
    tokens = spec.train.micro_batch * spec.data.sequence_length
    policy, fused = policy_of(spec.model), fused_kernels(spec.model)
    kept = kept_bytes(shape, policy, fused=fused)
    name = "checkpointed layer inputs" if policy == "full" else "kept activations"
    formula = f"{count(tokens)} tokens x {count(kept)} B x {shape.layers} layers (activation checkpointing: {policy})"
    scores = score_bytes(spec.model, shape, spec.data.sequence_length, spec.train.micro_batch)
    whole = tokens * kept * shape.layers + (scores * shape.layers if policy == "none" else 0)
    block = block_bytes(shape, fused=fused)
    working = int(memory.block_share * tokens * max(0, block - (kept if policy != "full" else 0)))
    head = shape.vocabulary * shape.hidden
    phases: tuple[Phase, ...] = ("loss", "backward")
    for phase in phases:
        yield MemoryTerm(name, gpu, whole, "exact" if policy == "full" else "estimate", formula, phase=phase)
    yield MemoryTerm(
        "working set of one block",
        gpu,
        working,
        "calibrated",
        f"{count(tokens)} tokens x {count(block)} B",
        phase="backward",
    )
    if scores:
        formula = f"6 B x {shape.heads} heads x {spec.data.sequence_length}^2 tokens x {spec.train.micro_batch} (eager attention)"
        yield MemoryTerm("attention scores", gpu, scores, "estimate", formula, phase="backward")
    waiting = gradients_waiting_bytes(spec, layout, shape, tokens * kept, working)
    if waiting:
        yield MemoryTerm(
            "gradients on their way", gpu, waiting, "estimate", "full buckets, less the layers that are done", phase="backward"
        )
    if shape.experts:
        largest = largest_in_block(spec.model.parameters)
        formula = f"{EXPERT_HOLES} x 2 B x {count(largest)}: what is freed is cut too small for the gradient of a layer's experts"
        yield MemoryTerm("room between the rows of experts", gpu, EXPERT_HOLES * 2 * largest, "calibrated", formula, phase="backward")
    if shape.experts and spec.train.router_loss_coefficient:
        size = 2 * tokens * shape.experts * shape.layers
        for phase in phases:
            formula = f"2 B x {count(tokens)} tokens x {shape.experts} experts x {shape.layers} layers"
            yield MemoryTerm("logits of the routers", gpu, size, "exact", formula, phase=phase)
    needed = loss_bytes(tokens, shape.vocabulary, shape.hidden)
    formula = f"2 B x {count(LOSS_KEPT_LOGITS)} logits kept + 6 B x {count(LOSS_BLOCK_LOGITS)} at a time + 6 B x tokens x {shape.hidden}"
    yield MemoryTerm("logits and loss", gpu, needed, "estimate", formula, phase="loss")
    hidden = 4 * tokens * shape.hidden
    for phase in phases:
        # On one GPU it is one of the buckets on their way; on several those are fewer, and it comes beside them.
        if phase == "loss" or spec.offload.mode != "gpu" or layout.ranks > 1 or tied_head(spec.model.parameters):
            formula = f"2 B x {count(head)}, from the loss until it is reduced"
            yield MemoryTerm("gradient of the head", gpu, 2 * head, "exact", formula, phase=phase)
        yield MemoryTerm(
            "hidden states and their gradient", gpu, hidden, "exact", f"2 x 2 B x {count(tokens)} x {shape.hidden}", phase=phase
        )


def _gpu_overhead(spec: RunSpec, layout: StateLayout, moving: Sequence[MemoryTerm], has_gpu: bool) -> Iterator[MemoryTerm]:
    if not has_gpu:
        return
    memory = constants().memory
    offloads = spec.offload.mode == "superoffload" and layout.cpu_numel > 0
    context = memory.cuda_context_bytes + (memory.offload_context_bytes if offloads else 0)
    yield MemoryTerm("CUDA context", "gpu", context, "calibrated", "what the driver keeps, context, kernels, libraries")
    if layout.ranks > 1:
        yield MemoryTerm("NCCL buffers", "gpu", memory.nccl_bytes, "calibrated", "channels between the GPUs")
    if spec.offload.mode == "superoffload" and spec.offload.engine == "deepspeed":
        formula = "pinned memory of each rank's worker opens a context on the first GPU"
        yield MemoryTerm("context of the Adam worker", "gpu", memory.second_context_bytes * layout.ranks, "calibrated", formula)
    changing = max(phase_bytes([term for term in moving if term.name not in KEPT], "gpu").values(), default=0)
    formula = f"{memory.slack_share:.1%} of what comes and goes within a layer"
    yield MemoryTerm("allocator slack", "gpu", int(memory.slack_share * changing), "calibrated", formula)


@lru_cache(maxsize=64)
def tied_head(blocks: tuple[ParameterBlock, ...]) -> bool:
    """Whether the head is the embedding, whose gradient is whole only at the end of backward."""
    return any(tensor.tied for block in blocks for tensor in block.tensors)


@lru_cache(maxsize=64)
def largest_in_block(blocks: tuple[ParameterBlock, ...]) -> int:
    return max((prod(tensor.shape) for block in blocks if block.repeat > 1 for tensor in block.tensors), default=0)


def _fullest(terms: Sequence[MemoryTerm], place: Place) -> Phase | None:
    totals: dict[Phase, int] = {}
    for entry in terms:
        if entry.phase and entry.place == place:
            totals[entry.phase] = totals.get(entry.phase, 0) + entry.bytes
    return max(totals, key=lambda phase: totals[phase], default=None)
