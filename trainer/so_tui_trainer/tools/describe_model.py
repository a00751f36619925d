"""What a model is, from its config.json alone, built on meta tensors: no weights, no memory.

``{"model": hub id or folder, "revision": "main", "tokenizer": "", "weights": "", "trust_remote_code": false}`` in; out, with ``model`` the
section with shape and table, {"model": tree, "parameters": n, "longest_sequence": tokens or 0, "notes": [text], "done": true}

Problems name what is wrong: no such model, gated, no network, not a causal language model, code of its own, an unsupported head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from so_tui.spec import InputError, ModelSpec, Problem, first_line, resolve_source
from so_tui_trainer.tools.channel import Answer, serve
from so_tui_trainer.tools.hub import remote_files, stay_offline_when_cut_off

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_QUANTISED = ("quantization_config", "compression_config")
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
"""What the planner reads, written out also where the model's own config leaves it to a default or calls it by another name."""
_NOT_SHAPE = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "auto_map", *_QUANTISED}
_WIDTHS = ("ffn_dim", "ffn_hidden_size", "n_inner")
"""What older models call ``intermediate_size``."""
_DEQUANTISED = ("mxfp4", "gpt_oss")
"""The one quantisation that the trainer undoes when it loads, and the one kind of model that it does so for."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")


def describe(request: Answer) -> Iterator[Answer]:
    """Raises InputError."""
    stay_offline_when_cut_off()
    asked = ModelSpec(
        id=_resolve_model(request["model"]),
        revision=request.get("revision") or "main",
        tokenizer=request.get("tokenizer") or "",
        weights="random" if request.get("weights") == "random" else "pretrained",
        trust_remote_code=bool(request.get("trust_remote_code")),
    )
    _check_hub(asked)
    # torch and transformers take seconds to import.
    from so_tui_trainer.model.matching import meta_model
    from so_tui_trainer.tools.presets import blocks_of, ordered_tensors

    config = _read_config(asked)
    _refuse_other_kinds(asked, config)
    notes = _notes(asked, config)
    for key in _QUANTISED:
        if getattr(config, key, None) is not None:
            delattr(config, key)
    try:
        causal = meta_model(config, trust_remote_code=asked.trust_remote_code)
    except (ValueError, TypeError, AttributeError, AssertionError, ImportError, RuntimeError) as error:
        reason = f"its shape cannot be built: {_reason(error)}"
        _refuse(asked, reason, "Check its config.json; some models need packages of their own, or a newer transformers.")
    _refuse_head(asked, causal)
    found = msgspec.structs.replace(
        asked, config=shape_of(config, causal), parameters=blocks_of(ordered_tensors(causal)), leaf_modules=expert_blocks(causal)
    )
    _refuse_unplannable(found)
    yield {
        "model": msgspec.to_builtins(found),
        "parameters": found.parameter_count,
        "longest_sequence": found.config.get("max_position_embeddings", 0),
        "notes": notes,
        "done": True,
    }


def shape_of(config: PretrainedConfig, causal: PreTrainedModel) -> dict[str, Any]:
    """``[model.config]``: what differs from the defaults of this kind of model, and all that the planner reads. Without None, as TOML."""
    shape: dict[str, Any] = _toml_values({key: value for key, value in config.to_diff_dict().items() if key not in _NOT_SHAPE})
    return shape | planned_shape(config, causal)


def planned_shape(config: PretrainedConfig, causal: PreTrainedModel) -> dict[str, Any]:
    """What the planner reads of a model, by the names that it reads."""
    named = {key: getattr(config, key, None) for key in _SHAPE}
    named["intermediate_size"] = named["intermediate_size"] or _width(config, causal)
    named["num_key_value_heads"] = named["num_key_value_heads"] or getattr(config, "num_kv_heads", None)
    return {key: value for key, value in named.items() if isinstance(value, int | float)}


def expert_blocks(causal: PreTrainedModel) -> tuple[str, ...]:
    """Classes of the blocks that hold a model's experts: ZeRO-3 gathers such a block whole, whichever experts a token meets."""
    blocks = {type(module).__name__ for module in causal.modules() if any(name == "experts" for name, _ in module.named_children())}
    return tuple(sorted(blocks))


