"""Rotary position embedding in one pass over memory, with its backward pass; plain formulas without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by their positions' angles.

    With x = (x1, x2), the halves of a head, the result is (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2). If there are half as many angles, both
    halves share them.

    Args:
        heads: [rows, heads, width, size]
        cos: [rows or 1, width, size or size / 2]
        sin: like ``cos``

    Returns:
        Like ``heads``; in memory it is [rows, width, heads, size], as the projection before it writes and the attention after it reads.
    """
    result: Tensor = _Rotated.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return result


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate, or with ``direction`` -1 apply the transposed rotation: (g1 cos1 + g2 sin2, g2 cos2 - g1 sin1)."""
    if heads.is_cuda:
        from so_tui_trainer.model.kernels import cuda

        return cuda.turn(heads, cos, sin, direction)
    cos, sin = cos[:, None], sin[:, None]
    first, second = heads.chunk(2, dim=-1)
    (cos1, cos2), (sin1, sin2) = (
        (angles, angles) if angles.shape[-1] == first.shape[-1] else angles.chunk(2, dim=-1)
        for angles in (cos, sin)
    )
    if direction > 0:
        turned = torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), dim=-1)
    else:
        turned = torch.cat((first * cos1 + second * sin2, second * cos2 - first * sin1), dim=-1)
    return turned.to(heads.dtype)  # Some models (OLMo 2) have the cosines in fp32.
