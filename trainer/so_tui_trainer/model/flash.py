"""torch's own flash attention over packed documents, with the sinks of gpt-oss where a model has them.

The raw kernels are called, not ``torch.nn.attention.varlen``: they share key heads among query heads in every supported version, and
they hand out what sinks need. A sink is one more logit a head, which takes part in the softmax and has no value. The kernel knows none,
so its result is put right afterwards, exactly: with its log-sum-exp L of a token's scores, the sink s makes it L' = logaddexp(L, s), and
the output o' = o exp(L - L'). Backward computes P = exp(S - L) and delta = sum(do * o) from the L and o that it is given, and with L' and
o' these are the terms of the softmax with the sink. What is left is the sink's own gradient, -sum exp(s - L') delta over the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from so_tui_trainer.model import recompute

NAME = "so_tui_varlen"
"""transformers takes names with `flash` in them for packages to import."""


class Documents(NamedTuple):
    """What a kernel must know beside its tensors."""

    boundaries: Tensor
    """[documents + 1] int32, cumulative lengths."""
    longest: int
    scale: float
    window: int | None
    """How many tokens a token sees, itself included; None: all before it."""


class Kernels(NamedTuple):
    """Causal attention within documents over flattened tokens, forward and backward: torch's on CUDA, plain ones in tests.

    ``query``, ``out``: [tokens, heads, size]; ``key``, ``value``: [tokens, key heads, size]; log-sum-exp: [heads, tokens] fp32.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Documents], tuple[Tensor, Tensor]]
    """(query, key, value, documents) -> (out, log-sum-exp)"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Documents], tuple[Tensor, Tensor, Tensor]]
    """(gradient of out, query, key, value, out, log-sum-exp, documents) -> gradients of query, key, value"""


def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Documents, kernels: Kernels) -> Tensor:
    """Attention, with a sink per head or without; shapes as in ``Kernels``, ``sinks``: [heads]."""
    mixed: Tensor = _Attention.apply(query, key, value, sinks, documents, kernels)  # type: ignore[no-untyped-call]
    return mixed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Documents, kernels: Kernels
    ) -> Tensor:
        out, normaliser = recompute.save_or_reuse(lambda: _forward(query, key, value, sinks, documents, kernels))
        ctx.save_for_backward(query, key, value, sinks, out, normaliser)
        ctx.documents, ctx.kernels = documents, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, sinks, out, normaliser = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_query, of_key, of_value = ctx.kernels.backward(gradient, query, key, value, out, normaliser, ctx.documents)
        of_sinks = None
        if sinks is not None:
            delta = (gradient * out).sum(-1, dtype=normaliser.dtype).t()  # products in bf16: their rounding averages out over all tokens
            share = (sinks.to(normaliser.dtype)[:, None] - normaliser).exp_()
            of_sinks = -(share * delta).sum(1).to(sinks.dtype)
        return of_query, of_key, of_value, of_sinks, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Documents, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    out, without = kernels.forward(query, key, value, documents)
    if sinks is None:
        return out, without
    normaliser = torch.logaddexp(without, sinks.to(without.dtype)[:, None])
    return out.mul_((without - normaliser).exp_().t()[..., None]), normaliser


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    boundaries, longest, scale, window = documents
    out, normaliser, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, boundaries, boundaries, longest, longest, 0.0, window is None, False), scale=scale, **_sides(window)
    )
    return out, normaliser


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normaliser: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    boundaries, longest, scale, window = documents
    # The state of a random generator, which only dropout reads.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(gradient, query, key, value, out, normaliser, boundaries, boundaries, longest, longest, 0.0, window is None, *state),
        scale=scale,
        **_sides(window),
    )
    return found


def _sides(window: int | None) -> dict[str, int]:
    """How far a token sees to its left and right, in flash attention's terms: -1 is no limit."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


FLASH = Kernels(_flash_forward, _flash_backward)
"""torch's own flash attention: CUDA, bf16 or fp16, head sizes that are a multiple of 8; fewer key heads than query heads as they are."""


def register(kernels: Kernels = FLASH) -> str:
    """Make it an attention implementation of transformers; returns its name."""
    from transformers import AttentionInterface

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """``query``: [rows, heads, width, head size]; the result: [rows, width, heads, head size]."""
        rows, heads, width, _ = query.shape
        flat_query, flat_key, flat_value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        documents = Documents(cu_seq_lens_q, max_length_q, scaling, sliding_window)
        return attend(flat_query, flat_key, flat_value, s_aux, documents, kernels).view(rows, width, heads, -1), None

    AttentionInterface.register(NAME, attention)
    return NAME
