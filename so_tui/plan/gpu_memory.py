"""Peak bytes of a run, term by term: on each GPU, on the host beside it, in /dev/shm and on disk.

Model states are exact: they follow from the parameter table. Memory of libraries, contexts and the
allocator is calibrated: measured and stored as data (``constants.json``). The rest is derived from
what the trainer does, and marked as an estimate. Some terms exist in one phase of a step only; the
fullest phase counts, and only its terms are listed. For DeepSpeed 0.19.8 ZeRO-3 with bf16 weights.

Symbols: T tokens of a micro-batch, h hidden width, V vocabulary; n, Pc, Pg parameters of one rank,
on the CPU, on the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from so_tui.model.flops import LOSS_BLOCK_LOGITS, LOSS_KEPT_LOGITS, loss_bytes
from so_tui.model.profile import (
    MLP_TILE_TOKENS,
)
from so_tui.model.sharding import (
    PERSISTENCE_THRESHOLD,
    StatesFormat,
    live_parameters,
    moments_bytes,
    partition_numel,
    run_ahead_parameters,
)
from so_tui.plan.host_memory import host_terms
from so_tui.plan.placement import Placement, power_of_two
from so_tui.plan.rates import constants
from so_tui.plan.terms import ACTIVATION_STACK, MemoryTerm, Phase, TermKind, Terms, sized, term
from so_tui.units import count

# GPU memory of all-gathers and reductions: weights on their way in, gradients on their way out,
# and how far the host runs ahead.
#
# ZeRO-3 all-gathers and reduces on streams of their own, and no other stream can use what torch's
# allocator holds for one. For DeepSpeed 0.19.8.


BUCKETS_AHEAD = 3
"""Buckets of gradients by which the host may run ahead of the GPU: ZeRO-3 waits for all but two
reductions before it begins another.
"""
ZEROOFFLOAD_BUCKETS_AHEAD = 2
"""The same where DeepSpeed casts and copies every gradient for its CPU optimizer."""
OWN_BUCKETS_IN_FLIGHT = BUCKETS_AHEAD + 3
"""Reduced buckets that exist at the same time in the project's own engine: launched ahead of the
GPU, being copied to the host, and between the two. Torch's memory history shows 5.4 to 5.8 on an
H200.
"""
SHARED_BUCKETS_IN_FLIGHT = 4
"""The same on several ranks, each of which copies its shard of a bucket to the host. The history
shows 3.3 to 3.6 on two H200s.
"""
NORM_CHUNK = 250_000_000
"""Elements that DeepSpeed casts to double precision at a time for the norm of a gradient that its
CPU optimizer takes.
"""


def _communication_terms(placement: Placement) -> Terms:
    """Yield the terms of reducing gradients and, on several ranks, of all-gathering weights."""
    layout, profile, gpu = placement.layout, placement.profile, placement.gpu
    ranks, layer, largest = layout.ranks, profile.largest_layer, profile.largest_parameter
    yield sized("reduce-bucket", gpu, "exact", 2, placement.reduce_bucket, " (reduce_bucket_size)")
    yield _in_reduction(placement)
    if ranks > 1:
        small = 0 if placement.spec.offload.own_engine else profile.small_parameters
        note = f" (below {count(PERSISTENCE_THRESHOLD)})"
        yield sized("small-parameters", gpu, "exact", 2, small, note)
        # Several parameters arrive in one flat buffer from which each is copied, the embedding and
        # the head included.
        in_use = max(live_parameters(layer, ranks) + layer, 2 * largest)
        live = min(profile.parameters, run_ahead_parameters(layer, ranks) + in_use)
        note = " (ahead, in use, and being copied)"
        yield sized("gathered-parameters", gpu, "estimate", 2, live, note)
        pools = constants().memory.stream_pool_share
        yield term(
            "all-gather-pools",
            gpu,
            int(pools * 2 * live),
            "calibrated",
            "{:.1f} x the all-gathered parameters, on streams whose memory others cannot use",
            pools,
        )
    yield from _fetched_weights(placement)
    # Layers are gathered whole, and their gradients enter a bucket when the whole layer's backward
    # is over.
    yield sized("gradients-in-flight", gpu, "estimate", 2, layer, " (a layer)", phase="backward")
    share = partition_numel(largest, ranks)
    # The norm of the largest gradient is computed before the first sub-group's gradients are cast.
    cast = 4 * layout.largest_sub_group if placement.spec.offload.mode == "gpu" else 0
    yield term(
        "largest-parameter",
        gpu,
        max(0, 2 * largest + 6 * share - cast),
        "estimate",
        "2 B x {} + (2 + 4) B x {}, beyond what comes after",
        largest,
        share,
        phase="optimizer",
    )


def _fetched_weights(placement: Placement) -> Terms:
    """Yield what the GPU holds of weights that are in host memory.

    One rank computes with the copies themselves. Several gather them, and each holds copies of its
    own shards until it has.
    """
    layout, profile = placement.layout, placement.profile
    layer, largest = profile.largest_layer, profile.largest_parameter
    if not placement.host_weights or not placement.has_gpu:
        return
    live = live_parameters(layer, layout.ranks)
    if layout.ranks > 1:
        text = "2 B x {} (shards that are about to be gathered)"
        held = partition_numel(max(live, largest), layout.ranks)
    else:
        text = "2 B x {} (ahead, in use, and being copied)"
        held = run_ahead_parameters(layer, 1) + live + max(layer, largest)
    numel = min(layout.numel, held)
    pools = constants().memory.stream_pool_share
    yield term(
        "fetched-weights", placement.gpu, int((1 + pools) * 2 * numel), "estimate", text, numel
    )


def _in_reduction(placement: Placement) -> MemoryTerm:
    """Return the flat copies of buckets that ZeRO-3 reduces on its own stream. Their memory stays
    reserved for it in every phase.
    """
    spec, layout, profile = placement.spec, placement.layout, placement.profile
    bucket = min(placement.reduce_bucket, profile.parameters)
    in_flight = OWN_BUCKETS_IN_FLIGHT if layout.ranks == 1 else SHARED_BUCKETS_IN_FLIGHT
    copies = in_flight if spec.offload.own_engine and layout.cpu_numel else 1
    more: list[tuple[str, int, int]] = []
    if spec.gradient_accumulation_steps > 1 and not spec.offload.own_engine:
        more.append((" + 4 B x {}", 4, partition_numel(bucket, layout.ranks)))
    if spec.offload.mode == "zerooffload" and layout.cpu_numel:
        share = partition_numel(profile.largest_parameter, layout.ranks)
        chunk = min(NORM_CHUNK, share)
        # The norm comes first, then a cast to fp32, which reuses its memory.
        norm, cast = (" + 8 B x {} for a norm", 8, chunk), (" + 4 B x {} for a cast", 4, share)
        more.append(norm if 8 * chunk >= 4 * share else cast)
    return term(
        "buckets-in-reduction",
        placement.gpu,
        copies * 2 * bucket + sum(each * numel for _, each, numel in more),
        "estimate",
        f"{{}} x 2 B x {{}}{''.join(text for text, _, _ in more)}, on a stream that shares no "
        "memory",
        copies,
        bucket,
        *(numel for _, _, numel in more),
    )


def _gradients_waiting_bytes(placement: Placement, layer_bytes: int, working_bytes: int) -> int:
    """Return what gradients that wait for their reduction add to the peak of backward.

    They are the buckets by which the host runs ahead, less the activations (``layer_bytes`` each)
    of the layers that filled them. DeepSpeed's SuperOffload keeps the host waiting, and its buckets
    fill up between two layers.
    """
    spec, layout, profile = placement.spec, placement.layout, placement.profile
    block, bucket = profile.largest_layer, min(placement.reduce_bucket, profile.parameters)
    ahead, freed = BUCKETS_AHEAD, 0.0
    if layout.cpu_numel and spec.offload.mode == "zerooffload":
        ahead = ZEROOFFLOAD_BUCKETS_AHEAD
    elif layout.cpu_numel and not spec.offload.own_engine:
        ahead, freed = 1, working_bytes / 2
    numel = min(profile.parameters, ahead * bucket)
    if layout.ranks > 1:
        numel = min(numel, run_ahead_parameters(block, layout.ranks) + bucket)
    layers_done = min(profile.architecture.layers, numel / block) if block else 0
    return max(0, int(2 * numel - layers_done * layer_bytes - freed))


LOST_EXPERT_TENSORS = 3
"""GPU memory lost between activations as large as the gradients of a layer's experts, in multiples
of the largest of these tensors. Measured in mixtures of experts on an H200.
"""
LOST_BETWEEN_RESULTS = 0.3
"""GPU memory lost between attention's results where a layer keeps nothing else, as a share of them.
Measured on an H200 (4 billion parameters, one sequence of 65,536 tokens): 5.3 GiB beside 18.3.
"""
MOST_LOST_BETWEEN_RESULTS_BYTES = 6 << 30
"""It does not grow with the length: of 131,072 tokens 4.4 GiB were lost beside 36.6, and with 8
billion parameters 1.7 GiB beside 32.5.
"""
HELD: dict[Phase, int] = {"loss": 1, "backward": 2}
"""Layers whose input, or attention's results, the GPU holds where the others' are on the host: the
last one, and in backward also the one whose are being fetched.
"""
GRADIENT_SUM_BYTES = 6
"""Per parameter of a feed-forward block in tiles: the fp32 sum of its gradient, and one tile's."""
_MOMENTS: dict[StatesFormat, str] = {
    "fp32": "two fp32 moments",
    "bf16-moments": "two bf16 moments",
    "int8-moments": "two 8-bit moments and their exponents",
}
_STORED_PHASES: tuple[Phase, ...] = ("loss", "backward")
"""Phases in which activations are stored."""


