"""Models that would be trained wrongly, and are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from so_tui.spec import InputError, ModelSpec, Problem
from so_tui.spec.layers import layers_without_attention, recurrent_kinds
from so_tui_trainer.data.batches import needs_rows_apart
from so_tui_trainer.model import attention, recurrent
from so_tui_trainer.model.config import model_problem
from so_tui_trainer.model.layer_types import kinds_of
from so_tui_trainer.model.logits import changes_logits_otherwise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNSUPPORTED_TYPES = {"opt", "nemotron", "doge", "recurrent_gemma", "zamba", "zamba2", "zaya"}
"""Models that build their mask without position ids, do not pass the document boundaries on to their attention, have a mask of their own
that kernels would leave out (doge), or mix tokens where documents cannot be made rows."""
_PLAIN_HEAD = "Choose a model with a plain output projection."


def refuse_unsupported(causal: PreTrainedModel, model: ModelSpec) -> None:
    """Refuse a model that would be trained wrongly.

    Raises:
        InputError: Its loss is not that of a plain output projection, or its documents could not be kept apart.
    """
    head = causal.get_output_embeddings()  # type: ignore[no-untyped-call]
    config = causal.config
    if getattr(head, "bias", None) is not None:
        code, message, remedy = "model-head-bias", "its output projection has a bias", _PLAIN_HEAD
    elif changes_logits_otherwise(config):
        code, remedy = "model-logits-changed", _PLAIN_HEAD
        message = (
            "it changes its logits after the output projection in a way that so-tui does not know"
        )
    elif config.model_type in _UNSUPPORTED_TYPES or not (
        attention.needs_rows(config) or _passes_boundaries(causal)
    ):
        code, remedy = "model-packing-unsupported", "Choose a newer kind of model."
        message = f"documents that are packed into one sequence cannot be told apart by transformers' code for {config.model_type}"
    else:
        return
    raise InputError([model_problem(code, model, message, remedy)])


def _passes_boundaries(causal: PreTrainedModel) -> bool:
    """Return whether transformers' code gives document boundaries to all attention of a model.

    Models with recurrent layers do so for its flash attention, although they do not say that they take any other.
    """
    model_class, config = type(causal), causal.config
    kinds = set(kinds_of(config))
    carrying = recurrent_kinds(kinds)
    without_attention = carrying and layers_without_attention(kinds) == len(kinds)
    attends = model_class._supports_attention_backend or (
        carrying and model_class._supports_flash_attn
    )
    return bool(attends or without_attention)


def refuse_unlisted(causal: PreTrainedModel, model: ModelSpec) -> None:
    """Refuse a model with layers that carry a state from token to token, unless its spec says so: data is laid out by the spec.

    Raises:
        InputError: It has such layers, and ``model.config`` lists none.
    """
    layers = recurrent.documents_of(causal).layers
    if layers and not needs_rows_apart(model):
        message = f"does not list the {layers} layers that carry a state from token to token"
        remedy = "Add the model anew with `so-tui presets add`, or list the kind of each layer, such as linear_attention."
        raise InputError(
            [
                Problem(
                    code="recurrent-layers-unlisted",
                    field="model.config.layer_types",
                    value="",
                    message=message,
                    remedy=remedy,
                )
            ]
        )
