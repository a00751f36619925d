"""Scale rotary positions for documents longer than a model was made for, in the terms of transformers' configuration.

An export's config.json has the result, as inference servers read it: ``rope_parameters`` with the positions before scaling, and
``max_position_embeddings`` after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from so_tui.spec import InputError, ModelSpec, Problem, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def scale(config: PretrainedConfig, model: ModelSpec) -> None:
    """Change a configuration as ``model.rope_scaling`` and ``model.rope_factor`` say.

    Raises:
        InputError: The model has no rotary positions, several kinds of them, or scales them already (``rope-not-scalable``).
    """
    own: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    positions = getattr(config, "max_position_embeddings", None)
    if not own or not positions or _has_other_positions(config):
        raise _refusal(model, "the model has no rotary positions")
    if any(isinstance(value, dict) for value in own.values()):
        raise _refusal(model, "the model has other rotary positions in each kind of layer")
    if (kind := own.get("rope_type", "default")) != "default":
        raise _refusal(model, f"the model scales its rotary positions already ({kind})")
    scaled = own | {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "yarn":
        scaled["original_max_position_embeddings"] = positions
    changed: Any = config
    changed.rope_parameters = scaled
    changed.max_position_embeddings = round(positions * model.rope_factor)
    try:
        changed.validate_rope()
    except (
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # Phi-3 and Phi-3.5-MoE know only their own way of scaling.
        raise _refusal(
            model, f"transformers does not scale this model's positions so ({first_line(error)})"
        ) from error


def _has_other_positions(config: PretrainedConfig) -> bool:
    """Return whether a model has none although its configuration describes them, as Granite 4's hybrids do by default."""
    return getattr(config, "position_embedding_type", "rope") != "rope"


def _refusal(model: ModelSpec, message: str) -> InputError:
    remedy = 'Set model.rope_scaling to "model" and model.rope_factor to 1.'
    return InputError(
        [
            Problem(
                code="rope-not-scalable",
                field="model.rope_scaling",
                value=model.rope_scaling,
                message=message,
                remedy=remedy,
            )
        ]
    )
