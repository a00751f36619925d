"""Choose the attention implementation, and give it the boundaries of packed documents.

Packed documents must not attend to each other. Flash kernels take the start of each document (``cu_seq_lens``); SDPA and eager attention
get a block-diagonal mask, which transformers builds from position ids that restart.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from so_tui.spec import InputError, ModelSpec, Problem
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.model import flash

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MASKED = ("sdpa", "eager")
"""Implementations that take a mask."""
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Packages that transformers imports for an implementation."""


def choose(model: ModelSpec, *, supports_sdpa: bool, has_sinks: bool, device: torch.device) -> str:
    """Choose the attention implementation, by transformers' name.

    ``auto`` takes flash-attn or torch's own flash kernel on CUDA and SDPA elsewhere. Models with attention sinks get torch's flash kernel
    on CUDA, which adds the sinks, and eager attention elsewhere.

    Args:
        model: The model section.
        supports_sdpa: Whether transformers supports SDPA for this model.
        has_sinks: Whether the attention heads have sinks.
        device: Where the model runs.

    Raises:
        InputError: The implementation that was asked for ignores the sinks, lacks its package, or needs a GPU.
    """
    if has_sinks and model.attention not in ("auto", "eager"):
        message, remedy = "does not support attention sinks, which this model has", "Set it to auto or eager."
        problem = Problem(code="attention-without-sinks", field="model.attention", value=model.attention, message=message, remedy=remedy)
        raise InputError([problem])
    if model.attention != "auto":
        _refuse_unavailable(model.attention, device)
        return model.attention
    if has_sinks:
        return flash.register() if device.type == "cuda" else "eager"
    if not supports_sdpa:  # The model computes something other than softmax attention.
        return "eager"
    if device.type != "cuda":
        return "sdpa"
    if find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return flash.register()


def _refuse_unavailable(name: str, device: torch.device) -> None:
    """Refuse flash-attn without a GPU, or without its package (transformers also accepts the one from ``kernels``).

    Raises:
        InputError: The implementation cannot run here.
    """
    package = _PACKAGES.get(name)
    if package is None:
        return
    if device.type != "cuda":
        code, message = "attention-needs-gpu", "runs on GPUs only"
    elif find_spec(package) is None and find_spec("kernels") is None:
        code, message = "attention-package-missing", f"needs the package {package}, which is not installed"
    else:
        return
    remedy = "Set it to auto, which takes the fastest one that is available."
    raise InputError([Problem(code=code, field="model.attention", value=name, message=message, remedy=remedy)])


def has_sinks(model: nn.Module) -> bool:
    """Return whether the model's attention heads have sinks (gpt-oss)."""
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def arguments(batch: Batch, implementation: str, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of the model's forward pass that keep the documents of a batch apart.

    Args:
        batch: The micro-batch.
        implementation: The attention implementation.
        config: The model's configuration.
        dtype: Type of the model's embeddings.

    Returns:
        Keyword arguments besides the position ids, which restart at every document.
    """
    if implementation not in _MASKED:
        boundaries, longest = batch.boundaries, batch.longest
        return {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}
    if len(set(getattr(config, "layer_types", None) or ())) < 2:
        return {"attention_mask": None}
    # Models that mix kinds of layers take a mask for each kind. The mask that gpt-oss would make itself ignores the position ids.
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    shape = torch.empty((*batch.input_ids.shape, 1), dtype=dtype, device=batch.input_ids.device)  # Stands in for the embeddings.
    known: dict[str, Any] = {
        "config": config,
        "inputs_embeds": shape,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": batch.position_ids,
    }
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {"attention_mask": {kind: makers[kind](**known) for kind in set(config.layer_types)}}
