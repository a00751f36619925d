"""The model of the other trainers: random weights, and for packed batches so-tui's attention
kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.comparison.parts import Shape
from so_tui.spec import find_preset
from so_tui.spec.attention import Needs
from so_tui_trainer.model import attention


def device_of(shape: Shape) -> torch.device:
    """Return the device of a shape."""
    return torch.device("cuda", 0) if shape.cuda else torch.device("cpu")


def packed_attention(shape: Shape) -> str:
    """Return the attention implementation that so-tui chooses by default, by transformers' name."""
    model = find_preset(shape.preset).spec.model
    return attention.choose(model, Needs(head_size=model.config["head_dim"]), device_of(shape))


def random_model(shape: Shape, implementation: str) -> Any:
    """Build the model in bf16, on the GPU if there is one: drawing billions of random weights takes
    minutes on a CPU.
    """
    keys = dict(find_preset(shape.preset).spec.model.config)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(42)
    factory: Any = AutoModelForCausalLM
    with device_of(shape):
        return factory.from_config(config, dtype=torch.bfloat16, attn_implementation=implementation)
