"""The model that the others train: random weights, and for packed batches the attention kernel that so-tui takes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.comparison.parts import Shape
from so_tui.spec import find_preset
from so_tui_trainer.model import attention


def device_of(shape: Shape) -> torch.device:
    return torch.device("cuda", 0) if shape.cuda else torch.device("cpu")


def packed_attention(shape: Shape) -> str:
    """What so-tui chooses where nothing is asked for, in transformers' terms."""
    return attention.choose(find_preset(shape.preset).spec.model, supports_sdpa=True, has_sinks=False, device=device_of(shape))


def random_model(shape: Shape, implementation: str) -> Any:
    """The shape in bf16, on the GPU where there is one: random numbers for billions of weights take minutes on a CPU."""
    keys = dict(find_preset(shape.preset).spec.model.config)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(42)
    with device_of(shape):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=implementation)  # type: ignore[no-untyped-call]
