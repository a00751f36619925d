"""LongRoPE (Phi-3, Phi-4-mini, MiniCPM 3): rotary frequencies by the length of each document.

Such a model has other frequencies in sequences that are longer than its original length. transformers chooses one of the two sets for a
whole forward pass, by the largest position in it. That is wrong where documents are packed, and where ranks have parts of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from so_tui_trainer.data.batches import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWNED = "_so_tui_long_documents"
"""Attribute of a model that has its ``LongDocuments``."""


class LongDocuments:
    """Which tokens of the micro-batch that a model computes are in documents longer than its original length."""

    def __init__(self, original_length: int | None) -> None:
        self.original_length = original_length
        """Tokens; None for a model without LongRoPE."""
        self.tokens: Tensor | None = None
        """[rows, width] bool; None before the first micro-batch."""

    def look_at(self, batch: Batch) -> None:
        """Note the documents of a micro-batch."""
        if self.original_length is not None:
            self.tokens = batch.document_lengths() > self.original_length


def long_documents_of(causal: PreTrainedModel) -> LongDocuments:
    """Return the documents by which ``causal`` chooses its frequencies; the first call makes it do so."""
    found = causal.__dict__.get(_OWNED)
    if not isinstance(found, LongDocuments):
        rotary: list[Any] = [
            module
            for module in causal.modules()
            if getattr(module, "rope_type", None) == "longrope"
        ]
        length = (
            int(rotary[0].config.rope_parameters["original_max_position_embeddings"])
            if rotary
            else None
        )
        found = causal.__dict__[_OWNED] = LongDocuments(length)
        for module in rotary:
            module.forward = partial(_by_document, module.forward, found)
    return found


def _by_document(
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    documents: LongDocuments,
    x: Tensor,
    position_ids: Tensor,
) -> tuple[Tensor, ...]:
    """Return cosines and sines of each token, [rows, width, size]: ``run`` once with each set of frequencies."""
    if documents.tokens is None or documents.original_length is None:
        return run(x, position_ids)
    short = run(x, position_ids.clamp(max=documents.original_length - 1))
    beyond = position_ids.new_full((len(position_ids), 1), documents.original_length)
    long = run(x, torch.cat((position_ids, beyond), dim=1))
    return tuple(
        torch.where(documents.tokens[..., None], angles[:, :-1], other)
        for angles, other in zip(long, short, strict=True)
    )
