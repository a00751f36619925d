"""Load weights into a model that ZeRO-3 has sharded: every rank reads its own shard, one tensor after the other.

No rank holds the whole model, and none waits for another. A tensor that is stored as the model has it is read in pieces. One that has to
be assembled (experts stored one by one) is assembled as a whole on each rank, and freed afterwards. A rank needs at most
``host_peak_bytes`` of host memory, wherever its weights go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import superoffload
from so_tui_trainer.model import matching
from so_tui_trainer.model.matching import Conversion, Match
from so_tui_trainer.model.stored import Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PIECE_BYTES = 64 << 20
"""Bytes of a file that are read together."""
OnFiles = Callable[[int, int], None]
"""Called with a number of files that have been read, and that of all files."""


def host_peak_bytes(found: Match, index: Mapping[str, Stored]) -> int:
    """Return the peak host memory of loading on each rank, in bytes, besides its weights.

    It is a piece of a file, or the largest conversion, whose parts exist both stacked and joined while it runs.
    """
    return PIECE_BYTES + 2 * matching.largest_conversion_bytes(found, index)


def empty_model(
    config: PretrainedConfig,
    meta: PreTrainedModel,
    implementation: str,
    ds_config: dict[str, Any],
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model in bf16, sharded, with uninitialised weights and computed buffers.

    Args:
        config: The model's configuration.
        meta: The same model on meta tensors.
        implementation: Attention implementation.
        ds_config: DeepSpeed's configuration.
        trust_remote_code: Whether the model's own code may run.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    factory: Any = AutoModelForCausalLM
    with no_init_weights(), superoffload.shard(ds_config):
        causal: PreTrainedModel = factory.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation=implementation,
            trust_remote_code=trust_remote_code,
        )
    causal.tie_weights()
    _compute_buffers(causal, meta)
    return causal


def initialise(causal: PreTrainedModel) -> None:
    """Draw random weights as transformers does. Each module's parameters are all-gathered on their device meanwhile."""
    from transformers.integrations.deepspeed import initialize_weights_zero3

    initialize_weights_zero3(causal)  # type: ignore[no-untyped-call]


@torch.no_grad()
def load(
    causal: PreTrainedModel,
    meta: PreTrainedModel,
    found: Match,
    index: Mapping[str, Stored],
    on_files: OnFiles,
) -> None:
    """Fill the model's weights and stored buffers from a checkpoint that matches it.

    Args:
        causal: The sharded model.
        meta: The same model on meta tensors.
        found: How the stored tensors become the model's.
        index: The stored tensors.
        on_files: Called before the first file, and after the last conversion that needs one.

    Raises:
        OSError: A file cannot be read.
    """
    left = Counter(path for conversion in found.conversions for path in _files(conversion, index))
    files, read = len(left), 0
    on_files(read, files)
    tensors: dict[str, Any] = dict(causal.named_parameters(remove_duplicate=False)) | dict(
        causal.named_buffers()
    )
    done: set[int] = set()
    for conversion in found.conversions:
        wanted = {
            name: tensors[name]
            for name in conversion.shapes
            if name in tensors and id(tensors[name]) not in done
        }
        done |= {id(tensor) for tensor in wanted.values()}
        if conversion.converter is None:
            for tensor in wanted.values():
                _fill_from_file(tensor, index[conversion.sources[0][1]])
        elif wanted:
            made = matching.realised(meta, conversion, lambda name: index[name].read())
            for name, tensor in wanted.items():
                part, start = _local_shard(tensor)
                part.copy_(made[name].flatten()[start : start + len(part)])
        paths = _files(conversion, index)
        left.subtract(paths)
        if completed := sum(not left[path] for path in paths):
            read += completed
            on_files(read, files)


def _files(conversion: Conversion, index: Mapping[str, Stored]) -> set[Path]:
    return {index[name].path for _, name in conversion.sources}


def _fill_from_file(tensor: torch.Tensor, stored: Stored) -> None:
    part, start = _local_shard(tensor)
    step = PIECE_BYTES // stored.dtype.itemsize
    for begin in range(0, len(part), step):
        piece = part[begin : begin + step]
        piece.copy_(stored.elements(start + begin, start + begin + len(piece)))


def _local_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's flat shard of a tensor, and its start in the flattened tensor. Buffers are whole on every rank."""
    return (
        superoffload.local_shard(tensor)
        if isinstance(tensor, nn.Parameter)
        else (tensor.data.view(-1), 0)
    )


def _compute_buffers(causal: PreTrainedModel, meta: PreTrainedModel) -> None:
    """Recompute buffers that ZeRO-3 created with the model's type: rotary frequencies in bf16 would be inaccurate."""
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
