"""Buffers that belong to a model's weights although nothing trains them, such as the bias of a router (DeepSeek-V3) or a layer's scale.

Checkpoints of runs hold trained weights only. These tensors stay what they were when training began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from so_tui.spec import ModelSpec
from so_tui_trainer.model import matching
from so_tui_trainer.model.pretrained import weights_folder
from so_tui_trainer.model.stored import read_index

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def stored_buffers(meta: PreTrainedModel, model: ModelSpec) -> dict[str, Tensor]:
    """Return the stored buffers of a model by name: those of the pretrained weights, else as transformers initialises them.

    Args:
        meta: The model on meta tensors.
        model: Where its weights came from.

    Raises:
        InputError: The pretrained weights are no longer here.
    """
    names = meta.state_dict().keys() - dict(meta.named_parameters(remove_duplicate=False)).keys()
    if not names:
        return {}
    found = {name: tensor for name, tensor in _initial(meta).items() if name in names}
    if model.weights == "pretrained":
        index = read_index(weights_folder(model))
        for conversion in matching.match(meta, index).conversions:
            if here := names & conversion.shapes.keys():
                made = matching.realised(meta, conversion, lambda name: index[name].read())
                found |= {name: made[name] for name in here}
    return found


def _initial(meta: PreTrainedModel) -> dict[str, Tensor]:
    """Give each module with buffers real ones, and let transformers fill them; weights stay on meta tensors."""
    owner: Any = meta
    for module in meta.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        if buffers:
            owner._init_weights(module)
    return dict(meta.named_buffers())
