"""Memory beside the GPU that is no model state: processes, loading, saving, /dev/shm, and what checkpoints take on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from so_tui.model.layout import StateLayout, state_layout
from so_tui.plan.constants import constants
from so_tui.plan.terms import count, own_engine, power_of_two
from so_tui.plan.types import MemoryTerm
from so_tui.spec.types import RunSpec

STATE_BYTES = 12
"""Of a checkpoint, per parameter: fp32 master and two moments. The bf16 weights are a cast of the masters."""
LOADING = "loading, beyond what comes later"
SAVING = "saving, one array at a time"
GRADIENT_PARTITION = "gradient partition"
ROUNDING = "rounding of pinned blocks"
KEPT_BLOCKS = "pinned blocks that torch keeps"
LIBRARIES = "libraries of the training processes"
"""Once a host: all its ranks map the same files."""
NCCL_ON_HOST = "NCCL on the host"
NOT_STEADY = frozenset({LOADING, SAVING})
"""Host terms that come and go outside of training steps."""

_READING_BYTES = 64 * 2**20
_MESSAGES_SHM_BYTES = 16_000_000


def steady_bytes(terms: Sequence[MemoryTerm], ranks: int) -> int:
    """Host memory of the training processes and Adam workers of ``ranks`` on one host while they train."""
    node = [entry for entry in terms if entry.place == "node"]
    each = sum(entry.bytes for entry in node if entry.rank is None and entry.name not in NOT_STEADY)
    return each * ranks + sum(entry.bytes for entry in node if entry.name == LIBRARIES)


def load_bytes(spec: RunSpec, terms: Sequence[MemoryTerm], ranks: int) -> int:
    """The most host memory of a run of ``ranks`` on one host before its first step, with what starts it.

    DeepSpeed's optimizers make their moments in that step, ours before. NCCL's memory comes with the first collectives.
    """
    node = [entry for entry in terms if entry.place == "node"]
    partition = sum(entry.bytes for entry in node if entry.name == GRADIENT_PARTITION)
    later = {SAVING, NCCL_ON_HOST} | (set() if own_engine(spec) else {"moments"} | ({LOADING} if partition else set()))
    names = {entry.name for entry in node}
    locks = partition and LIBRARIES in names  # without CUDA nothing is copied into pinned memory
    making = gradient_blocks(state_layout(spec, ranks), partition, ROUNDING in names).making if locks else 0
    return making * ranks + sum(entry.bytes * (ranks if entry.rank is None else 1) for entry in node if entry.name not in later)


class GradientBlocks(Struct, frozen=True, kw_only=True):
    """Bytes beside one rank's gradients for DeepSpeed's optimizers and its gradient partition, all in pinned blocks."""

    making: int
    """The most that making them needs for a moment, beyond all blocks that stay."""
    unused: int
    """Blocks that torch keeps for others of their size, of which none comes any more."""


def gradient_blocks(layout: StateLayout, partition_bytes: int, pinned_rounded: bool) -> GradientBlocks:
    """How DeepSpeed's optimizers make their gradients (``stage3.py`` of 0.19.8).

    Each block is made in ordinary memory and then copied into pinned memory: sub-group by sub-group in fp32, beside a buffer as large
    as the largest of them, and at last the partition. Where a sub-group's gradients go on to the GPU, torch keeps the block for the next
    one of its size.
    """
    peak = locked = 0
    free: list[int] = []
    sizes = [(4 * group.numel, 4 * layout.largest_sub_group, group.device == "gpu") for group in layout.sub_groups]
    for size, buffer, given_back in [*sizes, (partition_bytes, 0, False)]:
        block = power_of_two(size) if pinned_rounded else size
        if block in free:
            free.remove(block)
        else:
            locked += block
        peak = max(peak, locked + size + buffer)
        if given_back:
            free.append(block)
    unused = sum(free) if pinned_rounded else 0  # since 2.13 torch keeps other blocks, which nothing has measured
    return GradientBlocks(making=peak - (locked - sum(free) + unused), unused=unused)


def host_terms(
    spec: RunSpec, layout: StateLayout, states: Sequence[MemoryTerm], has_gpu: bool, pinned_rounded: bool
) -> Iterator[MemoryTerm]:
    memory = constants().memory
    libraries = memory.shared_libraries_bytes if has_gpu else 0
    process = (memory.cuda_process_bytes if has_gpu else memory.cpu_process_bytes) - libraries
    yield MemoryTerm("training process", "node", process, "calibrated", "Python, torch, DeepSpeed, data")
    if libraries:
        yield MemoryTerm(LIBRARIES, "node", libraries, "calibrated", "torch, CUDA; once a host", rank=0)
    if has_gpu and layout.ranks > 1:
        channels = memory.nccl_host_bytes + memory.nccl_peer_host_bytes * (layout.ranks - 2)
        yield MemoryTerm(NCCL_ON_HOST, "node", channels, "calibrated", "channels between the GPUs")
    yield MemoryTerm("launcher and supervisor", "node", memory.launcher_bytes, "calibrated", "once a host", rank=0)
    later = {term.name: term.bytes for term in states if term.place == "node"} if has_gpu else {}
    if own_engine(spec):
        yield MemoryTerm("Adam worker", "node", memory.own_worker_bytes, "calibrated", "a second process, without torch")
    elif spec.offload.mode == "superoffload":
        yield MemoryTerm("Adam worker", "node", memory.deepspeed_worker_bytes, "calibrated", "a second process with torch")
        scratch = 4 * layout.largest_sub_group
        yield MemoryTerm("gradient copy of the Adam worker", "node", scratch, "exact", f"4 B x {count(layout.largest_sub_group)}, pinned")
        if pinned_rounded:
            lost = power_of_two(scratch) - scratch
            yield MemoryTerm("rounding of the Adam worker's block", "node", lost, "exact", "to the next power of two by torch before 2.13")
    if spec.checkpoint.saves:
        kept = max((group.numel for group in layout.sub_groups if group.device == "gpu"), default=0)
        formula = f"4 B x {count(kept)}, the largest sub-group on the GPU on its way to the disk"
        yield MemoryTerm(SAVING, "node", 4 * kept, "estimate", formula)
    making = 0
    if GRADIENT_PARTITION in later:
        blocks = gradient_blocks(layout, later[GRADIENT_PARTITION], pinned_rounded)
        making, later[KEPT_BLOCKS] = blocks.making, blocks.unused
        if blocks.unused:
            yield MemoryTerm(KEPT_BLOCKS, "node", blocks.unused, "exact", "gradients of sub-groups that went on to the GPU")
    yield from _loading(layout, later, making, memory.after_loading_bytes if has_gpu and layout.ranks > 1 else 0)


def _loading(layout: StateLayout, later: Mapping[str, int], making: int, process_later: int) -> Iterator[MemoryTerm]:
    """What loading needs beyond what the states will need later: a rank's share of the weights passes through the host, whole.

    That is when DeepSpeed makes one flat array of it. Before, a rank reads only its part of the checkpoint's files. Its process is not as
    large as later by then, by ``process_later`` bytes. What ``making`` gradients needs is there before the moments are.
    """
    weights = 2 * layout.numel + _READING_BYTES - sum(later.values()) - process_later
    gradients = making - later.get("moments", 0)
    if max(weights, gradients) > 0:
        less = ", less what its process has only later" if process_later else ""
        formula = f"2 B x {count(layout.numel)}, the weights of a rank on their way to the GPU{less}"
        if gradients > weights:
            formula = "gradients on their way into pinned memory, less the moments that come after them"
        yield MemoryTerm(LOADING, "node", max(weights, gradients), "estimate", formula)


def shared_terms(spec: RunSpec, layout: StateLayout, local_ranks: int) -> Iterator[MemoryTerm]:
    if spec.offload.mode == "superoffload" and spec.offload.engine == "deepspeed":
        formula = f"8 B x {count(layout.cpu_numel)} x {local_ranks} ranks (fp32 weights and gradients; part of the host memory above)"
        yield MemoryTerm("masters and gradients in /dev/shm", "shm", 8 * layout.cpu_numel * local_ranks, "exact", formula)
    if local_ranks > 1:
        yield MemoryTerm("messages between ranks", "shm", _MESSAGES_SHM_BYTES * local_ranks, "estimate", "buffers of the collectives")


def disk_terms(spec: RunSpec, layout: StateLayout) -> Iterator[MemoryTerm]:
    states = STATE_BYTES * layout.numel * layout.ranks
    formula = f"{STATE_BYTES} B x {count(layout.numel)} x {layout.ranks} ranks (fp32 weights, two moments)"
    yield MemoryTerm("one checkpoint", "disk", states, "exact", formula)
    if spec.checkpoint.export:
        yield MemoryTerm("export", "disk", 2 * layout.parameters, "exact", f"2 B x {count(layout.parameters)} (bf16)")
