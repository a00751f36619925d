"""Tensors that belong to a model's weights although nothing trains them: buffers, and parameters that the model itself has frozen.

They are biases of routers (buffers in DeepSeek-V3, parameters in ERNIE 4.5), or a layer's scale.

Checkpoints of runs hold trained weights only. These tensors stay what they were when training began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.spec import ModelSpec
from so_tui_trainer.model import matching
from so_tui_trainer.model.pretrained import weights_folder
from so_tui_trainer.model.stored import read_index

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def untrained(meta: PreTrainedModel, model: ModelSpec) -> dict[str, Tensor]:
    """Return a model's stored tensors that nothing trains, by name: those of the pretrained weights, else as transformers initialises them.

    Args:
        meta: The model on meta tensors.
        model: Where its weights came from.

    Raises:
        InputError: The pretrained weights are no longer here.
    """
    names = meta.state_dict().keys() - trained_shapes(meta, remove_duplicate=False).keys()
    if not names:
        return {}
    found = {name: tensor for name, tensor in _initial(meta).items() if name in names}
    if any(
        tensor.isnan().all() for tensor in found.values()
    ):  # what the constructor says is final (Apertus' activation)
        found |= {
            name: tensor
            for name, tensor in _constructed(meta, model).items()
            if name in found and found[name].isnan().all()
        }
    if model.weights == "pretrained":
        index = read_index(weights_folder(model))
        for conversion in matching.match(meta, index).conversions:
            if here := names & conversion.shapes.keys():
                made = matching.realised(meta, conversion, lambda name: index[name].read())
                found |= {name: made[name] for name in here}
    return found


def trained_shapes(
    model: PreTrainedModel, *, remove_duplicate: bool = True
) -> dict[str, torch.Size]:
    """Return the shapes of the parameters that are trained, by name."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return {name: parameter.shape for name, parameter in named if parameter.requires_grad}


def _initial(meta: PreTrainedModel) -> dict[str, Tensor]:
    """Give each module that has such tensors real ones, and let transformers fill them; trained weights stay on meta tensors.

    Buffers that transformers leaves alone are not numbers.
    """
    owner: Any = meta
    for module in meta.modules():
        buffers = dict(module.named_buffers(recurse=False))
        frozen = {
            name: tensor
            for name, tensor in module.named_parameters(recurse=False)
            if not tensor.requires_grad
        }
        for name, buffer in buffers.items():
            setattr(
                module,
                name,
                torch.full_like(
                    buffer, torch.nan if buffer.is_floating_point() else 0, device="cpu"
                ),
            )
        for name, parameter in frozen.items():
            setattr(
                module,
                name,
                nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=False),
            )
        if buffers or frozen:
            owner._init_weights(module)
    frozen_now = {
        name: tensor.detach()
        for name, tensor in meta.named_parameters()
        if not tensor.requires_grad
    }
    return dict(meta.named_buffers()) | frozen_now


def _constructed(meta: PreTrainedModel, model: ModelSpec) -> dict[str, Tensor]:
    """Return a model's buffers as its constructor makes them. Its weights are never touched, and take no memory."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    factory: Any = AutoModelForCausalLM
    with no_init_weights():
        causal = factory.from_config(
            meta.config, dtype=torch.bfloat16, trust_remote_code=model.trust_remote_code
        )
    return dict(causal.named_buffers())