def memory_terms(placement: Placement) -> tuple[MemoryTerm, ...]:
    """Return the terms of the peak: those of the fullest phase, and those that are there in every
    phase.
    """
    terms = _all_terms(placement)
    totals = {location: _phase_bytes(terms, location) for location in ("gpu", "node")}
    fullest = {
        (location, max(phases, key=phases.__getitem__))
        for location, phases in totals.items()
        if phases
    }
    return tuple(
        found for found in terms if not found.phase or (found.location, found.phase) in fullest
    )


def _phase_bytes(terms: Sequence[MemoryTerm], location: str) -> dict[Phase, int]:
    """Return the bytes of one rank at the peak of each phase, from ``_all_terms``."""
    totals: Counter[Phase | None] = Counter()
    for found in terms:
        if found.location == location and found.rank is None:
            totals[found.phase] += found.bytes
    always = totals.pop(None, 0)
    return {phase: always + size for phase, size in totals.items() if phase}


def _all_terms(placement: Placement) -> tuple[MemoryTerm, ...]:
    """Return every term of every phase."""
    moving = (*_communication_terms(placement), *_activations(placement))
    states = tuple(_states(placement))
    return (
        *states,
        *moving,
        *_gpu_overhead(placement, moving),
        *host_terms(placement, states),
    )


