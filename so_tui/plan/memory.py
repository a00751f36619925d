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

from so_tui.plan.activations import block_bytes, kept_bytes, policy_of, score_bytes
from so_tui.plan.architecture import Architecture
from so_tui.plan.constants import constants
from so_tui.plan.layout import StateLayout, partition_numel
from so_tui.plan.loss import LOSS_BLOCK_LOGITS, LOSS_KEPT_LOGITS, loss_bytes
from so_tui.plan.types import Confidence, MemoryTerm, Phase, Place
from so_tui.spec.types import ParameterBlock, RunSpec

PERSISTENCE_THRESHOLD = 100_000
"""ZeRO-3 keeps parameters smaller than this whole on every rank (DeepSpeed's default); the project's own engine keeps none."""
PREFETCH_BUCKET = 50_000_000
"""Parameters that ZeRO-3 gathers ahead of need (DeepSpeed's default)."""
REUSE_DISTANCE = 1_000_000_000
"""ZeRO-3 keeps gathered what is used again within so many parameters (DeepSpeed's default)."""
OWN_LARGEST_BUCKET = 100_000_000
"""Parameters in a reduce bucket of the project's own SuperOffload, at most."""
OWN_BUCKETS_IN_FLIGHT = 3
"""Buckets of gradients that may be on their way to the host in the project's own engine: two that wait and one that is filled."""
STATE_BYTES = 12
"""Of a checkpoint, per parameter: fp32 master and two moments. The bf16 weights are a cast of the masters."""
OUTSIDE_ALLOCATOR = frozenset({"CUDA context", "NCCL buffers", "context of the Adam worker"})
"""GPU terms that torch's allocator does not see: the rest is what it reserves."""

LOADING = "loading, beyond what comes later"
SAVING = "saving, one array at a time"
NOT_STEADY = frozenset({LOADING, SAVING})
"""Host terms that come and go outside of training steps."""

_READING_BYTES = 64 * 2**20
_MESSAGES_SHM_BYTES = 16_000_000


def memory_terms(
    spec: RunSpec, layout: StateLayout, shape: Architecture, *, has_gpu: bool, local_ranks: int, pinned_rounded: bool = False
) -> tuple[MemoryTerm, ...]:
    """The terms of the peak, for a spec whose mode is decided. ``local_ranks`` share this host; ``layout.ranks`` may be more.

    Without a GPU, what would be its memory is the host's: those terms get the place ``node``. ``pinned_rounded``: whether torch rounds
    page-locked blocks up to powers of two (before 2.13).
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
    moving = (*_communication(spec, layout, gpu), *_activations(spec, layout, shape, gpu))
    states = tuple(_states(spec, layout, gpu, pinned_rounded and has_gpu))
    return (
        *states,
        *moving,
        *_gpu_overhead(spec, layout, moving, has_gpu),
        *_host(spec, layout, states, has_gpu, pinned_rounded and has_gpu),
        *_shared(spec, layout, local_ranks),
        *_disk(spec, layout),
    )


def own_engine(spec: RunSpec) -> bool:
    """Whether the project's own SuperOffload runs, with its leaner worker, rather than one of DeepSpeed's CPU optimizers."""
    return spec.offload.mode == "superoffload" and spec.offload.engine == "so-tui"


def reduce_bucket_size(spec: RunSpec) -> int:
    """Parameters whose gradients ZeRO-3 reduces together. The project's own engine keeps it small: a gradient leaves for the host when its
    bucket is full, so small buckets start the copies and the Adam worker early.
    """
    return min(spec.offload.sub_group_size, OWN_LARGEST_BUCKET) if own_engine(spec) else spec.offload.sub_group_size


def gradient_buffer_bytes(spec: RunSpec) -> int:
    """Bytes per parameter of ZeRO-3's flat gradient partition: bf16, or fp32 where it sums over several micro-batches."""
    return 4 if spec.micro_steps > 1 else 2


