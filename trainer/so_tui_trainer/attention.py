"""Which attention runs, and torch's own variable-length kernel as one that transformers can use.

Packed documents must not see each other. The flash and varlen kernels are told where documents start (``cu_seq_lens``); SDPA and eager
get a block-diagonal mask, which transformers builds from position ids that restart.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.spec import ModelSpec
from so_tui_trainer.batches import Batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VARLEN = "so_tui_varlen"
_MASKED = ("sdpa", "eager")


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


def arguments(batch: Batch, implementation: str, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What the model's forward must be told about the documents of a batch, beside position ids that restart."""
    if implementation not in _MASKED:
        boundaries, longest = batch.boundaries, batch.longest
        return {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}
    if len(set(getattr(config, "layer_types", None) or ())) < 2:
        return {"attention_mask": None}
    # Models that mix kinds of layers take a mask for each kind. gpt-oss would make its own without looking at the position ids.
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    shape = torch.empty((*batch.input_ids.shape, 1), dtype=dtype, device=batch.input_ids.device)  # what embeddings would tell
    known: dict[str, Any] = {
        "config": config,
        "inputs_embeds": shape,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": batch.position_ids,
    }
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {"attention_mask": {kind: makers[kind](**known) for kind in set(config.layer_types)}}


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