def _states(placement: Placement) -> Terms:
    layout, gpu, buffer = placement.layout, placement.gpu, placement.gradient_bytes
    on_gpu, whole, moved = layout.gpu_numel, layout.numel, placement.host_weights
    bf16 = " parameters (bf16)"
    if moved < whole:
        yield sized("weights", gpu, "exact", 2, whole - moved, bf16)
    if moved:
        yield sized("host-weights", "node", "exact", 2, moved, f"{bf16}, pinned")
    if placement.spec.offload.mode == "gpu":
        yield sized("master-weights", gpu, "exact", 4, on_gpu, " (fp32 weights)")
        yield sized("moments", gpu, "exact", 8, on_gpu, " (two fp32 moments)")
        yield sized("gradients", gpu, "exact", buffer, whole)
        largest = layout.largest_sub_group
        yield sized("sub-group-gradients", gpu, "exact", 4, largest, phase="optimizer")
        return
    if on_gpu:
        note = " (fp32 weights, gradients, two moments)"
        yield sized("states-on-gpu", gpu, "exact", 16, on_gpu, note)
    yield from _offloaded_states(placement)


def _offloaded_states(placement: Placement) -> Terms:
    layout, numel, spec = placement.layout, placement.layout.cpu_numel, placement.spec
    yield sized("master-weights", "node", "exact", 4, numel, " (fp32 weights)")
    if spec.offload.own_engine:
        staged = "bf16 gradients" if placement.host_weights else "bf16 gradients, then weights"
        yield sized("staging-buffer", "node", "exact", 2, numel, f" ({staged})")
        if spec.gradient_accumulation_steps > 1:
            yield sized("accumulated-gradients", "node", "exact", 4, numel, " (fp32)")
        states = spec.offload.states
        each, note = moments_bytes(states), f" ({_MOMENTS[states]})"
        yield sized("moments", "node", "exact", each, numel, note)
        return
    yield sized("gradients", "node", "exact", 4, numel, " (fp32), pinned")
    yield sized("moments", "node", "exact", 8, numel, " (two fp32 moments)")
    buffer, note = placement.gradient_bytes, ", pinned, of any ratio"
    yield sized("gradient-partition", "node", "exact", buffer, layout.numel, note)
    if placement.pinned_rounded:
        pieces = [*(4 * group.numel for group in layout.cpu_groups), buffer * layout.numel]
        if placement.host_weights:  # one block for each parameter group
            pieces += [
                2 * sum(group.numel for group in layout.sub_groups if group.decay == decay)
                for decay in (True, False)
            ]
        yield term(
            "pinned-rounding",
            "node",
            sum(power_of_two(piece) - piece for piece in pieces),
            "exact",
            "each to the next power of two by torch before 2.13",
        )


