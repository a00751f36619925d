"""Models of the presets' architectures, scaled down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from so_tui.spec import ModelSpec, find_preset, load_catalog
from so_tui_trainer.model.config import load_config

ONE_OF_EACH = {
    preset.spec.model.config["model_type"]: name
    for name, preset in load_catalog().presets.items()
    if preset.origin == "built-in" and preset.spec.model.weights == "pretrained"
}
"""One preset of each kind of model, by its type."""


def known(kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the kinds that the installed transformers has; older ones lack the newest."""
    return {kind: keys for kind, keys in kinds.items() if kind in CONFIG_MAPPING}


_SHAPES = json.loads((Path(__file__).parents[1] / "data" / "small_models.json").read_bytes())
SMALL: dict[str, Any] = _SHAPES["small"]
LATENT: dict[str, Any] = _SHAPES["latent"]
LONGROPE: dict[str, Any] = _SHAPES["longrope"]
"""For models whose heads turn 8 numbers: documents over 40 tokens get different frequencies."""
OTHERS = known(_SHAPES["others"])
"""Kinds of models without a preset, that one can be made for: what sets them apart from SMALL."""
RECURRENT = known(_SHAPES["recurrent"])
"""Kinds of models with layers that carry a state from token to token."""
IN_ROWS = known(_SHAPES["in_rows"])
"""Kinds of models in which documents of one row would see each other. Indexers have many heads:
with few, tokens have equal scores, of which padding decides which one is chosen.
"""
MULTIMODAL = known(_SHAPES["multimodal"])
"""Kinds of models whose language part is trained."""


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
    factory: Any = AutoModelForCausalLM
    model: PreTrainedModel = factory.from_config(config, dtype=dtype, attn_implementation=attention)
    return model


def load_pretrained(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a folder as users do; also return what transformers says about its keys."""
    factory: Any = AutoModelForCausalLM
    model, info = factory.from_pretrained(folder, output_loading_info=True)
    return model, info


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def are_close(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    relative: float,
    absolute: float,
) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=relative, atol=absolute, msg=name)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
