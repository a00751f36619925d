"""Host memory that holds no model states: processes, loading, saving, /dev/shm; and what
checkpoints take on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from so_tui.model.profile import StateLayout
from so_tui.model.sharding import copied, copy_bytes
from so_tui.plan.placement import Placement, power_of_two
from so_tui.plan.rates import constants
from so_tui.plan.terms import NOT_STEADY, MemoryTerm, TermKind, Terms, sized, term

# Room for copies of the states, from which checkpoints are written while training goes on.
#
# The host's memory goes to the states first, then to what a run needs beside them, then to second
# states, which hold copies too. Copies get what is left. They change no result: what has no copy
# is written before training goes on.


class Copies(Struct, frozen=True):
    """The copies of one rank."""

    bytes: int
    """What they take, and the budget from which the engine chooses the same."""
    share: float
    """Of the states, in bytes, what is copied, in second states or here."""

    @property
    def term(self) -> MemoryTerm:
        formula = "of {:.0%} of the states, second states included"
        return term("copies", "node", self.bytes, "exact", formula, self.share)


def copies(placement: Placement, room: Callable[[], int]) -> Copies | None:
    """Return which copies the sub-groups of one rank have; None for a run that makes none.

    Args:
        placement: The states, with the sub-groups that speculate.
        room: Returns the bytes of host memory that each rank may still take.
    """
    spec = placement.spec
    if not (spec.offload.own_engine and spec.checkpoint.background and spec.checkpoint.repeats):
        return None
    states = spec.offload.states
    sizes = [
        copy_bytes(states if group.device == "cpu" else "fp32") * group.numel
        for group in placement.layout.sub_groups
    ]
    given = [int(spec.checkpoint.copies_gib * 2**30)] if spec.checkpoint.copies_gib else []
    chosen = copied(sizes, placement.speculating, min([*given, max(0, room())]))
    have = {*chosen, *placement.speculating}
    share = sum(sizes[index] for index in have) / sum(sizes)
    return Copies(math.ceil(sum(sizes[index] for index in chosen)), share)


STATE_BYTES = 12
"""Of a checkpoint, per parameter: fp32 master weight and two moments. The bf16 weights are a cast
of the master weights.
"""

_READING_BYTES = 64 * 2**20
_MESSAGES_SHM_BYTES = 16_000_000


def steady_bytes(terms: Sequence[MemoryTerm], ranks: int) -> int:
    """Return the host memory of the training processes and Adam workers of ``ranks`` on one host
    while they train.
    """
    node = [found for found in terms if found.location == "node"]
    each = sum(found.bytes for found in node if found.rank is None and found.kind not in NOT_STEADY)
    return each * ranks + sum(found.bytes for found in node if found.kind == "libraries")


def gradient_blocks(
    layout: StateLayout, partition_bytes: int, pinned_rounded: bool
) -> tuple[int, int]:
    """Return what DeepSpeed's optimizers need to allocate their gradients (``stage3.py`` of
    0.19.8).

    Each block is allocated in ordinary memory and then copied into pinned memory: sub-group by
    sub-group in fp32, beside a buffer as large as the largest of them, and finally the partition.
    Where a sub-group's gradients move on to the GPU, torch retains the block for the next one of
    its size.

    Returns:
        Bytes beside the pinned blocks of one rank's gradients: the peak while they are allocated,
        beyond all blocks that stay; and the blocks that torch's allocator retains for others of
        their size, none of which follows.
    """
    peak = pinned = 0
    free: list[int] = []
    sizes = [
        (4 * group.numel, 4 * layout.largest_sub_group, group.device == "gpu")
        for group in layout.sub_groups
    ]
    for size, buffer, released in [*sizes, (partition_bytes, 0, False)]:
        block = power_of_two(size) if pinned_rounded else size
        if block in free:
            free.remove(block)
        else:
            pinned += block
        peak = max(peak, pinned + size + buffer)
        if released:
            free.append(block)
    # torch 2.13 retains other blocks, which were not measured.
    unused = sum(free) if pinned_rounded else 0
    return peak - (pinned - sum(free) + unused), unused


def host_terms(placement: Placement, states: Sequence[MemoryTerm]) -> Terms:
    """Yield the terms of processes, of loading and of saving, of /dev/shm and of the disk;
    ``states`` are the terms of the model states.
    """
    memory, layout, has_gpu = constants().memory, placement.layout, placement.has_gpu
    several = has_gpu and layout.ranks > 1
    libraries = memory.shared_libraries_bytes if has_gpu else 0
    process = (memory.cuda_process_bytes if has_gpu else memory.cpu_process_bytes) - libraries
    yield term("training-process", "node", process, "calibrated", "Python, torch, DeepSpeed, data")
    if libraries:
        yield term("libraries", "node", libraries, "calibrated", "torch, CUDA; once a host", rank=0)
    if several:
        channels = memory.nccl_host_bytes + memory.nccl_peer_host_bytes * (layout.ranks - 2)
        yield term("nccl-on-host", "node", channels, "calibrated", "channels between the GPUs")
    yield term("launcher", "node", memory.launcher_bytes, "calibrated", "once a host", rank=0)
    yield from _worker_terms(placement)
    if placement.spec.checkpoint.saves:
        each, largest, decoded = 4, layout.largest_on("gpu"), layout.largest_on("cpu")
        note = ", the largest sub-group on the GPU on its way to the disk"
        compact = placement.spec.offload.own_engine and placement.spec.offload.states != "fp32"
        if compact and 2 * decoded > largest:
            each, largest = 8, decoded
            note = ", the moments of the largest sub-group, decoded for the disk"
        yield sized("saving", "node", "estimate", each, largest, note)
    later: dict[TermKind, int] = (
        {found.kind: found.bytes for found in states if found.location == "node"} if has_gpu else {}
    )
    allocating = 0
    if "gradient-partition" in later:
        allocating, unused = gradient_blocks(
            layout, later["gradient-partition"], placement.pinned_rounded
        )
        later["unused-pinned-blocks"] = unused
        if unused:
            moved = "gradients of sub-groups that moved on to the GPU"
            yield term("unused-pinned-blocks", "node", unused, "exact", moved)
    # A rank's share of the weights passes through the host as one array. The moments come after
    # the gradients.
    process_later = memory.after_loading_bytes if several else 0
    weights = 2 * layout.numel + _READING_BYTES - sum(later.values()) - process_later
    gradients = allocating - later.get("moments", 0)
    less = ", less what its process allocates only later" if process_later else ""
    text = f"2 B x {{}}, the weights of a rank on their way to the GPU{less}"
    if gradients > weights:
        text = "gradients on their way into pinned memory, less the moments that come after them"
    if (most := max(weights, gradients)) > 0:
        yield term("loading", "node", most, "estimate", text, layout.numel)
    yield from _shared_terms(placement)
    yield from _disk_terms(placement)


def _worker_terms(placement: Placement) -> Terms:
    memory, layout = constants().memory, placement.layout
    if placement.spec.offload.own_engine:
        yield term(
            "adam-worker",
            "node",
            memory.own_worker_bytes,
            "calibrated",
            "a second process, without torch",
        )
    elif placement.spec.offload.mode == "superoffload":
        yield term(
            "adam-worker",
            "node",
            memory.deepspeed_worker_bytes,
            "calibrated",
            "a second process with torch",
        )
        largest = layout.largest_sub_group
        yield sized("worker-gradient-copy", "node", "exact", 4, largest, ", pinned")
        if placement.pinned_rounded:
            text, size = "to the next power of two by torch before 2.13", 4 * largest
            yield term("worker-rounding", "node", power_of_two(size) - size, "exact", text)
        # The first step sends them to the worker, which copies each into shared memory; torch
        # retains its pinned block.
        note = " (gradients, which moved into shared memory)"
        yield sized("unused-pinned-blocks", "node", "calibrated", 4, layout.cpu_numel, note)


def _shared_terms(placement: Placement) -> Terms:
    """Yield what is in /dev/shm."""
    offload, ranks = placement.spec.offload, placement.local_ranks
    if offload.deepspeed_superoffload:
        numel = placement.layout.cpu_numel
        text = "8 B x {} x {} ranks (fp32 weights and gradients; part of the host memory above)"
        yield term("shared-states", "shm", 8 * numel * ranks, "exact", text, numel, ranks)
    if ranks > 1:
        size = _MESSAGES_SHM_BYTES * ranks
        yield term("rank-messages", "shm", size, "estimate", "buffers of the collectives")


def _disk_terms(placement: Placement) -> Terms:
    """Yield what one checkpoint takes on disk, and its export where one is asked for."""
    layout = placement.layout
    numel, text = layout.numel * layout.ranks, "{} B x {} x {} ranks (fp32 weights, two moments)"
    values = (STATE_BYTES, layout.numel, layout.ranks)
    yield term("checkpoint", "disk", STATE_BYTES * numel, "exact", text, *values)
    if placement.spec.checkpoint.export:
        yield sized("export", "disk", "exact", 2, placement.profile.parameters, " (bf16)")