def _activations(placement: Placement) -> Terms:
    spec, profile, gpu, tokens = placement.spec, placement.profile, placement.gpu, placement.tokens
    shape, policy = profile.architecture, spec.model.policy
    stored = profile.stored_bytes(policy)
    inputs = shape.input_bytes if spec.model.offloads_inputs else 0
    results = sum(shape.result_bytes) if spec.model.offloads_results else 0
    kept = stored - inputs - results
    squared = spec.data.sequence_length**2 * spec.train.micro_batch
    scores = 6 * shape.heads * squared if profile.eager_attention else 0
    whole = tokens * kept * shape.layers + (scores * shape.layers if policy == "none" else 0)
    if inputs:
        yield from _on_host(placement, inputs, shape.layers, "offloaded-inputs", "layer-inputs")
    if results:
        attending = shape.layers - shape.other_layers
        yield from _on_host(placement, results, attending, "offloaded-results", "attention-results")
    exact = policy == "full" and not inputs
    for phase in _STORED_PHASES if whole else ():
        yield term(
            "layer-inputs" if exact else "activations",
            gpu,
            whole,
            "exact" if exact else "estimate",
            "{} tokens x {} B x {} layers (activation checkpointing: {})",
            tokens,
            kept,
            shape.layers,
            policy,
            phase=phase,
        )
    working = _working_set(placement, stored if policy != "full" else 0)
    yield working
    if scores:
        yield term(
            "attention-scores",
            gpu,
            scores,
            "estimate",
            "6 B x {} heads x {}^2 tokens x {} (eager attention)",
            shape.heads,
            str(spec.data.sequence_length),
            spec.train.micro_batch,
            phase="backward",
        )
    waiting = _gradients_waiting_bytes(placement, tokens * kept, working.bytes)
    if waiting:
        yield term(
            "gradients-waiting",
            gpu,
            waiting,
            "estimate",
            "full buckets, less the activations of layers that are done",
            phase="backward",
        )
    if spec.train.sequence_parallel > 1:
        yield term(
            "sequence-exchange",
            gpu,
            4 * tokens * shape.query_width,
            "estimate",
            "2 x 2 B x {} tokens x {}, sent and received",
            tokens,
            shape.query_width,
            phase="backward",
        )
    if shape.experts:
        yield from _expert_terms(placement)
    yield from _loss_terms(placement)


def _working_set(placement: Placement, stored: int) -> MemoryTerm:
    """Return what recomputation and backward of one block hold beyond the ``stored`` bytes per
    token.
    """
    profile, tokens, share = placement.profile, placement.tokens, constants().memory.block_share
    if not placement.tiled:
        block = profile.block_bytes
        return term(
            "block-working-set",
            placement.gpu,
            int(share * tokens * max(0, block - stored)),
            "calibrated",
            "{} tokens x {} B",
            tokens,
            block,
            phase="backward",
        )
    block, tile = profile.tiled_block_bytes, profile.tile_bytes
    weights = 3 * profile.architecture.hidden * profile.architecture.intermediate
    in_flight = tokens * max(0, block - stored) + MLP_TILE_TOKENS * tile
    return term(
        "block-working-set",
        placement.gpu,
        int(share * in_flight) + GRADIENT_SUM_BYTES * weights,
        "estimate",
        "{} tokens x {} B + {} tokens x {} B, {} B x {} for gradients of tiles",
        tokens,
        block,
        MLP_TILE_TOKENS,
        tile,
        GRADIENT_SUM_BYTES,
        weights,
        phase="backward",
    )


def _on_host(
    placement: Placement, each: int, layers: int, on_host: TermKind, on_gpu: TermKind
) -> Terms:
    """Yield what layers keep in host memory, ``each`` bytes a token, and the few that the GPU holds
    meanwhile.
    """
    tokens = placement.tokens
    yield term(
        on_host,
        "node",
        tokens * each * layers,
        "exact",
        "{} tokens x {} B x {} layers, pinned",
        tokens,
        each,
        layers,
    )
    for phase in _STORED_PHASES:
        held = min(layers, HELD[phase])
        yield term(
            on_gpu,
            placement.gpu,
            tokens * each * held,
            "exact",
            "{} tokens x {} B x {} of {} layers, the others on the host",
            tokens,
            each,
            held,
            layers,
            phase=phase,
        )


