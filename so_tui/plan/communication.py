"""What ranks gather from each other and reduce: weights on their way in, gradients on their way out, and how far the host may be ahead.

ZeRO-3 gathers and reduces on streams of their own, and what torch's allocator holds for one stream, no other can use. For DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from so_tui.model.architecture import Architecture
from so_tui.model.layout import StateLayout
from so_tui.model.sharding import OWN_LARGEST_BUCKET, partition_numel
from so_tui.plan.constants import constants
from so_tui.plan.terms import count, own_engine
from so_tui.plan.types import MemoryTerm, Place
from so_tui.spec.types import ParameterBlock, RunSpec

PERSISTENCE_THRESHOLD = 100_000
"""ZeRO-3 keeps parameters smaller than this whole on every rank (DeepSpeed's default); the project's own engine keeps none."""
GATHERED_AHEAD = 400_000_000
"""Parameters that several ranks gather ahead of the layer that computes, and by which the host may be ahead of the GPU; where a layer is
larger, a layer.
"""
BUCKETS_AHEAD = 3
"""Buckets of gradients by which the host may be ahead of the GPU: ZeRO-3 waits for all but two reductions before it begins another."""
ZEROOFFLOAD_BUCKETS_AHEAD = 2
"""The same where DeepSpeed casts and copies every gradient for its CPU optimizer."""
OWN_BUCKETS_IN_FLIGHT = BUCKETS_AHEAD + 3
"""Reduced buckets that exist at once in the project's own engine: those the GPU has yet to hear of, those on their way to the host, and
what lies between them. Torch's memory history shows 5.4 to 5.8 on an H200."""
SHARED_BUCKETS_IN_FLIGHT = 4
"""The same on several ranks, each of which copies its share of a bucket to the host. The history shows 3.3 to 3.6 on two H200s."""
NORM_CHUNK = 250_000_000
"""Elements that DeepSpeed casts to double precision at a time, for the norm of a gradient that its CPU optimizer takes."""


def reduce_bucket_size(spec: RunSpec) -> int:
    """Parameters whose gradients ZeRO-3 reduces together. The project's own engine keeps it small: a gradient leaves for the host when its
    bucket is full, so small buckets start the copies and the Adam worker early.
    """
    return min(spec.offload.sub_group_size, OWN_LARGEST_BUCKET) if own_engine(spec) else spec.offload.sub_group_size


def live_parameters(blocks: tuple[ParameterBlock, ...]) -> int:
    """Up to how many gathered parameters ZeRO-3 gathers another one: the layer that computes and the next, more where layers are small."""
    return max(2 * largest_block(blocks), GATHERED_AHEAD)


def run_ahead_parameters(blocks: tuple[ParameterBlock, ...]) -> int:
    """Parameters by which the host may be ahead of the GPU. What it has passed is gathered until the GPU has passed it too."""
    return max(largest_block(blocks), GATHERED_AHEAD)


def communication_terms(spec: RunSpec, layout: StateLayout, gpu: Place) -> Iterator[MemoryTerm]:
    ranks, bucket, layer = layout.ranks, reduce_bucket_size(spec), largest_block(spec.model.parameters)
    yield MemoryTerm("reduce bucket", gpu, 2 * bucket, "exact", f"2 B x {count(bucket)} (reduce_bucket_size)")
    yield _reduced(spec, layout, gpu)
    if ranks > 1:
        small = 0 if own_engine(spec) else _small_parameters(spec.model.parameters)
        yield MemoryTerm(
            "small parameters kept whole", gpu, 2 * small, "exact", f"2 B x {count(small)} (below {count(PERSISTENCE_THRESHOLD)})"
        )
        # Several parameters arrive in one flat piece, from which each is copied; the embedding and the head too.
        lead = run_ahead_parameters(spec.model.parameters)
        live = min(layout.parameters, lead + max(live_parameters(spec.model.parameters) + layer, 2 * layout.largest_parameter))
        yield MemoryTerm("gathered parameters", gpu, 2 * live, "estimate", f"2 B x {count(live)} (ahead, in use, and being copied)")
        pools = constants().memory.stream_pool_share
        formula = f"{pools:.1f} x what is gathered, on streams whose memory others cannot use"
        yield MemoryTerm("memory pools of the gathering", gpu, int(pools * 2 * live), "calibrated", formula)
    # Layers are gathered whole, and their gradients go into a bucket when the whole layer's backward is over.
    yield MemoryTerm("gradients in flight", gpu, 2 * layer, "estimate", f"2 B x {count(layer)} (a layer)", phase="backward")
    share = partition_numel(layout.largest_parameter, ranks)
    # The norm of the largest gradient is over before the first sub-group's gradients are cast.
    cast = 4 * layout.largest_sub_group if spec.offload.mode == "gpu" else 0
    temporaries = max(0, 2 * layout.largest_parameter + 6 * share - cast)
    formula = f"2 B x {count(layout.largest_parameter)} + (2 + 4) B x {count(share)}, beyond what comes after"
    yield MemoryTerm("temporaries of the largest parameter", gpu, temporaries, "estimate", formula, phase="optimizer")


def _reduced(spec: RunSpec, layout: StateLayout, gpu: Place) -> MemoryTerm:
    """ZeRO-3 reduces a flat copy of a bucket on a stream of its own. What torch's allocator holds for one stream, no other can use: the
    room for these copies stays taken in every phase.
    """
    bucket = min(reduce_bucket_size(spec), layout.parameters)
    in_flight = OWN_BUCKETS_IN_FLIGHT if layout.ranks == 1 else SHARED_BUCKETS_IN_FLIGHT
    copies = in_flight if own_engine(spec) and layout.cpu_numel else 1
    cast = 4 * partition_numel(bucket, layout.ranks) if spec.gradient_accumulation_steps > 1 and not own_engine(spec) else 0
    formula = f"{copies} x 2 B x {count(bucket)}" + (f" + 4 B x {count(partition_numel(bucket, layout.ranks))}" if cast else "")
    norm = 0
    if spec.offload.mode == "zerooffload" and layout.cpu_numel:
        share = partition_numel(layout.largest_parameter, layout.ranks)
        chunk = min(NORM_CHUNK, share)
        # Norm first, then a cast to fp32, which finds its room there.
        norm = max(8 * chunk, 4 * share)
        formula += f" + 8 B x {count(chunk)} for a norm" if norm == 8 * chunk else f" + 4 B x {count(share)} for a cast"
    whole = copies * 2 * bucket + cast + norm
    return MemoryTerm("buckets being reduced", gpu, whole, "estimate", f"{formula}, on a stream that shares no memory")


def gradients_waiting_bytes(spec: RunSpec, layout: StateLayout, shape: Architecture, layer_bytes: int, working: int) -> int:
    """What gradients on their way add to the peak of backward: those of the buckets by which the host is ahead, less the activations of the
    layers that filled them. DeepSpeed's SuperOffload keeps the host waiting, and a bucket of its is full between two layers.
    """
    block = largest_block(spec.model.parameters)
    bucket = min(reduce_bucket_size(spec), layout.parameters)
    ahead, freed = BUCKETS_AHEAD, 0.0
    if layout.cpu_numel and spec.offload.mode == "zerooffload":
        ahead = ZEROOFFLOAD_BUCKETS_AHEAD
    elif layout.cpu_numel and not own_engine(spec):
        ahead, freed = 1, working / 2
    numel = min(layout.parameters, ahead * bucket)
    if layout.ranks > 1:
        numel = min(numel, run_ahead_parameters(spec.model.parameters) + bucket)
    layers_done = min(shape.layers, numel / block) if block else 0
    return max(0, int(2 * numel - layers_done * layer_bytes - freed))


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
