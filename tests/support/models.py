"""Models of the presets' architectures, scaled down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from so_tui.spec import ModelSpec, find_preset, load_catalog
from so_tui_trainer.model.config import load_config

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "vocab_size": 2000,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_scaling": None,
    "layer_types": ["sliding_attention", "full_attention"],
}
ONE_OF_EACH = {
    preset.spec.model.config["model_type"]: name
    for name, preset in load_catalog().presets.items()
    if preset.origin == "built-in" and preset.spec.model.weights == "pretrained"
}
"""One preset of each kind of model, by its type."""


def known(kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the kinds that the installed transformers has; older ones lack the newest."""
    return {kind: keys for kind, keys in kinds.items() if kind in CONFIG_MAPPING}


LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
OTHERS: dict[str, dict[str, Any]] = known(
    {
        "gemma3_text": {},
        "olmo2": {"head_dim": None, "layer_types": None},
        "mistral": {"layer_types": None},
        "deepseek_v3": {
            **LATENT,
            "head_dim": None,
            "layer_types": None,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "granite": {"layer_types": None, "logits_scaling": 4.0},
        "ernie4_5_moe": {
            "layer_types": None,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_layer_start_index": 0,
        },
        "hunyuan_v1_dense": {"layer_types": None},
        "jetmoe": {"layer_types": None, "head_dim": None, "kv_channels": 16},
        "gemma4_text": {
            "final_logit_softcapping": 2.0,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 2000,
            "hidden_size_per_layer_input": 8,
            "num_experts": None,
        },
    }
)
"""Kinds of models without a preset, that one can be made for: what sets them apart from SMALL."""


DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
KINDS = ["linear_attention", "full_attention"]
RECURRENT: dict[str, dict[str, Any]] = known(
    {
        "qwen3_next": {**DELTA, "layer_types": KINDS, "shared_expert_intermediate_size": 32},
        "qwen3_5_text": {**DELTA, "layer_types": KINDS},
        "falcon_h1": {
            "layer_types": None,
            "lm_head_multiplier": 0.5,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
        "nemotron_h": {
            "layer_types": None,
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 4,
            "num_local_experts": None,
            "moe_shared_expert_intermediate_size": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "jamba": {
            "layer_types": None,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        "minimax": {"layer_types": KINDS, "block_size": 16},
    }
)
"""Kinds of models with layers that carry a state from token to token."""
INDEXED = {
    **LATENT,
    "head_dim": None,
    "layer_types": None,
    "index_topk": 8,
    # with few, tokens have equal scores, of which padding decides which one is chosen
    "index_n_heads": 16,
    "index_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
IN_ROWS: dict[str, dict[str, Any]] = known(
    {
        "llama4_text": {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
            "num_experts_per_tok": 1,
        },
        "deepseek_v32": INDEXED,
        "glm_moe_dsa": INDEXED,
    }
)
"""Kinds of models in which documents of one row would see each other."""


LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 160,
    "original_max_position_embeddings": 40,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}
"""Of models whose heads turn 8 numbers: other frequencies in documents of more than 40 tokens."""


def another(kind: str) -> ModelSpec:
    """Return a kind of model without a preset, with random weights."""
    shape = {
        key: value
        for key, value in (SMALL | (OTHERS | RECURRENT | IN_ROWS)[kind]).items()
        if value is not None
    }
    return ModelSpec(
        id=kind, weights="random", config={"model_type": kind, "pad_token_id": 0, **shape}
    )


def scaled_down(name: str) -> ModelSpec:
    """Return a preset's model with random weights, a thousandth of its size."""
    full = find_preset(name).spec.model
    shape = {
        key: SMALL.get(key, value)
        for key, value in full.config.items()
        if key not in ("rope_scaling", "rope_parameters")
    }
    return ModelSpec(id=full.id, weights="random", config=shape)


def saved(name: str, folder: Path, **changes: object) -> PreTrainedModel:
    """Save a preset's model, scaled down with random weights, in the layout of the hub."""
    torch.manual_seed(0)
    config = load_config(scaled_down(name))
    for key, value in changes.items():
        setattr(config, key, value)
    model = causal_model(config, torch.bfloat16)
    model.save_pretrained(folder)
    return model


def causal_model(
    config: PretrainedConfig, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> PreTrainedModel:
    """Build a causal language model with random weights."""
    factory: Any = AutoModelForCausalLM
    model: PreTrainedModel = factory.from_config(config, dtype=dtype, attn_implementation=attention)
    return model


def load_pretrained(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a folder as users do; also return what transformers says about its keys."""
    factory: Any = AutoModelForCausalLM
    model, info = factory.from_pretrained(folder, output_loading_info=True)
    return model, info


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a leaf, which must have one."""
    assert tensor.grad is not None
    return tensor.grad


def are_close(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    relative: float,
    absolute: float,
) -> None:
    """Assert that tensors agree with those of the same name."""
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=relative, atol=absolute, msg=name)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the gradients of a model's parameters, by name."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
