"""The section ``[model]`` of a preset: shape and parameter table, read from a model that is built on meta tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import groupby
from typing import TYPE_CHECKING, Any

from so_tui.spec import ParameterBlock, Tensor, decays
from so_tui.spec.layers import mixing_kinds, recurrent_kinds
from so_tui.spec.sections.parameters import TensorKind, is_matrix
from so_tui_trainer.model.layer_types import kinds_of, same_in_all_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

QUANTISED = ("quantization_config", "compression_config")
"""Keys of a config that say how the weights are quantised."""
_SHAPE = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
]
"""Keys that the planner reads. They are written out even if the model's own config uses a default or another name."""
_NOT_SHAPE = {
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "auto_map",
    *QUANTISED,
}
"""Keys that do not belong into a preset."""
_WIDTHS = ("ffn_dim", "ffn_hidden_size", "n_inner")
"""Names of ``intermediate_size`` in older models."""
_LAYER = re.compile(r"\b((?:layers|blocks|h)\.)(\d+)(?=\.)")
"""The number of a layer in a parameter's name, by the names that models give their list of layers."""


def shape_of(config: PretrainedConfig, causal: PreTrainedModel) -> dict[str, Any]:
    """Return ``[model.config]``: what differs from the defaults of this kind of model, and all that the planner reads. Without None, as in
    TOML.
    """
    shape: dict[str, Any] = _toml_values(
        {key: value for key, value in config.to_diff_dict().items() if key not in _NOT_SHAPE}
    )
    return shape | planned_shape(config, causal)


def planned_shape(config: PretrainedConfig, causal: PreTrainedModel) -> dict[str, Any]:
    """Return what the planner reads of a model, by the names that it uses."""
    own = _without_layers(config)
    named = {key: same_in_all_layers(getattr(own, key, None)) for key in _SHAPE}
    named["intermediate_size"] = named["intermediate_size"] or _width(config, causal)
    named["num_key_value_heads"] = named["num_key_value_heads"] or getattr(
        config, "num_kv_heads", None
    )
    shape: dict[str, Any] = {
        key: value for key, value in named.items() if isinstance(value, int | float)
    }
    kinds = list(kinds_of(config))
    return (
        shape | {"layer_types": kinds} if mixing_kinds(kinds) or recurrent_kinds(kinds) else shape
    )


def _without_layers(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config without what single layers have of their own (Gemma 4), which makes reading the others' values an error."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    plain = deepcopy(config)
    plain.per_layer_config = None
    return plain


def _width(config: PretrainedConfig, causal: PreTrainedModel) -> int | None:
    """Return the feed-forward width if it is not called ``intermediate_size``: by its older names, or the widest input of a projection."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    for key in _WIDTHS:
        if isinstance(value := getattr(config, key, None), int):
            return value
    head = causal.get_output_embeddings()  # type: ignore[no-untyped-call]
    inputs = [
        module.in_features
        for module in causal.modules()
        if isinstance(module, Linear) and module is not head
    ]
    inputs += [module.weight.shape[0] for module in causal.modules() if isinstance(module, Conv1D)]
    return max(inputs, default=None)


def _toml_values(value: Any) -> Any:
    """Remove None, tables with keys that are not text, and lists with an infinity (``time_step_limit``), which JSON cannot hold."""
    if isinstance(value, dict):
        known = {
            key: item for key, item in value.items() if isinstance(key, str) and item is not None
        }
        return {key: _toml_values(item) for key, item in known.items() if not _unwritable(item)}
    if isinstance(value, list | tuple):
        return [_toml_values(item) for item in value if item is not None]
    return value


def _unwritable(value: Any) -> bool:
    if isinstance(value, dict):
        return any(not isinstance(key, str) for key in value)
    return isinstance(value, list | tuple) and any(
        isinstance(item, float) and math.isinf(item) for item in value
    )


def expert_blocks(causal: PreTrainedModel) -> tuple[str, ...]:
    """Return the classes of the blocks with experts. ZeRO-3 all-gathers such a block as a whole, whichever experts a token uses."""
    blocks = {
        type(module).__name__
        for module in causal.modules()
        if any(name == "experts" for name, _ in module.named_children())
    }
    return tuple(sorted(blocks))


def ordered_tensors(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield all parameters in the order of ``named_parameters``; tied ones name the parameter they share."""
    from torch.nn import Embedding

    embeddings = {name for name, module in model.named_modules() if isinstance(module, Embedding)}
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield Tensor(
            name=name,
            shape=tuple(parameter.shape),
            decay=decays(name, parameter.dim()),
            kind=_kind(name, parameter.dim(), embeddings),
            tied=first_name.get(id(parameter), ""),
        )
        first_name.setdefault(id(parameter), name)


def blocks_of(tensors: Iterable[Tensor]) -> tuple[ParameterBlock, ...]:
    """Return the tensors as blocks, with repeated layers written once."""
    blocks: list[ParameterBlock] = []
    for index, group in groupby(tensors, key=lambda tensor: _layer(tensor.name)):
        if index is None:
            blocks.append(ParameterBlock(tensors=tuple(group)))
            continue
        pattern = tuple(
            Tensor(_LAYER.sub(r"\1{i}", t.name, count=1), t.shape, t.decay, t.kind, t.tied)
            for t in group
        )
        last = blocks[-1] if blocks else None
        if last is not None and last.tensors == pattern and last.first + last.repeat == index:
            blocks[-1] = ParameterBlock(repeat=last.repeat + 1, first=last.first, tensors=pattern)
        else:
            blocks.append(ParameterBlock(first=index, tensors=pattern))
    return tuple(blocks)


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found.group(2)) if found else None


def _kind(name: str, dimensions: int, embeddings: set[str]) -> TensorKind:
    if name.rpartition(".")[0] in embeddings:
        return "embedding"
    if not is_matrix(name, dimensions):
        return "other"
    stacked = dimensions == 3 and "conv" not in name
    return "expert" if ".experts." in name or stacked else "linear"
