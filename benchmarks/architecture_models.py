"""The presets' models scaled down to a ten-thousandth of their size, kinds of models without a
preset, and the runs that train them.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from so_tui.spec import ModelSpec, RunSpec, find_preset, with_values
from so_tui.spec.model_table import layer_kinds, packing_problem

PRESETS = (
    "gpt-oss-20b",
    "qwen3-14b",
    "phi-4",
    "llama-3.1-8b",
    "seed-oss-36b",
    "qwen3-30b-a3b",
    "llama-3.3-70b",
)
SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "max_position_embeddings": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Replaces a preset's own values."""
TOKENIZER_KEYS = ("rope_scaling", "pad_token_id", "bos_token_id", "eos_token_id")
"""Keys that are left out, since another tokenizer is used."""
STEPS, SAVED_STEP = 8, 4
_DELTA = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2}
_EXPERTS = {
    key: SHAPE[key] for key in ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_GROUPS = {"n_group": 1, "topk_group": 1}
_WINDOWS = {"layer_types": SHAPE["layer_types"], "sliding_window": 64}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
_INDEXED = {
    **_LATENT,
    "index_topk": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    **_ROUTED,
    **_GROUPS,
}
_COMPUTES_HEAD_DIM = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, **_ROUTED, **_GROUPS},
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "gemma4_text": {
        "global_head_dim": 64,
        **_WINDOWS,
        "vocab_size_per_layer_input": 2048,
        "hidden_size_per_layer_input": 16,
        "final_logit_softcapping": 30.0,
    },
    "qwen3_next": {**_DELTA, **_RECURRENT, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": {**_DELTA, **_RECURRENT},
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "attention_chunk_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 192,
        "interleave_moe_layer_step": 2,
    },
    "gemma3_text": _WINDOWS,
    "gpt2": {},
    "granite": {"logits_scaling": 2.0},
    "mistral": {"sliding_window": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "smollm3": {},
    "exaone4": _WINDOWS,
    "glm4": {},
    "glm4_moe": {**_ROUTED, **_GROUPS},
    "dots1": {**_ROUTED, **_GROUPS, "n_shared_experts": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "minicpm3": {**_LATENT, "dim_model_base": 64},
    "nanochat": {"final_logit_softcapping": 15.0},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "lfm2_moe": {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
}
"""Kinds of models without a preset, by transformers' names: what sets them apart from SHAPE."""
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", _EYES | {"model_type": "siglip_vision_model"}),
    "gemma4": (
        "gemma4_text",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    ),
    "llama4": (
        "llama4_text",
        _EYES | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
    ),
    "mistral3": ("mistral", _EYES | {"model_type": "pixtral", "head_dim": 16}),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 128,
        },
    ),
}
"""Multimodal kinds: the kind of their language part, of which they are trained, and what they see
with.
"""
NAMES = (*PRESETS, *KINDS, *MULTIMODAL)
_COMMON = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def scaled_down(original: ModelSpec) -> ModelSpec:
    """Return a model of the same architecture with random weights, a ten-thousandth of its size."""
    from so_tui_trainer.tools.presets import parameter_table

    shape = {
        key: SHAPE.get(key, value)
        for key, value in original.config.items()
        if key not in TOKENIZER_KEYS
    }
    shape |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    model = ModelSpec(
        id="builtin:tiny", weights="random", config=shape, leaf_modules=original.leaf_modules
    )
    return msgspec.structs.replace(model, parameters=parameter_table(model))


def of_kind(kind: str) -> ModelSpec:
    """Return a small model of a kind with random weights, described as
    ``so-tui presets add FOLDER`` describes it.
    """
    from so_tui_trainer.tools.describe_model import describe

    if kind in KINDS:
        shape = _shape(kind)
    else:
        language, eyes = MULTIMODAL[kind]
        shape = {"model_type": kind, "text_config": _shape(language), "vision_config": eyes}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        *_, answer = describe({"model": folder, "weights": "random", "tokenizer": "builtin:tiny"})
    described = msgspec.convert(answer["model"], ModelSpec)
    return msgspec.structs.replace(described, id="builtin:tiny", tokenizer="")


def _shape(kind: str) -> dict[str, Any]:
    """Return the ``config.json`` of a small decoder."""
    config = (
        {key: SHAPE[key] for key in _COMMON}
        | {"head_dim": 32, "num_hidden_layers": 4}
        | KINDS[kind]
    )
    absent = (
        {"num_hidden_layers"}
        if kind == "nemotron_h"
        else {"head_dim"}
        if kind in _COMPUTES_HEAD_DIM
        else set()
    )
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return (
        {"model_type": kind}
        | {key: value for key, value in config.items() if key not in absent}
        | ids
    )


def small_spec(name: str, mode: str) -> RunSpec:
    """Return the run of a scaled-down preset."""
    changes = {
        "gpus": "1",
        "train.steps": str(STEPS),
        "train.deterministic": "true",
        "train.learning_rate": "3e-3",
        "offload.mode": mode,
        "offload.ratio": "0.5",
        "offload.sub_group_size": "200000",
        "checkpoint.every_steps": str(SAVED_STEP),
        "checkpoint.export": "true",
    }
    model = scaled_down(find_preset(name).spec.model) if name in PRESETS else of_kind(name)
    if packing_problem(layer_kinds(model.config)):
        changes["data.packing"] = "false"
    spec = with_values(find_preset("tiny").spec, changes)
    return msgspec.structs.replace(spec, name=name, title=f"{name}, scaled down", model=model)