def _resolve_model(model: str) -> str:
    """A folder by its whole path, since runs start elsewhere; a name on the hub as it is. Raises InputError."""
    text = resolve_source(model.strip())
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            adapter = (path / "adapter_config.json").is_file()
            message = "is an adapter (LoRA), not a whole model" if adapter else "has no config.json"
            remedy = "Name the model it was made for." if adapter else "Name the folder that `save_pretrained` wrote."
            raise InputError([Problem(field="model.id", value=text, message=message, remedy=remedy)])
        return model.strip() if text != model.strip() else str(path.absolute())
    if path.exists() or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text:
        message = "is a file, not a folder" if path.exists() and text else "there is no such folder"
        remedy = "Name a folder with a config.json, or a model on the hub (owner/name)."
        raise InputError([Problem(field="model.id", value=text, message=message, remedy=remedy)])
    return text


def _check_hub(model: ModelSpec) -> None:
    """Raises InputError: no such model or revision, no network and nothing cached, no config.json."""
    if not Path(resolve_source(model.id)).is_dir():
        files = remote_files(model)
        if files and "config.json" not in files:
            _refuse(model, "has no config.json on the hub", "Choose a model in the format of transformers.")


def _read_config(model: ModelSpec) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            resolve_source(model.id), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        _refuse_unreadable(model, error)
    return config


def _refuse_unreadable(model: ModelSpec, error: Exception) -> NoReturn:
    """Raises InputError with the reason behind what transformers said."""
    text = str(error)
    if "trust_remote_code" in text and not model.trust_remote_code:
        remedy = "Read that code first; if you trust it, say --trust-remote-code."
        _refuse(model, "comes with Python code of its own, which is not run unasked", remedy, error)
    if _caused_by(error, "GatedRepoError"):
        remedy = "Accept its terms on its page on the hub, then log in with `hf auth login` (or set HF_TOKEN)."
        _refuse(model, "is gated, and this user has no access", remedy, error)
    if "Unrecognized model" in text:
        remedy = "Name a folder whose config.json has `model_type`, in the format of transformers."
        _refuse(model, "does not say what kind of model it is (its config.json has no `model_type`)", remedy, error)
    if "does not recognize this architecture" in text:
        from transformers import __version__

        message = f"is of a kind that transformers {__version__} does not know"
        _refuse(model, message, "Install a newer transformers, or choose another model.", error)
    _refuse(model, f"its config.json cannot be read ({_reason(error)})", "Mend or fetch it again.", error)


def _caused_by(error: BaseException | None, name: str) -> bool:
    while error is not None:
        if type(error).__name__ == name:
            return True
        error = error.__cause__ or error.__context__
    return False


