"""Describe a model from its config.json, built on meta tensors: no weights, no memory.

``{"model": hub id or folder, "revision": "main", "tokenizer": "", "weights": "",
"trust_remote_code": false}`` in; out, with ``model`` the section with shape and table, {"model":
tree, "parameters": n, "longest_sequence": tokens or 0, "notes": [text], "done": true}

Problems name the cause: no such model, gated, no network, not a causal language model, code of its
own, an unsupported head.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from so_tui.spec import (
    InputError,
    ModelSpec,
    ParameterBlock,
    Tensor,
    decays,
    first_line,
    resolve_source,
)
from so_tui.spec.check import exists, is_folder
from so_tui.spec.errors import reject
from so_tui.spec.model_table import dropouts, mixing_kinds, packing_problem, recurrent_kinds
from so_tui.spec.run_spec import TensorKind, is_matrix
from so_tui_trainer.hub import causes, model_problem, remote_files, stay_offline_when_cut_off
from so_tui_trainer.model import kinds_of, same_in_all_layers
from so_tui_trainer.pointers import is_pointer
from so_tui_trainer.remote_code import build_arguments, explained
from so_tui_trainer.step_limits import limited
from so_tui_trainer.tools.channel import Answer, serve

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# Why a model cannot be described: refusals that name the cause and a remedy.


def _unreadable(model: ModelSpec, error: Exception) -> InputError:
    """Explain why transformers cannot load a config. Its errors share types, so their texts are
    matched here.
    """
    text = str(error)
    if any(type(cause).__name__ == "GatedRepoError" for cause in causes(error)):
        return model_problem(
            "hub-access-denied",
            model,
            "is gated, and this user has no access",
            "Accept its terms on its page on the hub, then log in with `hf auth login` (or set "
            "HF_TOKEN).",
        )
    if "Unrecognized model" in text:
        return model_problem(
            "model-type-missing",
            model,
            "does not say what kind of model it is (its config.json has no `model_type`)",
            "Name a folder whose config.json has `model_type`, in the format of transformers.",
        )
    if "does not recognize this architecture" in text:
        from transformers import __version__

        return model_problem(
            "model-type-unknown",
            model,
            f"is of a kind that transformers {__version__} does not know",
            "Install a newer transformers, or choose another model.",
        )
    return model_problem(
        "model-config-unreadable",
        model,
        f"its config.json cannot be read ({_reason(error)})",
        "Correct it, or download it again.",
    )


def _refuse_other_kinds(model: ModelSpec, config: PretrainedConfig) -> None:
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
        raise model_problem(
            "model-not-causal", model, "is an encoder-decoder, not a causal language model", remedy
        )
    text = config.get_text_config()
    if text is not config:
        raise model_problem(
            "model-multimodal",
            model,
            "is a multimodal model, and transformers has no model for its language part alone "
            f"({text.model_type})",
            remedy,
        )
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    ):
        raise model_problem(
            "model-not-causal",
            model,
            f"is an encoder ({classes[0] if classes else config.model_type}), not a causal "
            "language model",
            remedy,
        )
    known = {
        name
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ((names,) if isinstance(names, str) else names)
    }
    own_code = build_arguments(config)["trust_remote_code"] and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    if own_code:
        return
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise model_problem(
            "model-not-causal",
            model,
            f"is a {config.model_type}, which transformers has no causal language model for",
            remedy,
        )
    if classes and not known & set(classes):
        raise model_problem(
            "model-not-causal", model, f"is a {classes[0]}, not a causal language model", remedy
        )


def _reason(error: BaseException) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)


# The section ``[model]`` of a preset: shape and parameter table, read from a model that is built
# on meta tensors.


QUANTISED = ("quantization_config", "compression_config")
"""Keys of a config that say how the weights are quantised."""
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
"""Keys that the planner reads. They are written out even if the model's own config uses a default
or another name.
"""
_NOT_SHAPE = {
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "auto_map",
    *QUANTISED,
}
"""Keys that do not belong into a preset."""
_WIDTHS = ("ffn_dim", "ffn_hidden_size", "n_inner")
"""Names of ``intermediate_size`` in older models."""
_LAYER = re.compile(r"\b((?:layers|blocks|h)\.)(\d+)(?=\.)")
"""The number of a layer in a parameter's name, by the names that models give their list of
layers.
"""


def shape_of(config: PretrainedConfig, causal: PreTrainedModel) -> dict[str, Any]:
    """Return ``[model.config]``: what differs from the defaults of this kind of model, and all that
    the planner reads. Without None, as in TOML.
    """
    shape: dict[str, Any] = _toml_values(
        {key: value for key, value in config.to_diff_dict().items() if key not in _NOT_SHAPE}
    )
    return shape | planned_shape(config, causal)


def planned_shape(config: PretrainedConfig, causal: PreTrainedModel) -> dict[str, Any]:
    """Return what the planner reads of a model, by the names that it uses."""
    own = config
    if getattr(config, "is_heterogeneous", False):
        # What single layers have of their own (Gemma 4) makes reading the others' values an error.
        own = deepcopy(config)
        own.per_layer_config = None
    named = {key: same_in_all_layers(getattr(own, key, None)) for key in _SHAPE}
    named["intermediate_size"] = named["intermediate_size"] or _width(config, causal)
    named["num_key_value_heads"] = named["num_key_value_heads"] or getattr(
        config, "num_kv_heads", None
    )
    shape: dict[str, Any] = {
        key: value for key, value in named.items() if isinstance(value, int | float)
    }
    shape |= dropouts(config.to_dict())
    kinds = list(kinds_of(config))
    return (
        shape | {"layer_types": kinds} if mixing_kinds(kinds) or recurrent_kinds(kinds) else shape
    )


def _width(config: PretrainedConfig, causal: PreTrainedModel) -> int | None:
    """Return the feed-forward width if it is not called ``intermediate_size``: by its older names,
    or the widest input of a projection.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    for key in _WIDTHS:
        if isinstance(value := getattr(config, key, None), int):
            return value
    head = causal.get_output_embeddings()  # type: ignore[no-untyped-call]
    inputs = [
        module.in_features
        for module in causal.modules()
        if isinstance(module, Linear) and module is not head
    ]
    inputs += [module.weight.shape[0] for module in causal.modules() if isinstance(module, Conv1D)]
    return max(inputs, default=None)


