"""Peak bytes of a run, term by term: on each GPU, on the host beside it, in /dev/shm and on disk.

Model states are exact: they follow from the parameter table. What a block's kernels keep, what libraries and contexts take, and what the
allocator cannot use are estimates, and say so. Formulas are for DeepSpeed 0.19.8 ZeRO-3 with bf16 weights.

Symbols: T tokens of a micro-batch, h hidden width, V vocabulary; n, Pc, Pg parameters of one rank, on the CPU, on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from so_tui.plan.architecture import Architecture
from so_tui.plan.layout import StateLayout, partition_numel
from so_tui.plan.loss import LOSS_BLOCK_LOGITS, LOSS_KEPT_LOGITS, loss_bytes
from so_tui.plan.types import Confidence, MemoryTerm, Place
from so_tui.spec.types import ParameterBlock, RunSpec

PERSISTENCE_THRESHOLD = 100_000
"""ZeRO-3 keeps parameters smaller than this whole on every rank (DeepSpeed's default)."""
PREFETCH_BUCKET = 50_000_000
"""Parameters that ZeRO-3 gathers ahead of need (DeepSpeed's default)."""
EAGER_ONLY = frozenset({"gpt_oss"})
"""Model types whose attention (sinks) none of the memory-saving kernels computes: ``auto`` means eager attention there."""
OWN_LARGEST_BUCKET = 100_000_000
"""Parameters in a reduce bucket of the project's own SuperOffload, at most."""
CHECKPOINT_BYTES = 14
"""On disk, per parameter: fp32 master and two moments, and the bf16 weights of an export."""

_CUDA_CONTEXT_BYTES = 600_000_000
_NCCL_BYTES = 500_000_000
_MESSAGES_SHM_BYTES = 16_000_000
_CUDA_PROCESS_BYTES = 2_500_000_000
_CPU_PROCESS_BYTES = 1_200_000_000
_WORKER_BYTES = 800_000_000
_OWN_WORKER_BYTES = 50_000_000
_SLACK = 0.07


def memory_terms(spec: RunSpec, layout: StateLayout, shape: Architecture, *, has_gpu: bool, local_ranks: int) -> tuple[MemoryTerm, ...]:
    """Every term for a spec whose mode is decided. ``local_ranks`` share this host; ``layout.ranks`` may be more.

    Without a GPU, what would be its memory is the host's: those terms get the place ``node``.
    """
    gpu: Place = "gpu" if has_gpu else "node"
    return (
        *_states(spec, layout, gpu),
        *_communication(spec, layout, gpu),
        *_activations(spec, layout, shape, gpu),
        *_gpu_overhead(spec, layout, shape, has_gpu),
        *_host(spec, layout, shape, has_gpu),
        *_shared(spec, layout, local_ranks),
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


def _states(spec: RunSpec, layout: StateLayout, gpu: Place) -> Iterator[MemoryTerm]:
    kept, moved, whole = layout.gpu_numel, layout.cpu_numel, layout.numel
    buffer = gradient_buffer_bytes(spec)
    yield _term("weights", gpu, layout.weights_bytes, "exact", f"2 B x {_count(whole)} parameters (bf16)")
    if spec.offload.mode == "gpu":
        yield _term("masters", gpu, layout.masters_bytes("gpu"), "exact", f"4 B x {_count(kept)} (fp32 weights)")
        yield _term("moments", gpu, layout.moments_bytes("gpu"), "exact", f"8 B x {_count(kept)} (two fp32 moments)")
        yield _term("gradients", gpu, buffer * whole, "exact", f"{buffer} B x {_count(whole)}")
        yield _term(
            "fp32 gradients of one sub-group", gpu, 4 * layout.largest_sub_group, "exact", f"4 B x {_count(layout.largest_sub_group)}"
        )
        return
    if kept:
        yield _term("states kept on the GPU", gpu, 16 * kept, "exact", f"16 B x {_count(kept)} (fp32 weights, gradients, two moments)")
    yield _term("masters", "node", layout.masters_bytes("cpu"), "exact", f"4 B x {_count(moved)} (fp32 weights)")
    if own_engine(spec):
        yield _term("exchange with the GPU", "node", 2 * moved, "exact", f"2 B x {_count(moved)} (bf16 gradients, then weights)")
        if spec.micro_steps > 1:
            yield _term("accumulated gradients", "node", layout.gradients_bytes("cpu"), "exact", f"4 B x {_count(moved)} (fp32)")
    else:
        yield _term("gradients", "node", layout.gradients_bytes("cpu"), "exact", f"4 B x {_count(moved)} (fp32)")
    yield _term("moments", "node", layout.moments_bytes("cpu"), "exact", f"8 B x {_count(moved)} (two fp32 moments)")
    if not own_engine(spec):
        yield _term("gradient partition", "node", buffer * whole, "exact", f"{buffer} B x {_count(whole)}, page-locked, of any ratio")


def _communication(spec: RunSpec, layout: StateLayout, gpu: Place) -> Iterator[MemoryTerm]:
    ranks, bucket = layout.ranks, reduce_bucket_size(spec)
    yield _term("reduce bucket", gpu, 2 * bucket, "exact", f"2 B x {_count(bucket)} (reduce_bucket_size)")
    block = largest_block(spec.model.parameters)
    if ranks > 1:
        small = _small_parameters(spec.model.parameters)
        staging = int(2 * min(bucket, layout.parameters) * (1 + 1 / ranks))
        live = max(2 * block + PREFETCH_BUCKET, layout.largest_parameter)
        live = min(live, layout.parameters)
        yield _term(
            "small parameters kept whole", gpu, 2 * small, "exact", f"2 B x {_count(small)} (below {_count(PERSISTENCE_THRESHOLD)})"
        )
        yield _term("reduce-scatter staging", gpu, staging, "estimate", f"2 B x bucket x (1 + 1/{ranks})")
        yield _term("gathered parameters", gpu, 2 * live, "estimate", f"2 B x {_count(live)} (two blocks and what is fetched ahead)")
    in_flight = max(block, layout.largest_parameter)
    yield _term("gradients in flight", gpu, 2 * in_flight, "estimate", f"2 B x {_count(in_flight)} (one block, or the largest parameter)")
    if own_engine(spec) and layout.cpu_numel:
        waiting = min(bucket, layout.numel) * 2
        yield _term("gradients waiting for the link", gpu, 2 * waiting, "estimate", f"2 B x {_count(waiting)} (two buckets)")
    if ranks > 1 or spec.offload.mode == "zerooffload":
        share = partition_numel(layout.largest_parameter, ranks)
        yield _term("temporaries of the largest parameter", gpu, 6 * share, "estimate", f"(2 + 4) B x {_count(share)}")


def _activations(spec: RunSpec, layout: StateLayout, shape: Architecture, gpu: Place) -> Iterator[MemoryTerm]:
    tokens = spec.train.micro_batch * spec.data.sequence_length
    per_token = block_bytes_per_token(shape)
    if spec.model.activation_checkpointing != "none":
        inputs = 2 * tokens * shape.hidden * shape.layers
        formula = f"2 B x {_count(tokens)} tokens x {shape.hidden} x {shape.layers} layers"
        yield _term("checkpointed layer inputs", gpu, inputs, "exact", formula)
        if spec.model.activation_checkpointing == "selective":
            kept = product_bytes_per_token(shape)
            formula = f"{_count(tokens)} tokens x {_count(kept)} B x {shape.layers} layers"
            yield _term("results of products and attention", gpu, tokens * kept * shape.layers, "exact", formula)
        yield _term("working set of one block", gpu, tokens * per_token, "estimate", f"{_count(tokens)} tokens x {_count(per_token)} B")
    else:
        formula = f"{_count(tokens)} tokens x {_count(per_token)} B x {shape.layers} layers (no activation checkpointing)"
        yield _term("activations of all blocks", gpu, tokens * per_token * shape.layers, "estimate", formula)
    if spec.model.attention == "eager" or (spec.model.attention == "auto" and shape.model_type in EAGER_ONLY):
        scores = 6 * shape.heads * spec.data.sequence_length**2 * spec.train.micro_batch
        formula = f"6 B x {shape.heads} heads x {spec.data.sequence_length}^2 tokens x {spec.train.micro_batch} (eager attention)"
        yield _term("attention scores", gpu, scores, "estimate", formula)
    needed = loss_bytes(tokens, shape.vocabulary, shape.hidden)
    formula = f"2 B x {_count(LOSS_KEPT_LOGITS)} logits kept + 6 B x {_count(LOSS_BLOCK_LOGITS)} at a time + 6 B x tokens x {shape.hidden}"
    yield _term("logits and loss", gpu, needed, "estimate", formula)
    head = shape.vocabulary * shape.hidden
    yield _term("gradient of the head", gpu, 2 * head, "exact", f"2 B x {_count(head)}, from the loss until it is reduced")


def _gpu_overhead(spec: RunSpec, layout: StateLayout, shape: Architecture, has_gpu: bool) -> Iterator[MemoryTerm]:
    if not has_gpu:
        return
    several = layout.ranks > 1
    context = _CUDA_CONTEXT_BYTES + (_NCCL_BYTES if several else 0)
    yield _term("CUDA context", "gpu", context, "estimate", "driver and kernels" + (", NCCL buffers" if several else ""))
    if spec.offload.mode == "superoffload" and spec.offload.engine == "deepspeed":
        yield _term(
            "context of the Adam worker", "gpu", _CUDA_CONTEXT_BYTES, "estimate", "its page-locked memory opens a second CUDA context"
        )
    moving = sum(term.bytes for part in (_communication(spec, layout, "gpu"), _activations(spec, layout, shape, "gpu")) for term in part)
    yield _term("allocator slack", "gpu", int(_SLACK * moving), "estimate", f"{_SLACK:.0%} of everything that comes and goes")


def _host(spec: RunSpec, layout: StateLayout, shape: Architecture, has_gpu: bool) -> Iterator[MemoryTerm]:
    process = _CUDA_PROCESS_BYTES if has_gpu else _CPU_PROCESS_BYTES
    yield _term("training process", "node", process, "estimate", "Python, torch, DeepSpeed, data")
    if own_engine(spec):
        yield _term("Adam worker", "node", _OWN_WORKER_BYTES, "estimate", "a second process, without torch")
    elif spec.offload.mode == "superoffload":
        yield _term("Adam worker", "node", _WORKER_BYTES, "estimate", "a second process with torch")
        scratch = 4 * layout.largest_sub_group
        yield _term("gradient copy of the Adam worker", "node", scratch, "exact", f"4 B x {_count(layout.largest_sub_group)}, page-locked")
    if spec.model.weights == "pretrained":
        later = sum(term.bytes for term in _states(spec, layout, "gpu") if term.place == "node")
        if (beyond := 2 * layout.parameters - later) > 0:
            # MXFP4 checkpoints are dequantised by every rank for itself; others are merged by rank 0, which hands out the shares.
            rank = None if shape.model_type == "gpt_oss" else 0
            formula = f"2 B x {_count(layout.parameters)}, whole in memory before the states exist"
            yield _term("loading, beyond what comes later", "node", beyond, "estimate", formula, rank=rank)


def _shared(spec: RunSpec, layout: StateLayout, local_ranks: int) -> Iterator[MemoryTerm]:
    if spec.offload.mode == "superoffload" and spec.offload.engine == "deepspeed":
        formula = f"8 B x {_count(layout.cpu_numel)} x {local_ranks} ranks (fp32 weights and gradients; part of the host memory above)"
        yield _term("masters and gradients in /dev/shm", "shm", 8 * layout.cpu_numel * local_ranks, "exact", formula)
    if local_ranks > 1:
        yield _term("messages between ranks", "shm", _MESSAGES_SHM_BYTES * local_ranks, "estimate", "buffers of the collectives")
    formula = f"{CHECKPOINT_BYTES} B x {_count(layout.parameters)} (fp32 weights, two moments, bf16 export)"
    yield _term("one checkpoint", "disk", CHECKPOINT_BYTES * layout.parameters, "estimate", formula)


def block_bytes_per_token(shape: Architecture) -> int:
    """Bytes that recompute and backward of one block keep per token: norms and residuals, q/k/v and their gradients, SwiGLU.

    24 h + 6 (dq + 2 dkv) + 12 I for memory-saving attention; experts by those a token meets, plus 4 h of routing copies for each.
    """
    attention = 6 * (shape.query_width + 2 * shape.key_value_width)
    routing = 4 * shape.hidden * shape.experts_per_token
    return 24 * shape.hidden + attention + 12 * shape.active_intermediate + routing


def product_bytes_per_token(shape: Architecture) -> int:
    """Bytes that ``selective`` keeps per token and layer beside the layer's input: 2 B for every element of q, k, v, the attention's
    result, the output projection, gate and up; of expert layers only what attention has, since expert products are computed again.
    """
    feed_forward = 0 if shape.experts else 2 * shape.intermediate
    return 2 * (2 * shape.query_width + 2 * shape.key_value_width + shape.hidden + feed_forward)


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


def _term(name: str, place: Place, size: int, confidence: Confidence, formula: str, rank: int | None = None) -> MemoryTerm:
    return MemoryTerm(name=name, place=place, bytes=size, confidence=confidence, formula=formula, rank=rank)


def _count(number: int) -> str:
    """A count for people: 14.77 B, 389 M, 16 k."""
    for unit, size in (("B", 1_000_000_000), ("M", 1_000_000), ("k", 10_000)):
        if number >= size:
            scaled = number / (1000 if unit == "k" else size)
            return f"{scaled:.2f} {unit}" if scaled < 100 else f"{scaled:.0f} {unit}"
    return str(number)
