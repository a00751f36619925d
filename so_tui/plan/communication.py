"""GPU memory of all-gathers and reductions: weights on their way in, gradients on their way out, and how far the host runs ahead.

ZeRO-3 all-gathers and reduces on streams of their own, and no other stream can use what torch's allocator holds for one. For DeepSpeed
0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator

from so_tui.model.sharding import (
    PERSISTENCE_THRESHOLD,
    live_parameters,
    partition_numel,
    run_ahead_parameters,
)
from so_tui.plan.constants import constants
from so_tui.plan.placement import Placement, own_engine
from so_tui.plan.terms import Formula, MemoryTerm, TermKind

BUCKETS_AHEAD = 3
"""Buckets of gradients by which the host may run ahead of the GPU: ZeRO-3 waits for all but two reductions before it begins another."""
ZEROOFFLOAD_BUCKETS_AHEAD = 2
"""The same where DeepSpeed casts and copies every gradient for its CPU optimizer."""
OWN_BUCKETS_IN_FLIGHT = BUCKETS_AHEAD + 3
"""Reduced buckets that exist at the same time in the project's own engine: launched ahead of the GPU, being copied to the host, and between
the two. Torch's memory history shows 5.4 to 5.8 on an H200."""
SHARED_BUCKETS_IN_FLIGHT = 4
"""The same on several ranks, each of which copies its shard of a bucket to the host. The history shows 3.3 to 3.6 on two H200s."""
NORM_CHUNK = 250_000_000
"""Elements that DeepSpeed casts to double precision at a time for the norm of a gradient that its CPU optimizer takes."""


def communication_terms(placement: Placement) -> Iterator[MemoryTerm]:
    """Yield the terms of reducing gradients and, on several ranks, of all-gathering weights."""
    layout, profile, gpu, bucket = (
        placement.layout,
        placement.profile,
        placement.gpu,
        placement.reduce_bucket,
    )
    ranks, layer = layout.ranks, profile.largest_layer
    yield MemoryTerm(
        TermKind.REDUCE_BUCKET,
        gpu,
        2 * bucket,
        "exact",
        Formula("2 B x {} (reduce_bucket_size)", (bucket,)),
    )
    yield _in_reduction(placement)
    if ranks > 1:
        small = 0 if own_engine(placement.spec) else profile.small_parameters
        formula = Formula("2 B x {} (below {})", (small, PERSISTENCE_THRESHOLD))
        yield MemoryTerm(TermKind.SMALL_PARAMETERS, gpu, 2 * small, "exact", formula)
        # Several parameters arrive in one flat buffer from which each is copied, the embedding and the head included.
        in_use = max(live_parameters(layer, ranks) + layer, 2 * layout.largest_parameter)
        live = min(layout.parameters, run_ahead_parameters(layer, ranks) + in_use)
        yield MemoryTerm(
            TermKind.GATHERED_PARAMETERS,
            gpu,
            2 * live,
            "estimate",
            Formula("2 B x {} (ahead, in use, and being copied)", (live,)),
        )
        pools = constants().memory.stream_pool_share
        formula = Formula(
            "{:.1f} x the all-gathered parameters, on streams whose memory others cannot use",
            (pools,),
        )
        yield MemoryTerm(
            TermKind.ALL_GATHER_POOLS, gpu, int(pools * 2 * live), "calibrated", formula
        )
    yield from _fetched_weights(placement)
    # Layers are gathered whole, and their gradients enter a bucket when the whole layer's backward is over.
    yield MemoryTerm(
        TermKind.GRADIENTS_IN_FLIGHT,
        gpu,
        2 * layer,
        "estimate",
        Formula("2 B x {} (a layer)", (layer,)),
        phase="backward",
    )
    share = partition_numel(layout.largest_parameter, ranks)
    # The norm of the largest gradient is computed before the first sub-group's gradients are cast.
    cast = 4 * layout.largest_sub_group if placement.spec.offload.mode == "gpu" else 0
    temporaries = max(0, 2 * layout.largest_parameter + 6 * share - cast)
    formula = Formula(
        "2 B x {} + (2 + 4) B x {}, beyond what comes after", (layout.largest_parameter, share)
    )
    yield MemoryTerm(
        TermKind.LARGEST_PARAMETER, gpu, temporaries, "estimate", formula, phase="optimizer"
    )