def _toml_values(value: Any) -> Any:
    """Remove None, tables with keys that are not text, and lists with an infinity
    (``time_step_limit``), which JSON cannot hold.
    """
    if isinstance(value, dict):
        return {
            key: _toml_values(item)
            for key, item in value.items()
            if isinstance(key, str) and item is not None and not _unwritable(item)
        }
    if isinstance(value, list | tuple):
        return [_toml_values(item) for item in value if item is not None]
    return value


def _unwritable(value: Any) -> bool:
    if isinstance(value, dict):
        return any(not isinstance(key, str) for key in value)
    return isinstance(value, list | tuple) and any(item in (math.inf, -math.inf) for item in value)


def _ordered_tensors(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield all parameters in the order of ``named_parameters``; tied ones name the parameter they
    share.
    """
    from torch.nn import Embedding

    embeddings = {name for name, module in model.named_modules() if isinstance(module, Embedding)}
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield Tensor(
            name=name,
            shape=tuple(parameter.shape),
            decay=decays(name, parameter.dim()),
            kind=_kind(name, parameter.dim(), embeddings),
            tied=first_name.get(id(parameter), ""),
        )
        first_name.setdefault(id(parameter), name)


def blocks_of(model: PreTrainedModel) -> tuple[ParameterBlock, ...]:
    """Return the parameters of a model as blocks, with repeated layers written once."""
    blocks: list[ParameterBlock] = []
    for index, group in groupby(_ordered_tensors(model), key=lambda tensor: _layer(tensor.name)):
        if index is None:
            blocks.append(ParameterBlock(tensors=tuple(group)))
            continue
        pattern = tuple(
            Tensor(_LAYER.sub(r"\1{i}", t.name, count=1), t.shape, t.decay, t.kind, t.tied)
            for t in group
        )
        last = blocks[-1] if blocks else None
        if last is not None and last.tensors == pattern and last.first + last.repeat == index:
            blocks[-1] = ParameterBlock(repeat=last.repeat + 1, first=last.first, tensors=pattern)
        else:
            blocks.append(ParameterBlock(first=index, tensors=pattern))
    return tuple(blocks)


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found.group(2)) if found else None


def _kind(name: str, dimensions: int, embeddings: set[str]) -> TensorKind:
    if name.rpartition(".")[0] in embeddings:
        return "embedding"
    if not is_matrix(name, dimensions):
        return "other"
    stacked = dimensions == 3 and "conv" not in name
    return "expert" if ".experts." in name or stacked else "linear"


_SHAPE_BYTES = 40_000_000
"""Counts like a file of this size for its time: building thousands of experts takes a while."""
_DEQUANTISED = ("mxfp4", "gpt_oss")
"""The quantisation that the trainer converts when it loads weights, and the kind of model for which
it does.
"""
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
    if not Path(resolve_source(asked.id)).is_dir():
        files = remote_files(asked)
        if files and "config.json" not in files:
            raise model_problem(
                "model-config-missing",
                asked,
                "has no config.json on the hub",
                "Choose a model in the format of transformers.",
            )
    # Imported late: torch and transformers take seconds.
    from so_tui.model.flops import flops_of
    from so_tui_trainer.model.build import refuse_unsupported
    from so_tui_trainer.model.config import language_part, stored_config
    from so_tui_trainer.model.weights import meta_model

    with explained(asked, partial(_unreadable, asked)), limited(f"the config.json of {asked.id}"):
        whole = stored_config(asked)
    config = language_part(whole)
    _refuse_other_kinds(asked, config)
    notes = _notes(asked, config)
    if config is not whole:
        notes.append(
            f"it is multimodal ({whole.model_type}): its language part is trained and exported, as "
            f"a {config.model_type}"
        )
    for key in QUANTISED:
        if getattr(config, key, None) is not None:
            delattr(config, key)
    with (
        explained(
            asked,
            lambda error: model_problem(
                "model-shape-invalid",
                asked,
                f"its shape cannot be built: {_reason(error)}",
                "Check its config.json. Some models need other packages, or a newer transformers.",
            ),
        ),
        limited(f"the shape of {asked.id}", _SHAPE_BYTES),
    ):
        causal = meta_model(config)
    if causal.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise model_problem(
            "model-head-missing",
            asked,
            "has no output projection that so-tui can find",
            "Choose a model with a plain output projection.",
        )
    refuse_unsupported(causal, asked)
    # ZeRO-3 all-gathers a block of experts as a whole, whichever experts a token uses.
    blocks = {
        type(module).__name__
        for module in causal.modules()
        if any(name == "experts" for name, _ in module.named_children())
    }
    found = msgspec.structs.replace(
        asked,
        config=shape_of(config, causal),
        parameters=blocks_of(causal),
        leaf_modules=tuple(sorted(blocks)),
    )
    try:
        flops_of(found)
    except InputError as error:
        missing = ", ".join(problem.field.rpartition(".")[2] for problem in error.problems)
        raise model_problem(
            "model-not-plannable",
            found,
            f"a {found.config.get('model_type')} has no {missing}: this kind of model cannot be "
            "planned",
            "Choose a decoder with attention in every layer.",
        ) from error
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
            if exists(path / "adapter_config.json"):
                raise reject(
                    "model-is-adapter",
                    "model.id",
                    text,
                    "is an adapter (LoRA), not a whole model",
                    "Name the model it was made for.",
                )
            raise reject(
                "model-config-missing",
                "model.id",
                text,
                "has no config.json",
                "Name the folder that `save_pretrained` wrote.",
            )
        return model.strip() if text != model.strip() else str(path.absolute())
    if exists(path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text:
        code, message = "model-folder-missing", "there is no such folder, or you may not open it"
        if exists(path) and text:
            code, message = "model-is-file", "is a file, not a folder"
        raise reject(
            code,
            "model.id",
            text,
            message,
            "Name a folder with a config.json, or a model on the hub (owner/name).",
        )
    return text


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
            raise model_problem(
                "weights-quantised",
                model,
                f"its weights are quantised ({method}), and quantised weights cannot be trained",
                "Choose this model's checkpoint with bf16 weights.",
            )
        notes.append(
            f"its weights are stored as {method} and are converted to bf16 when they are loaded"
        )
    folder = Path(resolve_source(model.id))
    tokenizers = () if model.tokenizer else chain.from_iterable(map(folder.glob, _TOKENIZERS))
    weights = shards(folder) if model.weights == "pretrained" else ()
    notes += [
        f"{path} is a pointer of Git LFS: run `git lfs pull` there before you train it"
        for path in (*map(folder.joinpath, weights), *tokenizers)
        if is_pointer(path)
    ][:1]
    if folder.is_dir() and model.weights == "pretrained" and not weights:
        notes.append(
            f"{folder} has no weights in safetensors: it can be planned, but trained only with "
            "model.weights=random"
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
