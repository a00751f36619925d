"""Weights into a model that ZeRO-3 has cut over the ranks: every rank reads the part that it keeps, a tensor at a time.

No rank holds the model, and none waits for another: a tensor stored as the model has it costs a rank its own elements, in pieces; one
that is put together (experts stored one by one) is put together whole on each rank, and lives as long as that takes. On the host a rank
needs ``host_peak_bytes`` at most, wherever its weights go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import superoffload
from so_tui_trainer.model import matching
from so_tui_trainer.model.matching import Match
from so_tui_trainer.model.stored import Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PIECE_BYTES = 64 << 20


def host_peak_bytes(found: Match, index: Mapping[str, Stored]) -> int:
    """Host memory that loading takes on each rank at once, beside the weights it keeps: a piece of a file, or the largest conversion,
    whose parts are there stacked and joined while it is made.
    """
    return PIECE_BYTES + 2 * matching.largest_conversion_bytes(found, index)


def empty_model(
    config: PretrainedConfig, meta: PreTrainedModel, implementation: str, ds_config: dict[str, Any], *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in bf16, cut over the ranks, with arbitrary weights; buffers are as the model computes them."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    factory: Any = AutoModelForCausalLM
    with no_init_weights(), superoffload.shard(ds_config):
        causal: PreTrainedModel = factory.from_config(
            config, dtype=torch.bfloat16, attn_implementation=implementation, trust_remote_code=trust_remote_code
        )
    causal.tie_weights()
    _compute_buffers(causal, meta)
    return causal


def initialise(causal: PreTrainedModel) -> None:
    """Random weights as transformers draws them, each module's parameters gathered on their device meanwhile."""
    from transformers.integrations.deepspeed import initialize_weights_zero3

    initialize_weights_zero3(causal)  # type: ignore[no-untyped-call]


@torch.no_grad()
def load(causal: PreTrainedModel, meta: PreTrainedModel, found: Match, index: Mapping[str, Stored]) -> None:
    """Fill the model's weights and stored buffers from a checkpoint that matches it. Raises OSError."""
    tensors: dict[str, Any] = dict(causal.named_parameters(remove_duplicate=False)) | dict(causal.named_buffers())
    done: set[int] = set()
    for conversion in found.conversions:
        wanted = {name: tensors[name] for name in conversion.shapes if name in tensors and id(tensors[name]) not in done}
        done |= {id(tensor) for tensor in wanted.values()}
        if conversion.converter is None:
            for tensor in wanted.values():
                _fill_from_file(tensor, index[conversion.sources[0][1]])
        elif wanted:
            made = matching.realised(meta, conversion, lambda name: index[name].read())
            for name, tensor in wanted.items():
                part, start = _local_shard(tensor)
                part.copy_(made[name].flatten()[start : start + len(part)])


def _fill_from_file(tensor: torch.Tensor, stored: Stored) -> None:
    part, start = _local_shard(tensor)
    step = PIECE_BYTES // stored.dtype.itemsize
    for begin in range(0, len(part), step):
        piece = part[begin : begin + step]
        piece.copy_(stored.elements(start + begin, start + begin + len(piece)))


def _local_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank keeps of a tensor, flat, and where in the flattened tensor that begins; buffers are whole on every rank."""
    return superoffload.local_shard(tensor) if isinstance(tensor, nn.Parameter) else (tensor.data.view(-1), 0)


def _compute_buffers(causal: PreTrainedModel, meta: PreTrainedModel) -> None:
    """Make buffers again that were made while ZeRO-3 gave new tensors its own type: angles of positions in bf16 would be off."""
    for module, plain in zip(causal.modules(), meta.modules(), strict=True):
        buffers = dict(plain.named_buffers(recurse=False))
        if not buffers or next(module.parameters(recurse=False), None) is not None:
            continue
        for key, like in buffers.items():
            have = getattr(module, key)
            if have.dtype != like.dtype:
                setattr(module, key, torch.empty(like.shape, dtype=like.dtype, device=have.device))
        owner: Any = causal
        owner._init_weights(module)
