"""Cross-entropy from hidden states, in blocks of the vocabulary: the logits of a micro-batch never exist whole.

How it is cut, and what that costs, stands in ``so_tui.model.loss``. The head's weight is a direct parameter of the module, so ZeRO-3's own
hooks gather it before ``forward`` and reduce its gradient after ``backward``, as for any other module; a weight tied to the embedding
works the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from so_tui.model.loss import block_columns, kept_blocks
from so_tui_trainer.model.kernels.softmax import cross_entropy_gradient, log_sum_exp


class HeadLoss(nn.Module):
    """The output projection and the loss in one: hidden states and targets in, the sum of the tokens' losses out."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, predictors: Tensor, targets: Tensor, scale: float) -> Tensor:
        """``scale`` (above 0) times the summed cross-entropy of the trained tokens; fp32 scalar.

        ``hidden``: [rows, width, size]; ``predictors``: [trained], the places in the flattened rows that predict; ``targets``: [trained],
        what they should. Other tokens get no logits. Without trained tokens the loss is 0, with zero gradients.
        """
        chosen = hidden.flatten(0, -2).index_select(0, predictors)
        if not torch.is_grad_enabled():
            normaliser, score, _ = _normalise(chosen, self.weight, targets, save=0)
            return (normaliser - score).sum() * scale
        loss: Tensor = _BlockedCrossEntropy.apply(chosen, self.weight, targets, scale)  # type: ignore[no-untyped-call]
        return loss


class _BlockedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in the forward pass, when the head's weight is gathered; backward only scales what is there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
        normaliser, score, saved_blocks = _normalise(hidden, weight, targets, save=kept_blocks(len(hidden), len(weight)))
        hidden_gradient = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        weight_gradient = torch.empty_like(weight)
        for block in _blocks(len(hidden), len(weight)):
            logits = saved_blocks.pop(block.start, None)
            logits = hidden @ weight[block].t() if logits is None else logits
            gradient = cross_entropy_gradient(logits, normaliser, targets - block.start, scale)
            del logits
            hidden_gradient += gradient @ weight[block]
            torch.mm(gradient.t(), hidden, out=weight_gradient[block])
            del gradient  # before the next block is made
        ctx.save_for_backward(hidden_gradient.to(hidden.dtype), weight_gradient)
        return (normaliser - score).sum() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        (gradient,) = gradients
        # In place: each is used once, and a copy of the weight's gradient would be the step's largest temporary.
        return hidden_gradient.mul_(gradient), weight_gradient.mul_(gradient), None, None


def _normalise(hidden: Tensor, weight: Tensor, targets: Tensor, *, save: int) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Each token's log of the summed exponentials, the logit of its target (both [trained], fp32), and the first ``save`` blocks."""
    normaliser = torch.full(targets.shape, -math.inf, dtype=torch.float32, device=hidden.device)
    score = torch.zeros_like(normaliser)
    saved_blocks: dict[int, Tensor] = {}
    for index, block in enumerate(_blocks(len(hidden), len(weight))):
        logits = hidden @ weight[block].t()
        column, inside = _columns(targets - block.start, logits.shape[1])
        score += logits.gather(-1, column[:, None])[:, 0] * inside
        normaliser = torch.logaddexp(normaliser, log_sum_exp(logits))
        if index < save:
            saved_blocks[block.start] = logits
    return normaliser, score, saved_blocks


def _columns(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Targets as columns of a block, and which of them are in it; the others point anywhere. Does not wait for the GPU."""
    return targets.clamp(0, width - 1), (targets >= 0) & (targets < width)


def _blocks(tokens: int, vocabulary: int) -> Iterator[slice]:
    columns = block_columns(tokens, vocabulary)
    for start in range(0, vocabulary, columns):
        yield slice(start, min(start + columns, vocabulary))
