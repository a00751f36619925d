"""Which attention runs, and torch's own variable-length kernel as one that transformers can use.

Packed documents must not see each other. The flash and varlen kernels are told where documents start (``cu_seq_lens``); SDPA and eager
get a block-diagonal mask, which transformers builds from position ids that restart.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from so_tui.spec import ModelSpec
from so_tui_trainer.batches import Batch

VARLEN = "so_tui_varlen"


def choose(model: ModelSpec, supports_sdpa: bool, device: torch.device) -> str:
    """The attention implementation in transformers' terms. ``auto``: flash-attn, else torch's varlen kernel, else SDPA, else eager."""
    if model.attention != "auto":
        return model.attention
    if not supports_sdpa:  # the model does more than softmax attention (sinks, say)
        return "eager"
    if device.type != "cuda":
        return "sdpa"
    if find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return _register_varlen()


def arguments(batch: Batch, implementation: str) -> dict[str, Any]:
    """What the model's forward must be told about the documents of a batch."""
    if implementation in ("sdpa", "eager"):
        return {}
    boundaries, longest = batch.boundaries, batch.longest
    return {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}


def _register_varlen() -> str:
    from torch.nn.attention import varlen
    from transformers import AttentionInterface

    varlen_attn: Any = varlen.varlen_attn
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 repeats the key heads itself, later ones share them

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """``query``: [rows, heads, width, head size]; the result: [rows, width, heads, head size]."""
        if cu_seq_lens_q is None or max_length_q is None:
            raise ValueError("the varlen kernel needs the boundaries of the documents")
        rows, heads, width, _ = query.shape
        if heads != key.shape[1] and not grouped:
            key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        options: dict[str, Any] = {"scale": scaling, "window_size": window} | (
            {"enable_gqa": True} if grouped and heads != key.shape[1] else {}
        )
        mixed: Tensor = varlen_attn(*flat, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options)
        return mixed.view(rows, width, heads, -1), None

    AttentionInterface.register(VARLEN, attend)
    return VARLEN
