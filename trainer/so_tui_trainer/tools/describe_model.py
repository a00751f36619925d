"""Describe a model from its config.json, built on meta tensors: no weights, no memory.

``{"model": hub id or folder, "revision": "main", "tokenizer": "", "weights": "", "trust_remote_code": false}`` in; out, with ``model`` the
section with shape and table, {"model": tree, "parameters": n, "longest_sequence": tokens or 0, "notes": [text], "done": true}

Problems name the cause: no such model, gated, no network, not a causal language model, code of its own, an unsupported head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from so_tui.spec import InputError, ModelSpec, Problem, resolve_source
from so_tui.spec.files import exists, is_folder
from so_tui.spec.layers import packing_problem
from so_tui_trainer.hub import remote_files, stay_offline_when_cut_off
from so_tui_trainer.model.layer_types import kinds_of
from so_tui_trainer.tools.channel import Answer, serve
from so_tui_trainer.tools.model_refusals import (
    refuse,
    refuse_head,
    refuse_other_kinds,
    refuse_shape,
    refuse_unplannable,
    refuse_unreadable,
)
from so_tui_trainer.tools.model_section import (
    QUANTISED,
    blocks_of,
    expert_blocks,
    ordered_tensors,
    shape_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DEQUANTISED = ("mxfp4", "gpt_oss")
"""The quantisation that the trainer converts when it loads weights, and the kind of model for which it does."""
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)
"""Every tokenizer has at least one of these files."""


def describe(request: Answer) -> Iterator[Answer]:
    """Describe the model of a request.

    Yields:
        The description.

    Raises:
        InputError: The model cannot be loaded, planned or trained.
    """
    stay_offline_when_cut_off()
    asked = ModelSpec(
        id=_resolve_model(request["model"]),
        revision=request.get("revision") or "main",
        tokenizer=request.get("tokenizer") or "",
        weights="random" if request.get("weights") == "random" else "pretrained",
        trust_remote_code=bool(request.get("trust_remote_code")),
    )
    _check_hub(asked)
    # Imported late: torch and transformers take seconds.
    from so_tui_trainer.model.config import language_part
    from so_tui_trainer.model.matching import meta_model

    whole = _read_config(asked)
    config = language_part(whole)
    refuse_other_kinds(asked, config)
    notes = _notes(asked, config)
    if config is not whole:
        notes.append(
            f"it is multimodal ({whole.model_type}): its language part is trained and exported, as a {config.model_type}"
        )
    for key in QUANTISED:
        if getattr(config, key, None) is not None:
            delattr(config, key)
    try:
        causal = meta_model(config, trust_remote_code=asked.trust_remote_code)
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        ImportError,
        RuntimeError,
    ) as error:
        refuse_shape(asked, error)
    refuse_head(asked, causal)
    found = msgspec.structs.replace(
        asked,
        config=shape_of(config, causal),
        parameters=blocks_of(ordered_tensors(causal)),
        leaf_modules=expert_blocks(causal),
    )
    refuse_unplannable(found)
    yield {
        "model": msgspec.to_builtins(found),
        "parameters": found.parameter_count,
        "longest_sequence": found.config.get("max_position_embeddings", 0),
        "notes": notes,
        "done": True,
    }


def _resolve_model(model: str) -> str:
    """Return the absolute path of a folder, since runs start elsewhere, or a hub id unchanged.

    Raises:
        InputError: A path that is not a model's folder.
    """
    text = resolve_source(model.strip())
    path = Path(text).expanduser()
    if is_folder(path):
        if not exists(path / "config.json"):
            code, message, remedy = (
                "model-config-missing",
                "has no config.json",
                "Name the folder that `save_pretrained` wrote.",
            )
            if exists(path / "adapter_config.json"):
                code, message, remedy = (
                    "model-is-adapter",
                    "is an adapter (LoRA), not a whole model",
                    "Name the model it was made for.",
                )
            raise InputError(
                [Problem(code=code, field="model.id", value=text, message=message, remedy=remedy)]
            )
        return model.strip() if text != model.strip() else str(path.absolute())
    if exists(path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text:
        code, message = "model-folder-missing", "there is no such folder, or you may not open it"
        if exists(path) and text:
            code, message = "model-is-file", "is a file, not a folder"
        remedy = "Name a folder with a config.json, or a model on the hub (owner/name)."
        raise InputError(
            [Problem(code=code, field="model.id", value=text, message=message, remedy=remedy)]
        )
    return text


def _check_hub(model: ModelSpec) -> None:
    """Check that the model is on the hub or in the cache.

    Raises:
        InputError: No such model or revision, no network and nothing cached, or no config.json.
    """
    if not Path(resolve_source(model.id)).is_dir():
        files = remote_files(model)
        if files and "config.json" not in files:
            refuse(
                "model-config-missing",
                model,
                "has no config.json on the hub",
                "Choose a model in the format of transformers.",
            )


def _read_config(model: ModelSpec) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            resolve_source(model.id),
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        StrictDataclassError,
    ) as error:
        refuse_unreadable(model, error)
    return config


def _notes(model: ModelSpec, config: PretrainedConfig) -> list[str]:
    """Return notes about the model.

    Raises:
        InputError: Its weights cannot be trained.
    """
    from so_tui_trainer.model.stored import shards

    notes = []
    if problem := packing_problem(kinds_of(config)):
        notes.append(f"{problem.message}: each is a sequence of its own (data.packing = false)")
    if method := _quantisation(config):
        if (method, config.model_type) != _DEQUANTISED:
            remedy = "Choose this model's checkpoint with bf16 weights."
            message = (
                f"its weights are quantised ({method}), and quantised weights cannot be trained"
            )
            refuse("weights-quantised", model, message, remedy)
        notes.append(
            f"its weights are stored as {method} and are converted to bf16 when they are loaded"
        )
    folder = Path(resolve_source(model.id))
    if folder.is_dir() and model.weights == "pretrained" and not shards(folder):
        notes.append(
            f"{folder} has no weights: it can be planned, but trained only with model.weights=random"
        )
    if (
        folder.is_dir()
        and not model.tokenizer
        and not any(any(folder.glob(name)) for name in _TOKENIZERS)
    ):
        notes.append(
            f"{folder} has no tokenizer: set one to train it (model.tokenizer=FOLDER or a hub id)"
        )
    return notes


def _quantisation(config: PretrainedConfig) -> str:
    """Return how the weights are quantised; empty if they are not."""
    found = next((value for key in QUANTISED if (value := getattr(config, key, None))), None)
    if found is None:
        return ""
    known = found if isinstance(found, dict) else vars(found)
    bits = any(known.get(key) for key in ("load_in_4bit", "load_in_8bit"))
    return str(
        known.get("quant_method") or ("bitsandbytes" if bits else "in a way that it does not name")
    )


if __name__ == "__main__":
    sys.exit(serve(describe))
