"""Cross-entropy from hidden states, in chunks: the logits of a micro-batch never exist whole.

The head's weight is a direct parameter of the module, so ZeRO-3's own hooks gather it before ``forward`` and reduce its gradient after
``backward``, as for any other module; a weight tied to the embedding works the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from so_tui.plan.memory import LOSS_CHUNK_LOGITS


class HeadLoss(nn.Module):
    """The output projection and the loss in one: hidden states and targets in, the sum of the tokens' losses out."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, predictors: Tensor, targets: Tensor, scale: float) -> Tensor:
        """``scale`` times the summed cross-entropy of the trained tokens; fp32 scalar.

        ``hidden``: [rows, width, size]; ``predictors``: [trained], the places in the flattened rows that predict; ``targets``: [trained],
        what they should. Other tokens get no logits. Without trained tokens the loss is 0, with zero gradients.
        """
        loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2).index_select(0, predictors), self.weight, targets, scale
        )
        return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients chunk by chunk, in the forward pass: the softmax is computed once, and backward only scales what is there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        # fp32 only while it is summed over chunks: rounding each partial sum to bf16 would cost precision.
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        chunk = max(1, LOSS_CHUNK_LOGITS // weight.shape[0])
        for start in range(0, len(hidden), chunk):
            part, target = hidden[start : start + chunk], targets[start : start + chunk, None]
            logits = (part @ weight.t()).float()
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += (normaliser - logits.gather(-1, target)).sum()
            gradient = logits.sub_(normaliser).exp_().scatter_add_(-1, target, torch.full_like(normaliser, -1.0))
            gradient = gradient.mul_(scale).to(hidden.dtype)
            hidden_gradient[start : start + chunk] = gradient @ weight
            weight_gradient += gradient.t() @ part
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        (gradient,) = gradients
        # In place: each is used once, and a copy of the weight's gradient would be the step's largest temporary.
        return hidden_gradient.mul_(gradient), weight_gradient.mul_(gradient), None, None