def _states(spec: RunSpec, layout: StateLayout, gpu: Place, pinned_rounded: bool) -> Iterator[MemoryTerm]:
    kept, moved, whole = layout.gpu_numel, layout.cpu_numel, layout.numel
    buffer = gradient_buffer_bytes(spec)
    yield _term("weights", gpu, layout.weights_bytes, "exact", f"2 B x {_count(whole)} parameters (bf16)")
    if spec.offload.mode == "gpu":
        yield _term("masters", gpu, layout.masters_bytes("gpu"), "exact", f"4 B x {_count(kept)} (fp32 weights)")
        yield _term("moments", gpu, layout.moments_bytes("gpu"), "exact", f"8 B x {_count(kept)} (two fp32 moments)")
        yield _term("gradients", gpu, buffer * whole, "exact", f"{buffer} B x {_count(whole)}")
        largest = layout.largest_sub_group
        yield _term("fp32 gradients of one sub-group", gpu, 4 * largest, "exact", f"4 B x {_count(largest)}", phase="optimizer")
        return
    if kept:
        yield _term("states kept on the GPU", gpu, 16 * kept, "exact", f"16 B x {_count(kept)} (fp32 weights, gradients, two moments)")
    yield _term("masters", "node", layout.masters_bytes("cpu"), "exact", f"4 B x {_count(moved)} (fp32 weights)")
    if own_engine(spec):
        yield _term("exchange with the GPU", "node", 2 * moved, "exact", f"2 B x {_count(moved)} (bf16 gradients, then weights)")
        if spec.micro_steps > 1:
            yield _term("accumulated gradients", "node", layout.gradients_bytes("cpu"), "exact", f"4 B x {_count(moved)} (fp32)")
    else:
        yield _term("gradients", "node", layout.gradients_bytes("cpu"), "exact", f"4 B x {_count(moved)} (fp32), page-locked")
    yield _term("moments", "node", layout.moments_bytes("cpu"), "exact", f"8 B x {_count(moved)} (two fp32 moments)")
    if not own_engine(spec):
        yield _term("gradient partition", "node", buffer * whole, "exact", f"{buffer} B x {_count(whole)}, page-locked, of any ratio")
        if pinned_rounded:
            pieces = [4 * group.numel for group in layout.sub_groups if group.device == "cpu"] + [buffer * whole]
            lost = sum(_power_of_two(piece) - piece for piece in pieces)
            yield _term("rounding of page-locked blocks", "node", lost, "exact", "each to the next power of two by torch before 2.13")


def _communication(spec: RunSpec, layout: StateLayout, gpu: Place) -> Iterator[MemoryTerm]:
    ranks, bucket = layout.ranks, reduce_bucket_size(spec)
    yield _term("reduce bucket", gpu, 2 * bucket, "exact", f"2 B x {_count(bucket)} (reduce_bucket_size)")
    block = largest_block(spec.model.parameters)
    if ranks > 1:
        small = 0 if own_engine(spec) else _small_parameters(spec.model.parameters)
        yield _term(
            "small parameters kept whole", gpu, 2 * small, "exact", f"2 B x {_count(small)} (below {_count(PERSISTENCE_THRESHOLD)})"
        )
        head, last = layout.largest_parameter, _blocks_kept(block, layout) * block
        yield _term(
            "gathered head and last blocks", gpu, 2 * (head + last + PREFETCH_BUCKET), "estimate", _gathered(head, last), phase="loss"
        )
        yield _term("gathered blocks", gpu, 2 * (2 * block + PREFETCH_BUCKET), "estimate", _gathered(block, block), phase="backward")
    yield _term("gradients in flight", gpu, 2 * block, "estimate", f"2 B x {_count(block)} (one block)", phase="backward")
    share = partition_numel(layout.largest_parameter, ranks)
    yield _term(
        "temporaries of the largest parameter",
        gpu,
        2 * layout.largest_parameter + 6 * share,
        "estimate",
        f"2 B x {_count(layout.largest_parameter)} + (2 + 4) B x {_count(share)}",
        phase="optimizer",
    )


