"""Why a model cannot be described: refusals that name the cause and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

from so_tui.spec import InputError, ModelSpec, Problem, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def refuse_unreadable(model: ModelSpec, error: Exception) -> NoReturn:
    """Explain why transformers cannot load a config. Its errors share types, so their texts are matched here, and nowhere else.

    Raises:
        InputError: Always.
    """
    text = str(error)
    if "trust_remote_code" in text and not model.trust_remote_code:
        remedy = "Read that code first. If you trust it, add --trust-remote-code."
        refuse(
            "model-needs-remote-code",
            model,
            "comes with its own Python code, which is not run by default",
            remedy,
            error,
        )
    if _caused_by(error, "GatedRepoError"):
        remedy = "Accept its terms on its page on the hub, then log in with `hf auth login` (or set HF_TOKEN)."
        refuse("hub-access-denied", model, "is gated, and this user has no access", remedy, error)
    if "Unrecognized model" in text:
        remedy = "Name a folder whose config.json has `model_type`, in the format of transformers."
        message = "does not say what kind of model it is (its config.json has no `model_type`)"
        refuse("model-type-missing", model, message, remedy, error)
    if "does not recognize this architecture" in text:
        from transformers import __version__

        message = f"is of a kind that transformers {__version__} does not know"
        refuse(
            "model-type-unknown",
            model,
            message,
            "Install a newer transformers, or choose another model.",
            error,
        )
    message = f"its config.json cannot be read ({_reason(error)})"
    refuse("model-config-unreadable", model, message, "Correct it, or download it again.", error)


def refuse_shape(model: ModelSpec, error: Exception) -> NoReturn:
    """Explain why a model cannot be built on meta tensors.

    Raises:
        InputError: Always.
    """
    message = f"its shape cannot be built: {_reason(error)}"
    refuse(
        "model-shape-invalid",
        model,
        message,
        "Check its config.json. Some models need other packages, or a newer transformers.",
    )


def refuse_other_kinds(model: ModelSpec, config: PretrainedConfig) -> None:
    """Refuse a model that is not a decoder over text.

    Raises:
        InputError: It is another kind of model.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    remedy = "Choose a model for text generation (a causal language model)."
    classes = tuple(config.architectures or ())
    if getattr(config, "is_encoder_decoder", False):
        refuse(
            "model-not-causal", model, "is an encoder-decoder, not a causal language model", remedy
        )
    text = config.get_text_config()
    if text is not config:
        message = f"is a multimodal model, and transformers has no model for its language part alone ({text.model_type})"
        refuse("model-multimodal", model, message, remedy)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    ):
        message = f"is an encoder ({classes[0] if classes else config.model_type}), not a causal language model"
        refuse("model-not-causal", model, message, remedy)
    known = set(_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    own_code = model.trust_remote_code and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    if own_code:
        return
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        message = f"is a {config.model_type}, which transformers has no causal language model for"
        refuse("model-not-causal", model, message, remedy)
    if classes and not known & set(classes):
        refuse("model-not-causal", model, f"is a {classes[0]}, not a causal language model", remedy)


def refuse_head(model: ModelSpec, causal: PreTrainedModel) -> None:
    from so_tui_trainer.model.supported import refuse_unsupported

    if causal.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        message = "has no output projection that so-tui can find"
        refuse(
            "model-head-missing", model, message, "Choose a model with a plain output projection."
        )
    refuse_unsupported(causal, model)


def refuse_unplannable(model: ModelSpec) -> None:
    """Refuse a model whose shape the planner cannot read.

    Raises:
        InputError: Names the keys that are missing.
    """
    from so_tui.model.flops import flops_of

    try:
        flops_of(model)
    except InputError as error:
        missing = ", ".join(problem.field.rpartition(".")[2] for problem in error.problems)
        message = f"a {model.config.get('model_type')} has no {missing}: this kind of model cannot be planned"
        refuse(
            "model-not-plannable",
            model,
            message,
            "Choose a decoder with attention in every layer.",
            error,
        )


def refuse(
    code: str, model: ModelSpec, message: str, remedy: str, error: Exception | None = None
) -> NoReturn:
    raise InputError(
        [Problem(code=code, field="model.id", value=model.id, message=message, remedy=remedy)]
    ) from error


def _caused_by(error: BaseException | None, name: str) -> bool:
    while error is not None:
        if type(error).__name__ == name:
            return True
        error = error.__cause__ or error.__context__
    return False


def _names(mapping: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
    for names in mapping.values():
        yield from (names,) if isinstance(names, str) else names


def _reason(error: BaseException) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
