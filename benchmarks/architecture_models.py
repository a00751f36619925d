"""The presets' models scaled down to a ten-thousandth of their size, and the runs that train them."""

from __future__ import annotations

from typing import Any

import msgspec

from so_tui.spec import ModelSpec, RunSpec, find_preset, with_values

NAMES = ("gpt-oss-20b", "qwen3-14b", "phi-4", "llama-3.1-8b", "seed-oss-36b", "qwen3-30b-a3b", "llama-3.3-70b")
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


def scaled_down(original: ModelSpec) -> ModelSpec:
    """Return a model of the same architecture with random weights, a ten-thousandth of its size."""
    from so_tui_trainer.tools.presets import parameter_table

    shape = {key: SHAPE.get(key, value) for key, value in original.config.items() if key not in TOKENIZER_KEYS}
    shape |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    model = ModelSpec(id="builtin:tiny", weights="random", config=shape, leaf_modules=original.leaf_modules)
    return msgspec.structs.replace(model, parameters=parameter_table(model))


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
    spec = with_values(find_preset("tiny").spec, changes)
    return msgspec.structs.replace(spec, name=name, title=f"{name}, scaled down", model=scaled_down(find_preset(name).spec.model))
