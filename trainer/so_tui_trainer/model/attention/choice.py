"""Choose a model's attention backend, and give it the boundaries of packed documents.

Packed documents must not attend to each other. Kernels take the start of each document (``cu_seq_lens``); SDPA and eager attention get a
block-diagonal mask, which transformers builds from position ids that restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from so_tui.machine.software import package_version
from so_tui.spec import InputError, ModelSpec, Problem
from so_tui.spec.attention import (
    FORMER_NAMES,
    KERNELS,
    MASKED_BACKENDS,
    OBSTACLES,
    UNKNOWN_GPU,
    AttentionBackend,
    Chosen,
    Needs,
    Obstacle,
    Present,
    choose_backend,
    obstacle_to,
)
from so_tui.spec.layers import mixing_kinds, recurrent_kinds
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.model.attention.backends import kernels_of
from so_tui_trainer.model.attention.exchange import sequence_group
from so_tui_trainer.model.attention.varlen import NAME, register
from so_tui_trainer.model.layer_types import kinds_of
from so_tui_trainer.older_versions import cache_argument

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CODES: dict[Obstacle, str] = {
    "no-gpu": "attention-needs-gpu",
    "other-gpu": "attention-other-gpu",
    "not-installed": "attention-package-missing",
    "head-size": "attention-head-size",
    "softcap": "attention-without-softcap",
    "sinks": "attention-without-sinks",
    "rows": "attention-without-rows",
    "not-deterministic": "attention-not-deterministic",
}
"""Codes of the refusal of a backend."""
_MASKS_WITHOUT_POSITIONS = {"granitemoehybrid"}
"""Models with recurrent layers whose own mask ignores that position ids restart. Their recurrent layers need none."""


def present(device: torch.device) -> Present:
    """Return what this host has for attention on a device."""
    if device.type != "cuda":
        return Present(generation=None)
    packages = frozenset(
        kernel.package for kernel in KERNELS if kernel.package and package_version(kernel.package)
    )
    # With ROCm a "capability" is AMD's own number: 9.4 of an MI300A is not Hopper.
    generation = UNKNOWN_GPU if torch.version.hip else torch.cuda.get_device_capability(device)[0]
    return Present(generation=generation, packages=packages)


def needs_of(
    config: PretrainedConfig, *, supports_sdpa: bool, sinks: bool, deterministic: bool
) -> Needs:
    """Return what a model asks of attention.

    Args:
        config: The model's configuration.
        supports_sdpa: Whether transformers supports SDPA for it, as it does where a model computes plain softmax attention.
        sinks: Whether its heads have sinks.
        deterministic: Whether backward passes must be deterministic.
    """
    latent = (getattr(config, "qk_nope_head_dim", None) or 0) + (
        getattr(config, "qk_rope_head_dim", None) or 0
    )
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    widest = max(
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layers
    )
    size = latent or widest
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    rows = needs_rows(config)
    return Needs(
        head_size=size,
        sinks=sinks,
        softcap=softcap,
        rows=rows,
        deterministic=deterministic,
        plain=supports_sdpa,
    )


def decide(model: ModelSpec, needs: Needs, available: Present) -> Chosen:
    """Return the backend of a model: the one that was asked for, else the fastest that can be used.

    Raises:
        InputError: The backend that was asked for cannot be used.
    """
    if model.attention == "auto":
        return choose_backend(needs, available)
    backend: AttentionBackend = FORMER_NAMES.get(model.attention) or model.attention  # type: ignore[assignment]
    if (obstacle := obstacle_to(backend, needs, available)) is None:
        return Chosen(backend)
    remedy = "Set it to auto, which takes the fastest one that can be used."
    problem = Problem(
        code=_CODES[obstacle],
        field="model.attention",
        value=model.attention,
        message=OBSTACLES[obstacle],
        remedy=remedy,
    )
    raise InputError([problem])


def choose(
    model: ModelSpec, needs: Needs, device: torch.device, ranks_per_sequence: int = 1
) -> str:
    """Choose the attention implementation, by transformers' name, and register it. All ranks must call it.

    Raises:
        InputError: The backend that was asked for cannot be used, or the one that can does not take parts of sequences.
    """
    backend = decide(model, needs, present(device)).backend
    if backend not in MASKED_BACKENDS:
        return register(kernels_of(backend), sequence_group(ranks_per_sequence))
    if ranks_per_sequence == 1:
        return backend
    message, remedy = (
        f"needs attention that takes document boundaries, and here it runs on {backend}",
        "Set it to 1.",
    )
    code = "sequence-parallel-attention"
    raise InputError(
        [
            Problem(
                code=code,
                field="train.sequence_parallel",
                value=str(ranks_per_sequence),
                message=message,
                remedy=remedy,
            )
        ]
    )


def has_sinks(model: nn.Module) -> bool:
    """Return whether the model's attention heads have sinks (gpt-oss)."""
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def needs_rows(config: PretrainedConfig) -> bool:
    """Return whether each document needs a row of its own, since layers of the model would mix the documents of one row."""
    return bool(mixing_kinds(kinds_of(config)))


def takes_boundaries(implementation: str) -> bool:
    """Return whether an implementation, by transformers' name, takes document boundaries instead of a mask."""
    return implementation == NAME


def arguments(
    batch: Batch, implementation: str, config: PretrainedConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of the model's forward pass that say where its tokens are, and keep the documents of a batch apart.

    Args:
        batch: The micro-batch.
        implementation: The attention implementation.
        config: The model's configuration.
        dtype: Type of the model's embeddings.

    Returns:
        Keyword arguments: position ids, which restart at every document, and boundaries or masks. Nothing for a model that needs a row for
        each document: its own positions and masks are right for that document, and the padding after it is seen by no token.
    """
    if needs_rows(config):
        return {}
    positions: dict[str, Any] = {"position_ids": batch.position_ids}
    if takes_boundaries(implementation):
        boundaries, longest = batch.boundaries, batch.longest
        kernel: dict[str, Any] = {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        return positions | kernel | ({"is_part": True} if batch.is_part else {})
    kinds = set(kinds_of(config))
    apart = config.model_type in _MASKS_WITHOUT_POSITIONS
    if (len(kinds) < 2 or recurrent_kinds(kinds)) and not apart:
        return positions | {"attention_mask": None}
    # Models that mix kinds of layers take a mask for each kind. The mask that gpt-oss would make itself ignores the position ids.
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    shape = torch.empty(
        (*batch.input_ids.shape, 1), dtype=dtype, device=batch.input_ids.device
    )  # Stands in for the embeddings.
    known: dict[str, Any] = {
        "config": config,
        "inputs_embeds": shape,
        "attention_mask": None,
        cache_argument(create_causal_mask): None,
        "position_ids": batch.position_ids,
    }
    if apart:
        return positions | {"attention_mask": create_causal_mask(**known)}
    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    return positions | {"attention_mask": {kind: makers[kind](**known) for kind in kinds}}