def _fetched_weights(placement: Placement) -> Iterator[MemoryTerm]:
    """Yield what the GPU holds of weights that are in host memory.

    One rank computes with the copies themselves. Several gather them, and each holds copies of its own shards until it has.
    """
    layout, layer = placement.layout, placement.profile.largest_layer
    if not placement.host_weights or not placement.has_gpu:
        return
    if layout.ranks > 1:
        share = partition_numel(
            max(live_parameters(layer, layout.ranks), layout.largest_parameter), layout.ranks
        )
        text, numel = "2 B x {} (shards that are about to be gathered)", min(layout.numel, share)
    else:
        in_use = live_parameters(layer, 1) + max(layer, layout.largest_parameter)
        text, numel = (
            "2 B x {} (ahead, in use, and being copied)",
            min(layout.numel, run_ahead_parameters(layer, 1) + in_use),
        )
    pools = constants().memory.stream_pool_share
    yield MemoryTerm(
        TermKind.FETCHED_WEIGHTS,
        placement.gpu,
        int((1 + pools) * 2 * numel),
        "estimate",
        Formula(text, (numel,)),
    )


def _in_reduction(placement: Placement) -> MemoryTerm:
    """Return the flat copies of buckets that ZeRO-3 reduces on its own stream. Their memory stays reserved for it in every phase."""
    spec, layout = placement.spec, placement.layout
    bucket = min(placement.reduce_bucket, layout.parameters)
    in_flight = OWN_BUCKETS_IN_FLIGHT if layout.ranks == 1 else SHARED_BUCKETS_IN_FLIGHT
    copies = in_flight if own_engine(spec) and layout.cpu_numel else 1
    text, values, size = "{} x 2 B x {}", [copies, bucket], copies * 2 * bucket
    if spec.gradient_accumulation_steps > 1 and not own_engine(spec):
        cast = partition_numel(bucket, layout.ranks)
        text, values, size = text + " + 4 B x {}", [*values, cast], size + 4 * cast
    if spec.offload.mode == "zerooffload" and layout.cpu_numel:
        share = partition_numel(layout.largest_parameter, layout.ranks)
        chunk = min(NORM_CHUNK, share)
        # The norm comes first, then a cast to fp32, which reuses its memory.
        if 8 * chunk >= 4 * share:
            text, values, size = text + " + 8 B x {} for a norm", [*values, chunk], size + 8 * chunk
        else:
            text, values, size = text + " + 4 B x {} for a cast", [*values, share], size + 4 * share
    formula = Formula(text + ", on a stream that shares no memory", tuple(values))
    return MemoryTerm(TermKind.BUCKETS_IN_REDUCTION, placement.gpu, size, "estimate", formula)


def gradients_waiting_bytes(placement: Placement, layer_bytes: int, working_bytes: int) -> int:
    """Return what gradients that wait for their reduction add to the peak of backward.

    They are the buckets by which the host runs ahead, less the activations (``layer_bytes`` each) of the layers that filled them.
    DeepSpeed's SuperOffload keeps the host waiting, and its buckets fill up between two layers.
    """
    spec, layout, block = placement.spec, placement.layout, placement.profile.largest_layer
    bucket = min(placement.reduce_bucket, layout.parameters)
    ahead, freed = BUCKETS_AHEAD, 0.0
    if layout.cpu_numel and spec.offload.mode == "zerooffload":
        ahead = ZEROOFFLOAD_BUCKETS_AHEAD
    elif layout.cpu_numel and not own_engine(spec):
        ahead, freed = 1, working_bytes / 2
    numel = min(layout.parameters, ahead * bucket)
    if layout.ranks > 1:
        numel = min(numel, run_ahead_parameters(block, layout.ranks) + bucket)
    layers_done = min(placement.profile.architecture.layers, numel / block) if block else 0
    return max(0, int(2 * numel - layers_done * layer_bytes - freed))