def _expert_terms(placement: Placement) -> Terms:
    shape, gpu, tokens = placement.profile.architecture, placement.gpu, placement.tokens
    largest = placement.profile.largest_layer_tensor
    yield term(
        "expert-fragmentation",
        gpu,
        LOST_EXPERT_TENSORS * 2 * largest,
        "calibrated",
        "{} x 2 B x {}: freed blocks are too small for the gradient of a layer's experts",
        LOST_EXPERT_TENSORS,
        largest,
        phase="backward",
    )
    if placement.spec.train.router_loss_coefficient:
        for phase in _STORED_PHASES:
            yield term(
                "router-logits",
                gpu,
                2 * tokens * shape.experts * shape.layers,
                "exact",
                "2 B x {} tokens x {} experts x {} layers",
                tokens,
                shape.experts,
                shape.layers,
                phase=phase,
            )


def _loss_terms(placement: Placement) -> Terms:
    shape, gpu, tokens = placement.profile.architecture, placement.gpu, placement.tokens
    yield term(
        "loss",
        gpu,
        loss_bytes(tokens, shape.vocabulary, shape.hidden),
        "estimate",
        "2 B x {} stored logits + 6 B x {} at a time + 6 B x tokens x {}",
        LOSS_KEPT_LOGITS,
        LOSS_BLOCK_LOGITS,
        str(shape.hidden),
        phase="loss",
    )
    head = shape.vocabulary * shape.hidden
    # On one GPU the head's gradient is one of the buckets that wait; on several there are fewer of
    # these, and it comes beside them.
    beside_buckets = (
        placement.spec.offload.mode != "gpu"
        or placement.layout.ranks > 1
        or placement.profile.tied_head
    )
    for phase in _STORED_PHASES:
        if phase == "loss" or beside_buckets:
            note = ", from the loss until it is reduced"
            yield sized("head-gradient", gpu, "exact", 2, head, note, phase=phase)
        yield term(
            "hidden-states",
            gpu,
            4 * tokens * shape.hidden,
            "exact",
            "2 x 2 B x {} x {}",
            tokens,
            str(shape.hidden),
            phase=phase,
        )


def _gpu_overhead(placement: Placement, moving: Sequence[MemoryTerm]) -> Terms:
    if not placement.has_gpu:
        return
    memory, layout, gpu = constants().memory, placement.layout, placement.gpu
    spec, shape = placement.spec, placement.profile.architecture
    superoffload = spec.offload.mode == "superoffload"
    context = memory.cuda_context_bytes
    if superoffload and layout.cpu_numel:
        context += memory.offload_context_bytes
    yield term("cuda-context", gpu, context, "calibrated", "driver, context, kernels, libraries")
    if layout.ranks > 1:
        groups = 1 if spec.train.sequence_parallel == 1 else 2
        of = ", of {} groups of ranks" if groups > 1 else ""
        yield term(
            "nccl-buffers",
            gpu,
            groups * memory.nccl_bytes,
            "calibrated",
            f"channels between the GPUs{of}",
            groups,
        )
    if spec.offload.deepspeed_superoffload:
        yield term(
            "worker-context",
            gpu,
            memory.second_context_bytes * layout.ranks,
            "calibrated",
            "pinned memory of each rank's worker opens a context on the first GPU",
        )
    within_layers = [found for found in moving if found.kind not in ACTIVATION_STACK]
    yield term(
        "allocator-slack",
        gpu,
        int(memory.slack_share * max(_phase_bytes(within_layers, gpu).values(), default=0)),
        "calibrated",
        "{:.1%} of what is allocated and freed within a layer",
        memory.slack_share,
    )
    if spec.model.policy == "attention":
        on_host = spec.model.offloads_results
        layers = min(shape.layers, HELD["backward"]) if on_host else shape.layers
        kept = placement.tokens * sum(shape.result_bytes) * layers
        yield term(
            "result-fragmentation",
            gpu,
            min(int(LOST_BETWEEN_RESULTS * kept), MOST_LOST_BETWEEN_RESULTS_BYTES),
            "calibrated",
            "between attention's results and what is freed",
        )
