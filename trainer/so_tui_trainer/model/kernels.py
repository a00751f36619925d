"""Operations that PyTorch computes slowly: gated activation, rotary position embedding and parts
of cross-entropy, each in one pass over the GPU's memory, and bf16 matmuls on CPUs that lack bf16.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from so_tui_trainer.model import Gradients, apply

# Gated activation and rotation, with their backward passes. Without a GPU, plain formulas compute
# them, which autograd differentiates.


class Gate(NamedTuple):
    """How experts are activated between their two products: min(gate, limit) sigmoid(alpha gate)
    (up within +-limit, plus shift).
    """

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
    return apply(_Gated, gate, up) if gate.is_cuda else torch.nn.functional.silu(gate) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from so_tui_trainer.model import triton

        ctx.save_for_backward(gate, up)
        return triton.gated(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        from so_tui_trainer.model import triton

        return triton.gated_backward(gradients[0], *ctx.saved_tensors)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by their positions' angles.

    With x = (x1, x2), the halves of a head, the result is (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2).
    If there are half as many angles, both halves share them.

    Args:
        heads: [rows, heads, width, size]
        cos: [rows or 1, width, size or size / 2]
        sin: like ``cos``

    Returns:
        Like ``heads``; in memory it is [rows, width, heads, size], as the projection before it
        writes and the attention after it reads.
    """
    if heads.is_cuda:
        return apply(_Rotated, heads, cos, sin)
    cos, sin = cos[:, None], sin[:, None]
    first, second = heads.chunk(2, dim=-1)
    (cos1, cos2), (sin1, sin2) = (
        (angles, angles) if angles.shape[-1] == first.shape[-1] else angles.chunk(2, dim=-1)
        for angles in (cos, sin)
    )
    turned = torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), dim=-1)
    return turned.to(heads.dtype)  # Some models (OLMo 2) have the cosines in fp32.


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from so_tui_trainer.model import triton

        ctx.save_for_backward(cos, sin)
        return triton.turn(heads, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        from so_tui_trainer.model import triton

        cos, sin = ctx.saved_tensors
        return triton.turn(gradients[0], cos, sin, -1), None, None


# Reductions of a block of logits for cross-entropy, each in one pass over memory; plain formulas
# without a GPU.


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of each row.

    Args:
        logits: [rows, columns]

    Returns:
        [rows] fp32
    """
    if logits.is_cuda:
        from so_tui_trainer.model import triton

        return triton.log_sum_exp(logits)
    return logits.float().logsumexp(-1)


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
        from so_tui_trainer.model import triton

        return triton.cross_entropy_gradient(logits, normaliser, targets, scale)
    softmax = logits.to(torch.float32).sub_(normaliser[:, None]).exp_().mul_(scale)
    inside = (targets >= 0) & (targets < logits.shape[1])
    column = targets.clamp(0, logits.shape[1] - 1)
    return logits.copy_(
        softmax.scatter_add_(-1, column[:, None], (inside * -scale)[:, None].to(torch.float32))
    )


# Matmuls of bf16 on a CPU.


@cache
def replace_slow_matmuls() -> Any:
    """Compute bf16 matmuls in fp32 from now on if this CPU lacks bf16 instructions.

    PyTorch has no vectorised kernel for them then: on an AMD EPYC with AVX2, a step of ``tiny``
    takes 4 times as long. Sums are in fp32 either way, and rounded once.

    Returns:
        What keeps the kernels registered.
    """
    one_dnn: Any = torch.backends.mkldnn
    if one_dnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    ours: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            ours.impl(name, _in_fp32(getattr(torch.ops.aten, name).out), "CPU")
    return ours


def _in_fp32(matmul: Any) -> Any:
    """Return a kernel that computes in fp32 what it is given in bf16.

    ``matmul`` writes into its argument ``out``. It is an operator of its own, so its kernel is not
    replaced.
    """

    def compute(*matrices: Tensor, **factors: Any) -> Tensor:
        kind = matrices[0].dtype
        if kind == torch.bfloat16 and all(matrix.dtype == kind for matrix in matrices):
            wide = [matrix.float() for matrix in matrices]
            narrow: Tensor = matmul(*wide, **factors, out=wide[-1].new_empty(0)).to(kind)
            return narrow
        result: Tensor = matmul(*matrices, **factors, out=matrices[-1].new_empty(0))
        return result

    return compute
