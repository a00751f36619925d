"""The kinds of a model's layers, by transformers' names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def kinds_of(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the kind of each layer; nothing where the model has only one and does not say which."""
    return tuple(getattr(config, "layer_types", None) or ())
