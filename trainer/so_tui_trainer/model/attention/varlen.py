"""Attention over packed documents by any kernel, with the attention sinks of gpt-oss.

A sink is one more logit per head, which takes part in the softmax and has no value. Kernels know no sinks, so their results are corrected
exactly. With L, the log-sum-exp of a token's scores, the sink s makes it L' = logaddexp(L, s), and the output o' = o exp(L -
L'). Backward computes P = exp(S - L) and delta = sum(do * o) from the L and o that it is given; with L' and o' these are the terms of the
softmax with the sink. Only the gradient of the sink itself remains: -sum exp(s - L') delta over the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from so_tui.spec import InputError, Problem
from so_tui_trainer.model import recompute
from so_tui_trainer.model.attention.exchange import SequenceGroup

NAME = "so_tui_varlen"
"""Name of the implementation. It must not contain `flash`: transformers would take it for a package to import."""


class Documents(NamedTuple):
    """Arguments of a kernel besides its tensors."""

    boundaries: Tensor
    """[documents + 1] int32; cumulative lengths"""
    longest: int
    """Tokens of the longest document."""
    scale: float
    """Factor of the scores before the softmax."""
    window: int | None = None
    """How many tokens a token attends to, itself included; None: all before it in its document."""
    softcap: float = 0.0
    """Scores are capped to softcap x tanh(score / softcap); 0: not at all."""


class Kernels(NamedTuple):
    """A backend's causal attention within documents over flattened tokens; plain kernels in tests.

    ``query`` and ``out`` are [tokens, heads, size], ``key`` and ``value`` [tokens, key heads, size], log-sum-exp [heads, tokens] fp32.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Documents], tuple[Tensor, Tensor]]
    """(query, key, value, documents) -> (out, log-sum-exp)"""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Documents], tuple[Tensor, Tensor, Tensor]
    ]
    """(gradient of out, query, key, value, out, log-sum-exp, documents) -> gradients of query, key, value"""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    documents: Documents,
    kernels: Kernels,
) -> Tensor:
    """Compute attention within documents.

    Args:
        query: [tokens, heads, size]
        key: [tokens, key heads, size]
        value: [tokens, key heads, size]
        sinks: [heads], or None for a model without sinks.
        documents: Where documents start, and the scale.
        kernels: The kernels to use.

    Returns:
        [tokens, heads, size]
    """
    mixed: Tensor = _Attention.apply(query, key, value, sinks, documents, kernels)  # type: ignore[no-untyped-call]
    return mixed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        documents: Documents,
        kernels: Kernels,
    ) -> Tensor:
        out, normaliser = recompute.save_or_reuse(
            "attention", lambda: _forward(query, key, value, sinks, documents, kernels)
        )
        ctx.save_for_backward(query, key, value, sinks, out, normaliser)
        ctx.documents, ctx.kernels = documents, kernels
        return out

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, sinks, out, normaliser = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_query, of_key, of_value = ctx.kernels.backward(
            gradient, query, key, value, out, normaliser, ctx.documents
        )
        of_sinks = None
        if sinks is not None:
            delta = (
                (gradient * out).sum(-1, dtype=normaliser.dtype).t()
            )  # Rounding of the bf16 products averages out over the tokens.
            share = (sinks.to(normaliser.dtype)[:, None] - normaliser).exp_()
            of_sinks = -(share * delta).sum(1).to(sinks.dtype)
        return of_query, of_key, of_value, of_sinks, None, None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    documents: Documents,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Return the output [tokens, heads, size] and the log-sum-exp [heads, tokens], both with the sinks."""
    out, without = kernels.forward(query, key, value, documents)
    if sinks is None:
        return out, without
    normaliser = torch.logaddexp(without, sinks.to(without.dtype)[:, None])
    return out.mul_((without - normaliser).exp_().t()[..., None]), normaliser


def register(kernels: Kernels, ranks: SequenceGroup | None = None) -> str:
    """Register the kernels as an attention implementation of transformers.

    Args:
        kernels: The kernels.
        ranks: The ranks that share sequences, if any do.

    Returns:
        The name of the implementation.
    """
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
        softcap: float | None = None,
        is_part: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Adapt transformers' shapes. Kernels take values whose heads are as large as those of keys.

        Args:
            query: [rows, heads, width, head size]; ``key`` and ``value`` alike, with their own heads and the values' own size.
            is_part: Whether the ranks that share sequences hold the other parts of these rows.

        Returns:
            [rows, width, heads, head size], and no attention weights.

        Raises:
            InputError: The layer has a mask, which the kernels would leave out.
        """
        if attention_mask is not None:
            raise InputError([_own_mask(module)])
        rows, heads, width, size = query.shape
        of_value = value.shape[-1]
        padded = value if of_value == size else nn.functional.pad(value, (0, size - of_value))
        flat_query, flat_key, flat_value = (
            tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, padded)
        )
        documents = Documents(cu_seq_lens_q, max_length_q, scaling, sliding_window, softcap or 0.0)
        if ranks is None or not is_part:
            mixed = attend(flat_query, flat_key, flat_value, s_aux, documents, kernels)
        else:
            sinks = None if s_aux is None else ranks.sinks(s_aux)
            whole = (ranks.queries(flat_query), ranks.keys(flat_key), ranks.keys(flat_value))
            mixed = ranks.results(attend(*whole, sinks, documents, kernels))
        return mixed[..., :of_value].reshape(rows, width, heads, of_value).contiguous(), None

    AttentionInterface.register(NAME, attention)
    return NAME


def _own_mask(module: nn.Module) -> Problem:
    return Problem(
        code="model-packing-unsupported",
        field="model.config",
        value=type(module).__name__,
        message="has an attention mask of its own, which kernels for packed documents would leave out",
        remedy="Choose a newer kind of model.",
    )
