"""Kinds of layers by their names in ``layer_types``: in which of them documents of one sequence can be kept apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from so_tui.spec.errors import Problem

_KEEP_APART = frozenset({"full_attention", "sliding_attention", "mlp", "moe"})
"""Attention that takes the boundaries of documents or a mask, and layers that compute each token by itself."""
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid"})
"""Layers that carry a state from token to token. Packed documents are rows of their own inside them."""
_WITHOUT_ATTENTION = frozenset(
    {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "mlp", "moe"}
)


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; nothing where the model does not say."""
    kinds = config.get("layer_types")
    return (
        tuple(kind for kind in kinds if isinstance(kind, str))
        if isinstance(kinds, list | tuple)
        else ()
    )


def mixing_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of layers in which documents of one sequence would see each other, such as attention in chunks."""
    return tuple(sorted(set(kinds) - _KEEP_APART - _RECURRENT))


def recurrent_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of layers that carry a state from token to token: recurrences and convolutions."""
    return tuple(sorted(_RECURRENT.intersection(kinds)))


def layers_without_attention(kinds: Iterable[str]) -> int:
    """Return how many layers have no attention over pairs of tokens."""
    return sum(kind in _WITHOUT_ATTENTION for kind in kinds)


def packing_problem(kinds: Iterable[str]) -> Problem | None:
    """Return why documents of a model with layers of these kinds cannot be packed; None if they can."""
    mixing = mixing_kinds(kinds)
    if not mixing:
        return None
    message = f"the model has layers of {', '.join(mixing)}, in which documents packed into one sequence would see each other"
    remedy = "Set it to false: each document is a sequence of its own."
    return Problem(
        code="packing-mixes-documents",
        field="data.packing",
        value="true",
        message=message,
        remedy=remedy,
    )
