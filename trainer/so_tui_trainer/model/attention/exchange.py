"""Sequence parallelism (Ulysses): ranks that hold parts of the same sequences trade tokens for heads around attention.

Outside of attention a rank computes its part of the tokens. For attention it gets all tokens of its part of the heads, so that the kernels
see whole documents, and returns the result. Gradients go the same ways back: each rank's gradient is of the loss of all ranks, with respect
to what it computed, and their sum over the ranks is that of the whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceGroup(NamedTuple):
    """The ranks that share sequences, in the order of their parts."""

    size: int
    position: int
    """Which part is this rank's."""
    group: dist.ProcessGroup

    def queries(self, tensor: Tensor) -> Tensor:
        """Trade a part of the tokens with all heads for all tokens with a part of the heads.

        Args:
            tensor: [tokens, heads, size]

        Returns:
            [all tokens, heads / ranks, size]
        """
        found: Tensor = _TokensForHeads.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found

    def keys(self, tensor: Tensor) -> Tensor:
        """Do the same for keys or values, of which each rank gets at least one head: where there are fewer, several get the same.

        Args:
            tensor: [tokens, key heads, size]

        Returns:
            [all tokens, max(1, key heads / ranks), size]
        """
        copies = self.size // tensor.shape[1]
        return self.queries(tensor.repeat_interleave(copies, dim=1) if copies > 1 else tensor)

    def sinks(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of one number a head, [heads]."""
        return tensor.chunk(self.size)[self.position]

    def results(self, tensor: Tensor) -> Tensor:
        """Trade attention's results back.

        Args:
            tensor: [all tokens, heads / ranks, size]

        Returns:
            [tokens, heads, size]
        """
        found: Tensor = _HeadsForTokens.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found


def sequence_group(ranks_per_sequence: int) -> SequenceGroup | None:
    """Return this rank's group, of consecutive ranks; None where each rank has sequences of its own. All ranks must call it."""
    if ranks_per_sequence == 1:
        return None
    replica, position = divmod(dist.get_rank(), ranks_per_sequence)
    firsts = range(0, dist.get_world_size(), ranks_per_sequence)
    groups = [dist.new_group(list(range(first, first + ranks_per_sequence))) for first in firsts]
    return SequenceGroup(ranks_per_sequence, position, groups[replica])


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: SequenceGroup) -> Tensor:
        ctx.ranks = ranks
        return _tokens_for_heads(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _heads_for_tokens(gradients[0], ctx.ranks), None


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: SequenceGroup) -> Tensor:
        ctx.ranks = ranks
        return _heads_for_tokens(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _tokens_for_heads(gradients[0], ctx.ranks), None


def _tokens_for_heads(tensor: Tensor, ranks: SequenceGroup) -> Tensor:
    by_rank = tensor.reshape(len(tensor), ranks.size, -1, tensor.shape[-1]).transpose(0, 1)
    return _all_to_all(by_rank, ranks).flatten(0, 1)


def _heads_for_tokens(tensor: Tensor, ranks: SequenceGroup) -> Tensor:
    by_rank = tensor.reshape(ranks.size, -1, *tensor.shape[1:])
    return _all_to_all(by_rank, ranks).transpose(0, 1).flatten(1, 2)


def _all_to_all(by_rank: Tensor, ranks: SequenceGroup) -> Tensor:
    """Send part i of the first dimension to rank i, and return what the ranks sent, in their order."""
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return received