def _blocks_kept(block: int, layout: StateLayout) -> int:
    """Blocks that are still gathered when the loss is computed, because backward wants them soon."""
    if not block:
        return 0
    near = (REUSE_DISTANCE - 2 * layout.largest_parameter) // (3 * block) + 1
    return int(max(0, min(near, layout.parameters // block)))


def _gathered(first: int, second: int) -> str:
    return f"2 B x ({_count(first)} + {_count(second)} + {_count(PREFETCH_BUCKET)} fetched ahead)"


def _activations(spec: RunSpec, layout: StateLayout, shape: Architecture, gpu: Place) -> Iterator[MemoryTerm]:
    memory = constants().memory
    tokens = spec.train.micro_batch * spec.data.sequence_length
    policy = policy_of(spec.model)
    kept = kept_bytes(shape, policy)
    name = "checkpointed layer inputs" if policy == "full" else "kept activations"
    formula = f"{_count(tokens)} tokens x {_count(kept)} B x {shape.layers} layers (activation checkpointing: {policy})"
    scores = score_bytes(spec.model, shape, spec.data.sequence_length, spec.train.micro_batch)
    whole = tokens * kept * shape.layers + (scores * shape.layers if policy == "none" else 0)
    working = int(memory.block_share * tokens * max(0, block_bytes(shape) - (kept if policy != "full" else 0)))
    head = shape.vocabulary * shape.hidden
    phases: tuple[Phase, ...] = ("loss", "backward")
    for phase in phases:
        yield _term(name, gpu, whole, "exact" if policy == "full" else "estimate", formula, phase=phase)
    yield _term(
        "working set of one block",
        gpu,
        working,
        "calibrated",
        f"{_count(tokens)} tokens x {_count(block_bytes(shape))} B",
        phase="backward",
    )
    if scores:
        formula = f"6 B x {shape.heads} heads x {spec.data.sequence_length}^2 tokens x {spec.train.micro_batch} (eager attention)"
        yield _term("attention scores", gpu, scores, "estimate", formula, phase="backward")
    waiting = _gradients_waiting(spec, layout, shape, tokens * kept, working)
    if waiting:
        yield _term("gradients on their way", gpu, waiting, "estimate", "full buckets, less the layers that are done", phase="backward")
    needed = loss_bytes(tokens, shape.vocabulary, shape.hidden)
    formula = f"2 B x {_count(LOSS_KEPT_LOGITS)} logits kept + 6 B x {_count(LOSS_BLOCK_LOGITS)} at a time + 6 B x tokens x {shape.hidden}"
    yield _term("logits and loss", gpu, needed, "estimate", formula, phase="loss")
    hidden = 4 * tokens * shape.hidden
    for phase in phases:
        formula = f"2 B x {_count(head)}, from the loss until it is reduced"
        yield _term("gradient of the head", gpu, 2 * head, "exact", formula, phase=phase)
        yield _term("hidden states and their gradient", gpu, hidden, "exact", f"2 x 2 B x {_count(tokens)} x {shape.hidden}", phase=phase)


def _gradients_waiting(spec: RunSpec, layout: StateLayout, shape: Architecture, layer_bytes: int, working: int) -> int:
    """What gradients on their way add to the peak of backward. By the time that a bucket is full, the activations of the layers that
    filled it are gone; and where one bucket takes several layers, its flat copy exists between two of them, with half a working set.
    """
    block = largest_block(spec.model.parameters)
    bucket = min(reduce_bucket_size(spec), layout.parameters)
    buckets = OWN_BUCKETS_IN_FLIGHT if own_engine(spec) and layout.cpu_numel else 1
    layers_done = min(shape.layers, buckets * bucket / block) if block else 0
    freed = layers_done * layer_bytes + (0 if buckets > 1 else working / 2)
    return max(0, int(2 * buckets * bucket - freed))


def _gpu_overhead(spec: RunSpec, layout: StateLayout, moving: Sequence[MemoryTerm], has_gpu: bool) -> Iterator[MemoryTerm]:
    if not has_gpu:
        return
    memory = constants().memory
    yield _term("CUDA context", "gpu", memory.cuda_context_bytes, "calibrated", "driver and kernels")
    if layout.ranks > 1:
        yield _term("NCCL buffers", "gpu", memory.nccl_bytes, "calibrated", "channels between the GPUs")
    if spec.offload.mode == "superoffload" and spec.offload.engine == "deepspeed":
        formula = "its page-locked memory opens a second CUDA context"
        yield _term("context of the Adam worker", "gpu", memory.cuda_context_bytes, "calibrated", formula)
    changing = max(phase_bytes(moving, "gpu").values(), default=0)
    yield _term(
        "allocator slack", "gpu", int(memory.slack_share * changing), "calibrated", f"{memory.slack_share:.1%} of what comes and goes"
    )


def _host(spec: RunSpec, layout: StateLayout, states: Sequence[MemoryTerm], has_gpu: bool, pinned_rounded: bool) -> Iterator[MemoryTerm]:
    memory = constants().memory
    process = memory.cuda_process_bytes if has_gpu else memory.cpu_process_bytes
    yield _term("training process", "node", process, "calibrated", "Python, torch, DeepSpeed, data")
    later = sum(term.bytes for term in states if term.place == "node") if has_gpu else 0
    if own_engine(spec):
        yield _term("Adam worker", "node", memory.own_worker_bytes, "calibrated", "a second process, without torch")
    elif spec.offload.mode == "superoffload":
        yield _term("Adam worker", "node", memory.deepspeed_worker_bytes, "calibrated", "a second process with torch")
        scratch = 4 * layout.largest_sub_group
        yield _term("gradient copy of the Adam worker", "node", scratch, "exact", f"4 B x {_count(layout.largest_sub_group)}, page-locked")
        if pinned_rounded:
            lost = _power_of_two(scratch) - scratch
            yield _term("rounding of the Adam worker's block", "node", lost, "exact", "to the next power of two by torch before 2.13")
    if spec.checkpoint.at_end or spec.checkpoint.every_steps:
        kept = max((group.numel for group in layout.sub_groups if group.device == "gpu"), default=0)
        formula = f"4 B x {_count(kept)}, the largest sub-group on the GPU on its way to the disk"
        yield _term(SAVING, "node", 4 * kept, "estimate", formula)
    yield from _loading(layout, later)


def _loading(layout: StateLayout, later: int) -> Iterator[MemoryTerm]:
    """What loading needs beyond what the states will need later: a rank's share of the weights passes through the host, whole.

    That is when DeepSpeed makes one flat array of it. Before, a rank reads only its part of the checkpoint's files.
    """
    if (beyond := 2 * layout.numel + _READING_BYTES - later) > 0:
        formula = f"2 B x {_count(layout.numel)}, the weights of a rank on their way to the GPU"
        yield _term(LOADING, "node", beyond, "estimate", formula)


def _shared(spec: RunSpec, layout: StateLayout, local_ranks: int) -> Iterator[MemoryTerm]:
    if spec.offload.mode == "superoffload" and spec.offload.engine == "deepspeed":
        formula = f"8 B x {_count(layout.cpu_numel)} x {local_ranks} ranks (fp32 weights and gradients; part of the host memory above)"
        yield _term("masters and gradients in /dev/shm", "shm", 8 * layout.cpu_numel * local_ranks, "exact", formula)
    if local_ranks > 1:
        yield _term("messages between ranks", "shm", _MESSAGES_SHM_BYTES * local_ranks, "estimate", "buffers of the collectives")


def _disk(spec: RunSpec, layout: StateLayout) -> Iterator[MemoryTerm]:
    states = STATE_BYTES * layout.numel * layout.ranks
    formula = f"{STATE_BYTES} B x {_count(layout.numel)} x {layout.ranks} ranks (fp32 weights, two moments)"
    yield _term("one checkpoint", "disk", states, "exact", formula)
    if spec.checkpoint.export:
        yield _term("export", "disk", 2 * layout.parameters, "exact", f"2 B x {_count(layout.parameters)} (bf16)")


@lru_cache(maxsize=64)
def largest_block(blocks: tuple[ParameterBlock, ...]) -> int:
    """Parameters of the largest repeated block (a layer); 0 when nothing repeats."""
    return max((sum(prod(tensor.shape) for tensor in block.tensors) for block in blocks if block.repeat > 1), default=0)


@lru_cache(maxsize=64)
def _small_parameters(blocks: tuple[ParameterBlock, ...]) -> int:
    return sum(
        block.repeat * prod(tensor.shape)
        for block in blocks
        for tensor in block.tensors
        if not tensor.tied and prod(tensor.shape) < PERSISTENCE_THRESHOLD
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _term(
    name: str, place: Place, size: int, confidence: Confidence, formula: str, rank: int | None = None, phase: Phase | None = None
) -> MemoryTerm:
    return MemoryTerm(name=name, place=place, bytes=size, confidence=confidence, formula=formula, rank=rank, phase=phase)


def _fullest(terms: Sequence[MemoryTerm], place: Place) -> Phase | None:
    totals = phase_bytes(terms, place)
    return max(totals, key=lambda phase: totals[phase], default=None)


def _count(number: int) -> str:
    """A count for people: 14.77 B, 389 M, 16 k."""
    for unit, size in (("B", 1_000_000_000), ("M", 1_000_000), ("k", 10_000)):
        if number >= size:
            scaled = number / (1000 if unit == "k" else size)
            return f"{scaled:.2f} {unit}" if scaled < 100 else f"{scaled:.0f} {unit}"
    return str(number)
