"""Which attention runs, and what it must be told.

Packed documents must not see each other. The flash kernels are told where documents start (``cu_seq_lens``); SDPA and eager
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
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def choose(model: ModelSpec, *, supports_sdpa: bool, has_sinks: bool, device: torch.device) -> str:
    """The attention implementation in transformers' terms. ``auto``: on CUDA flash-attn, else torch's own flash kernel; elsewhere SDPA;
    eager where the model needs it.

    Models with sinks get torch's flash kernel on CUDA, which adds them, and eager attention elsewhere. Raises InputError when another
    one is asked for (flash-attn 2 and 3 and SDPA would leave the sinks out), or a package that is not here.
    """
    if has_sinks and model.attention not in ("auto", "eager"):
        message, remedy = "knows no attention sinks, which this model has", "Set it to auto or eager."
        raise InputError([Problem(field="model.attention", value=model.attention, message=message, remedy=remedy)])
    if model.attention != "auto":
        _refuse_what_is_not_here(model.attention, device)
        return model.attention
    if has_sinks:
        return flash.register() if device.type == "cuda" else "eager"
    if not supports_sdpa:  # the model does something else than softmax attention
        return "eager"
    if device.type != "cuda":
        return "sdpa"
    if find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return flash.register()


def _refuse_what_is_not_here(name: str, device: torch.device) -> None:
    """Raises InputError for a flash-attn without its package (transformers also takes one from ``kernels``), or without a GPU."""
    package = _PACKAGES.get(name)
    if package is None:
        return
    if device.type != "cuda":
        message = "runs on GPUs only"
    elif find_spec(package) is None and find_spec("kernels") is None:
        message = f"needs the package {package}, which is not installed"
    else:
        return
    remedy = "Set it to auto, which takes the fastest one that is here."
    raise InputError([Problem(field="model.attention", value=name, message=message, remedy=remedy)])


def has_sinks(model: nn.Module) -> bool:
    """Whether the model's heads have a sink each (gpt-oss)."""
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


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
