"""Gated activation: which one experts have, and ``silu(gate) * up`` in one pass over memory, with its backward pass.

Without a GPU it is computed by plain formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Gate(NamedTuple):
    """How experts are activated between their two products: min(gate, limit) sigmoid(alpha gate) (up within +-limit, plus shift)."""

    interleaved: bool = False
    """Gate and up alternate in a row, instead of one half each."""
    alpha: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``.

    Args:
        gate: [..., columns]; rows may be strided (half of a matrix)
        up: [..., columns]; likewise

    Returns:
        [..., columns], contiguous
    """
    result: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if gate.is_cuda:
            from so_tui_trainer.model.kernels import cuda

            return cuda.gated(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        gate, up = ctx.saved_tensors
        if gate.is_cuda:
            from so_tui_trainer.model.kernels import cuda

            return cuda.gated_backward(gradient, gate, up)
        sigmoid = gate.sigmoid()
        return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid
