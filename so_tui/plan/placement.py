"""A spec's states placed on ranks: what its memory and its time follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from so_tui.model.profile import ModelProfile, Span, StateLayout, compute_spans, in_tiles
from so_tui.model.sharding import OWN_LARGEST_BUCKET
from so_tui.plan.terms import Location
from so_tui.spec.run_spec import Mode, RunSpec


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A spec whose mode is decided, on some ranks."""

    spec: RunSpec
    profile: ModelProfile
    layout: StateLayout
    has_gpu: bool = True
    """Without a GPU, what would be its memory is the host's."""
    one_memory: bool = False
    """Whether GPU and CPU have the same memory (an APU), so that it is the host's too."""
    local_ranks: int = 1
    """Ranks that share this host; ``layout.ranks`` may be more."""
    speculating: tuple[int, ...] = ()
    """Indices of the sub-groups with a second set of states."""
    speculation_bytes: int = 0
    """What these may take."""
    copies_bytes: int = 0
    """What copies of states may take, from which checkpoints are written."""
    pinned_rounded: bool = False
    """Whether torch rounds pinned blocks up to powers of two (before 2.13). Without CUDA there are
    none.
    """

    @property
    def mode(self) -> Mode:
        return cast(Mode, self.spec.offload.mode)

    @property
    def gpu(self) -> Location:
        """Where GPU memory is counted."""
        return "gpu" if self.has_gpu and not self.one_memory else "node"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.spec.micro_batch_tokens

    @property
    def tiled(self) -> bool:
        """Whether feed-forward blocks compute a micro-batch in more than one tile."""
        return in_tiles(self.spec, self.profile.architecture)

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of ZeRO-3's flat gradient partition: bf16, or fp32 where it sums over
        several micro-batches.
        """
        return 4 if self.spec.gradient_accumulation_steps > 1 else 2

    @property
    def host_weights(self) -> int:
        """Parameters of one rank whose weights are in host memory: with our engine those whose
        optimizer states are there.
        """
        if not self.spec.offload.keeps_weights_on_host:
            return 0
        return self.layout.cpu_numel if self.spec.offload.own_engine else self.layout.numel

    @property
    def early_share(self) -> float:
        """Share of the offloaded parameters with a second set of states, which are stepped before
        the gradient norm is known.
        """
        early = sum(
            group.numel for group in self.layout.sub_groups if group.index in self.speculating
        )
        return early / self.layout.cpu_numel if self.layout.cpu_numel else 0.0

    @property
    def reduce_bucket(self) -> int:
        """Parameters whose gradients are reduced together.

        The project's own engine uses small buckets: a gradient leaves for the host when its bucket
        is full, so copies and Adam start early.
        """
        size = self.spec.offload.sub_group_size
        return min(size, OWN_LARGEST_BUCKET) if self.spec.offload.own_engine else size

    @property
    def compute_spans(self) -> tuple[Span, ...]:
        """When a forward pass uses each sub-group."""
        return compute_spans(self.profile, self.layout.ranks, self.spec.offload.sub_group_size)


def power_of_two(size: int) -> int:
    """Return the next power of two; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
