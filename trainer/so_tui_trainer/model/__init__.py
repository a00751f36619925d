"""From a model's name to a model that trains: weights, attention, kernels, activation checkpointing
and the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

Gradients = tuple["Tensor | None", ...]
"""What the backward of an autograd function returns: a gradient for each argument of its forward,
None where there is none.
"""


# What a model's configuration says of its layers: their kinds, by transformers' names, and what
# all of them share.


def kinds_of(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the kind of each layer; nothing where the model has only one and does not say
    which.
    """
    return tuple(getattr(config, "layer_types", None) or ())


def same_in_all_layers(value: Any) -> Any:
    """Return a value of a configuration, or that of each layer where they are listed and equal
    (HunYuan); None where they differ.
    """
    if not isinstance(value, list):
        return value
    return value[0] if value and all(one == value[0] for one in value) else None


def apply(function: Any, *arguments: Any) -> Tensor:
    """Call an autograd function with one result; torch leaves its ``apply`` without types."""
    result: Tensor = function.apply(*arguments)
    return result
