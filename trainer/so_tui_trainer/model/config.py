"""The configuration of the model that is trained: of a hub id, a folder, or a shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from so_tui.spec import InputError, ModelSpec, first_line, resolve_source
from so_tui.spec.errors import reject
from so_tui.spec.model_table import dropouts
from so_tui_trainer.hub import model_problem
from so_tui_trainer.pointers import refuse_pointers
from so_tui_trainer.remote_code import explained, load_arguments, without_hub_kernels

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Scale rotary positions for documents longer than a model was made for, in the terms of
# transformers' configuration.
#
# An export's config.json has the result, as inference servers read it: ``rope_parameters`` with
# the positions before scaling, and ``max_position_embeddings`` after it.


def _scale_rope(config: PretrainedConfig, model: ModelSpec) -> None:
    """Change a configuration as ``model.rope_scaling`` and ``model.rope_factor`` say.

    Raises:
        InputError: The model has no rotary positions, several kinds of them, or scales them already
            (``rope-not-scalable``).
    """
    own: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    positions = getattr(config, "max_position_embeddings", None)
    # Granite 4's hybrids have no rotary positions by default, although their configuration
    # describes them.
    others = getattr(config, "position_embedding_type", "rope") != "rope"
    if not own or not positions or others:
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
    # Phi-3 and Phi-3.5-MoE know only their own way of scaling.
    except (ValueError, KeyError, TypeError) as error:
        raise _refusal(
            model, f"transformers does not scale this model's positions so ({first_line(error)})"
        ) from error


def _refusal(model: ModelSpec, message: str) -> InputError:
    return reject(
        "rope-not-scalable",
        "model.rope_scaling",
        model.rope_scaling,
        message,
        'Set model.rope_scaling to "model" and model.rope_factor to 1.',
    )


def load_config(model: ModelSpec) -> PretrainedConfig:
    """Load the model's configuration, without its quantisation, and with the spec's scaling of
    rotary positions.

    Raises:
        InputError: It cannot be loaded, or its positions cannot be scaled.
    """
    with explained(model, partial(_unreadable, model)):
        if model.weights == "random":
            _refuse_deep(model.config, model)
            config = config_of(model.config)
        else:
            config = language_part(stored_config(model))
            if hasattr(config, "quantization_config"):
                del config.quantization_config
    if model.rope_scaling != "model":
        _scale_rope(config, model)
    return config


def config_of(shape: Mapping[str, Any]) -> PretrainedConfig:
    """Build the configuration that ``[model.config]`` describes, without the keys that the model's
    own class computes.

    Raises:
        KeyError: There is no ``model_type``.
        ValueError: transformers does not know it.
    """
    from transformers import AutoConfig

    kind = shape["model_type"]
    owner = type(AutoConfig.for_model(kind))
    names = owner.attribute_map
    given = {
        key: value
        for key, value in shape.items()
        if key != "model_type" and not _is_computed(owner, names.get(key, key))
    }
    config: PretrainedConfig = AutoConfig.for_model(kind, **given)
    if "pad_token_id" not in given and (config.pad_token_id or 0) >= (
        getattr(config, "vocab_size", None) or math.inf
    ):
        # The kind's own default, which a smaller vocabulary lacks; TOML cannot say null.
        config.pad_token_id = None
    return config


def _is_computed(owner: type, name: str) -> bool:
    found = getattr(owner, name, None)
    return isinstance(found, property) and found.fset is None


MOST_LAYERS = 1_000
"""Known models have up to 130."""
_LAYERS = re.compile(r"^(?:n|num)_?(?:\w+_)?(?:layers?|blocks?)$")


def _refuse_deep(values: Mapping[str, Any], model: ModelSpec) -> None:
    """Refuse a configuration with more layers than can be built in a reasonable time.

    Raises:
        InputError: It has (``model-too-deep``).
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            _refuse_deep(value, model)
        elif _LAYERS.match(str(key)) and isinstance(value, int | float) and value > MOST_LAYERS:
            raise model_problem(
                "model-too-deep",
                model,
                f"its config.json has {key} = {value:,.0f}, and the limit is {MOST_LAYERS:,}",
                "Correct it, or choose another model.",
            )


def stored_config(model: ModelSpec) -> PretrainedConfig:
    """Read the config.json of a hub id or a folder. Raises whatever transformers does, as
    ``load_arguments``, and InputError for far too many layers (``model-too-deep``).
    """
    from transformers import AutoConfig

    folder = Path(resolve_source(model.id))
    refuse_pointers((folder / "config.json",), "model.id", model.id)
    result: PretrainedConfig = AutoConfig.from_pretrained(**load_arguments(model))
    _refuse_deep(result.to_dict(), model)
    return without_hub_kernels(result)


def _unreadable(model: ModelSpec, error: Exception) -> InputError:
    if isinstance(error, KeyError):
        return reject(
            "model-config-incomplete",
            "model.config",
            "",
            f"lacks {error}",
            "Give the model's `config.json` as `[model.config]`, with `model_type`.",
        )
    if model.weights == "random":
        return reject(
            "model-config-unreadable",
            "model.config",
            str(model.config.get("model_type", "")),
            f"cannot be read ({first_line(error)})",
            "Correct it: it is to be a `config.json` of this kind of model.",
        )
    return unreadable("model.id", model.id, error)


def unreadable(field: str, source: str, error: Exception) -> InputError:
    """Return the problem of a source whose configuration cannot be read; ``field`` names it."""
    return reject(
        "model-config-unreadable",
        field,
        source,
        f"cannot be read ({first_line(error)})",
        "Check the name and the network, log in with `hf auth login` if it is gated, or download "
        "it first with `so-tui fetch`.",
    )


def language_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a multimodal model's language part, if transformers has a model
    for that alone; else the same one.
    """
    from transformers import AutoModelForCausalLM

    if config.is_encoder_decoder:  # some have more than one part for text
        return config
    text = config.get_text_config()
    if text is config or type(text) not in AutoModelForCausalLM._model_mapping:
        return config
    # Mistral 3 says of the whole, by default, that its head is its embedding; a head that is stored
    # must not be lost. Where that is not the default, as in Qwen3.5, the folder says so, and it may
    # say it of the whole only.
    # transformers before 5.10 has the default in the signature and not in the class.
    signed = signature(type(config)).parameters.get("tie_word_embeddings")
    said = not getattr(type(config), "tie_word_embeddings", signed.default if signed else True)
    text.tie_word_embeddings = bool(
        config.tie_word_embeddings and (said or text.tie_word_embeddings)
    )
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def disable_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Set every dropout of a configuration to 0: the kernels for packed documents have none.

    Returns:
        Those that were above 0, by name (Seed-OSS has 0.1).
    """
    found = dropouts(config.to_dict())
    for name in found:
        setattr(config, name, 0.0)
    return found
