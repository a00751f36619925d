"""Models of the presets' architectures, scaled down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from so_tui.spec import ModelSpec, load_catalog
from so_tui_trainer.model.build import load_config

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
    for name, preset in load_catalog(Path("/nowhere")).presets.items()
    if preset.spec.model.weights == "pretrained"
}
"""One preset of each kind of model, by its type."""


def scaled_down(name: str) -> ModelSpec:
    """Return a preset's model with random weights, a thousandth of its size."""
    full = load_catalog(Path("/nowhere")).presets[name].spec.model
    shape = {key: SMALL.get(key, value) for key, value in full.config.items() if key not in ("rope_scaling", "rope_parameters")}
    return ModelSpec(id=full.id, weights="random", config=shape)


def saved(name: str, folder: Path, **changes: object) -> PreTrainedModel:
    """Save a preset's model, scaled down with random weights, in the layout of the hub: saving reverts what loading converts."""
    torch.manual_seed(0)
    config = load_config(scaled_down(name))
    for key, value in changes.items():
        setattr(config, key, value)
    model = causal_model(config, torch.bfloat16)
    model.save_pretrained(folder)
    return model


def causal_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32, attention: str | None = None) -> PreTrainedModel:
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
