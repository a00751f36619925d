"""Layers that carry a state from token to token (Mamba, gated delta rule, short convolutions): packed documents stay apart in them.

Their kernels start each row with an empty state, and few take document boundaries. So the part of a layer that mixes tokens computes each
document as a row of its own (``so_tui_trainer.data.rows_apart``); attention and feed-forward blocks see the packed tokens as always.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui_trainer.model.layer_types import kinds_of
from so_tui_trainer.model.recompute import checkpointed_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_OWNED = "_so_tui_documents"
"""Attribute of a model that has its ``Documents``."""


class Documents:
    """The documents of the micro-batch that a model computes, as rows. Backward recomputes layers with the same."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        """How many layers of the model carry a state from token to token."""
        self.rows: tuple[Tensor, ...] = ()
        """What ``rows_apart`` returned, on the model's device."""


def documents_of(causal: PreTrainedModel) -> Documents:
    """Return the documents that the layers of ``causal`` compute which carry a state; the first call makes them do so."""
    found = causal.__dict__.get(_OWNED)
    if not isinstance(found, Documents):
        layers = checkpointed_layers(causal)
        kinds = chain(kinds_of(causal.config.get_text_config()), repeat(None))
        mixers = [
            mixer
            for layer, kind in zip(layers, kinds, strict=False)
            if (mixer := _mixer(layer, kind)) is not None
        ]
        found = causal.__dict__[_OWNED] = Documents(len(mixers))
        for mixer in mixers:
            mixer.forward = partial(
                _each_alone, mixer.forward, _other_arguments(mixer.forward), found
            )
    return found


def _mixer(layer: nn.Module, kind: str | None) -> nn.Module | None:
    """Return the part of a layer that has a convolution over tokens, as nearly all recurrences have; else attention that is linear."""
    for module in layer.modules():
        if any(type(part) is nn.Conv1d for part in module.children()):
            return module
    return getattr(layer, "self_attn", None) if kind == "linear_attention" else None


def _other_arguments(run: Callable[..., Any]) -> dict[str, None]:
    """Return what else a function demands: masks and caches, of which a row that is one document needs none."""
    _, *others = inspect.signature(run).parameters.values()
    demanded = (
        other.name
        for other in others
        if other.default is other.empty and other.kind is other.POSITIONAL_OR_KEYWORD
    )
    return dict.fromkeys(demanded)


def _each_alone(
    run: Callable[..., Any],
    others: dict[str, None],
    documents: Documents,
    hidden_states: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    """Compute ``run`` with each document as a row, [rows, width, size] to the same. Without documents, as it was called."""
    if not documents.rows:
        return run(hidden_states, *rest, **options)
    places, *groups = documents.rows
    parts = _Spread.apply(hidden_states.flatten(0, 1), places, *groups)  # type: ignore[no-untyped-call]
    found = [run(part, **others) for part in parts]
    if isinstance(found[0], tuple):
        return _joined([part[0] for part in found], places, hidden_states), *found[0][1:]
    return _joined(found, places, hidden_states)


def _joined(parts: Sequence[Tensor], places: Tensor, like: Tensor) -> Tensor:
    joined: Tensor = _Join.apply(places, *parts)  # type: ignore[no-untyped-call]
    return joined.view(*like.shape[:-1], joined.shape[-1])


class _Spread(torch.autograd.Function):
    """[tokens, size] to rows, a tensor for each group. What is beyond a document's end has no gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, *groups: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places)
        return tuple(tokens[group] for group in groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        together = torch.cat([gradient.flatten(0, 1) for gradient in gradients])
        return together[places], None, *(None for _ in gradients)


class _Join(torch.autograd.Function):
    """Rows, a tensor for each group, to [tokens, size]."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shapes = [part.shape for part in parts]
        return torch.cat([part.flatten(0, 1) for part in parts])[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        sizes = [rows * width for rows, width, _ in ctx.shapes]
        together = gradients[0].new_zeros(sum(sizes), gradients[0].shape[-1])
        together[places] = gradients[0]
        return None, *(
            part.view(shape)
            for part, shape in zip(torch.split(together, sizes), ctx.shapes, strict=True)
        )
