"""Reductions of a block of logits for cross-entropy, each in one pass over memory; plain formulas without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of each row.

    Args:
        logits: [rows, columns]

    Returns:
        [rows] fp32
    """
    if logits.is_cuda:
        from so_tui_trainer.model.kernels import cuda

        return cuda.log_sum_exp(logits)
    wide = logits.to(torch.float32, copy=True)
    highest = wide.amax(-1)
    return highest + wide.sub_(highest[:, None]).exp_().sum(-1).log()


def cross_entropy_gradient(
    logits: Tensor, normaliser: Tensor, targets: Tensor, scale: float
) -> Tensor:
    """Compute ``scale`` x (softmax - 1 at the target) in place.

    Args:
        logits: [rows, columns], contiguous; overwritten
        normaliser: [rows] fp32, log-sum-exp over the whole vocabulary
        targets: [rows]; a column, or outside of 0 ... columns - 1 if the target is in another block
        scale: Factor of the loss.

    Returns:
        ``logits``
    """
    if logits.is_cuda:
        from so_tui_trainer.model.kernels import cuda

        return cuda.cross_entropy_gradient(logits, normaliser, targets, scale)
    softmax = logits.to(torch.float32).sub_(normaliser[:, None]).exp_().mul_(scale)
    inside = (targets >= 0) & (targets < logits.shape[1])
    column = targets.clamp(0, logits.shape[1] - 1)
    return logits.copy_(
        softmax.scatter_add_(-1, column[:, None], (inside * -scale)[:, None].to(torch.float32))
    )