def _refuse_other_kinds(model: ModelSpec, config: PretrainedConfig) -> None:
    """Raises InputError for what is not a decoder over text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    remedy = "Choose a model for text generation (a causal language model)."
    classes = tuple(config.architectures or ())
    if getattr(config, "is_encoder_decoder", False):
        _refuse(model, "is an encoder-decoder, not a causal language model", remedy)
    if config.get_text_config() is not config:
        _refuse(model, "is a model of several modalities; so-tui trains text models", remedy)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        _refuse(model, f"is an encoder ({classes[0] if classes else config.model_type}), not a causal language model", remedy)
    known = set(_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    own_code = model.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if own_code:
        return
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        _refuse(model, f"is a {config.model_type}, which transformers knows no causal language model for", remedy)
    if classes and not known & set(classes):
        _refuse(model, f"is a {classes[0]}, not a causal language model", remedy)


def _names(mapping: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
    for names in mapping.values():
        yield from (names,) if isinstance(names, str) else names


def _refuse_head(model: ModelSpec, causal: PreTrainedModel) -> None:
    from so_tui_trainer.model.build import refuse_unsupported

    if causal.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        _refuse(model, "has no output projection that so-tui can find", "Choose a model with a plain output projection.")
    refuse_unsupported(causal, model)


def _refuse_unplannable(model: ModelSpec) -> None:
    """Raises InputError where the planner would find no shape to reckon with."""
    from so_tui.model.flops import flops_of

    try:
        flops_of(model)
    except InputError as error:
        missing = ", ".join(problem.field.rpartition(".")[2] for problem in error.problems)
        message = f"a {model.config.get('model_type')} has no {missing}: it is no transformer of the kind that can be planned"
        _refuse(model, message, "Choose a decoder with attention in every layer.", error)


def _notes(model: ModelSpec, config: PretrainedConfig) -> list[str]:
    """What is worth knowing. Raises InputError for weights that cannot be trained."""
    from so_tui_trainer.model.stored import shards

    notes = []
    if method := _quantisation(config):
        if (method, config.model_type) != _DEQUANTISED:
            remedy = "Choose the checkpoint with bf16 weights of this model."
            _refuse(model, f"its weights are quantised ({method}), and quantised weights cannot be trained", remedy)
        notes.append(f"its weights are stored as {method} and become bf16 when they are loaded")
    folder = Path(resolve_source(model.id))
    if folder.is_dir() and model.weights == "pretrained" and not shards(folder):
        notes.append(f"{folder} has no weights: it can be planned, and trained only with model.weights=random")
    if folder.is_dir() and not model.tokenizer and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        notes.append(f"{folder} has no tokenizer: name one when you train it (model.tokenizer=FOLDER or a hub id)")
    return notes


def _quantisation(config: PretrainedConfig) -> str:
    """How the weights are quantised; empty where they are not."""
    found = next((value for key in _QUANTISED if (value := getattr(config, key, None))), None)
    if found is None:
        return ""
    known = found if isinstance(found, dict) else vars(found)
    bits = any(known.get(key) for key in ("load_in_4bit", "load_in_8bit"))
    return str(known.get("quant_method") or ("bitsandbytes" if bits else "in a way that it does not name"))


def _width(config: PretrainedConfig, causal: PreTrainedModel) -> int | None:
    """The feed-forward width where it is not called ``intermediate_size``: by its older names, or the widest input of a projection."""
    import torch
    from transformers.pytorch_utils import Conv1D

    for key in _WIDTHS:
        if isinstance(value := getattr(config, key, None), int):
            return value
    head = causal.get_output_embeddings()  # type: ignore[no-untyped-call]
    inputs = [module.in_features for module in causal.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    inputs += [module.weight.shape[0] for module in causal.modules() if isinstance(module, Conv1D)]
    return max(inputs, default=None)


def _toml_values(value: Any) -> Any:
    """The same without None and without tables whose keys are no text."""
    if isinstance(value, dict):
        return {key: _toml_values(item) for key, item in value.items() if isinstance(key, str) and item is not None and not _numbered(item)}
    if isinstance(value, list | tuple):
        return [_toml_values(item) for item in value if item is not None]
    return value


def _numbered(value: Any) -> bool:
    return isinstance(value, dict) and any(not isinstance(key, str) for key in value)


def _reason(error: BaseException) -> str:
    """The first line of the error, or of what caused one that only says where."""
    first = first_line(error)
    return _reason(error.__cause__) if first.endswith(":") and error.__cause__ else first


def _refuse(model: ModelSpec, message: str, remedy: str, error: Exception | None = None) -> NoReturn:
    raise InputError([Problem(field="model.id", value=model.id, message=message, remedy=remedy)]) from error


if __name__ == "__main__":
    sys.exit(serve(describe))
