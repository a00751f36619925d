"""Build the model from a hub id, a folder, or a shape with random weights; ZeRO-3 shards it as it
is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from so_tui.model.profile import (
    MLP_TILE_TOKENS,
)
from so_tui.model.shape import architecture
from so_tui.spec import InputError, ModelSpec, RunSpec
from so_tui.spec.check import sharing_problem
from so_tui.spec.errors import reject
from so_tui.spec.model_table import layers_without_attention, packing_problem, recurrent_kinds
from so_tui_trainer.data.batches import needs_rows_apart
from so_tui_trainer.hub import model_problem
from so_tui_trainer.model import attention, checkpointing, fused, kinds_of, trained, weights
from so_tui_trainer.model.checkpointing import HostActivations, Room
from so_tui_trainer.model.config import disable_dropout, load_config
from so_tui_trainer.model.experts import RouterLoss
from so_tui_trainer.model.loss import changes_logits_otherwise
from so_tui_trainer.model.stored import read_index
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.model.weights import meta_model, weights_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# Models that would be trained wrongly, and are refused.


_UNSUPPORTED_TYPES = {"opt", "nemotron", "doge", "recurrent_gemma", "zamba", "zamba2", "zaya"}
"""Models that build their mask without position ids, do not pass the document boundaries on to
their attention, have a mask of their own that kernels would leave out (doge), or mix tokens where
documents cannot be made rows.
"""
_PLAIN_HEAD = "Choose a model with a plain output projection."


def refuse_unsupported(causal: PreTrainedModel, model: ModelSpec) -> None:
    """Refuse a model that would be trained wrongly.

    Raises:
        InputError: Its loss is not that of a plain output projection, its documents could not be
            kept apart, or their positions not be computed.
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
        message = (
            "documents that are packed into one sequence cannot be told apart by transformers' "
            f"code for {config.model_type}"
        )
    elif (kind := _unknown_rotary(causal)) is not None:
        code, remedy = "model-rotary-unknown", "Choose a model that transformers has code for."
        message = (
            f"its rotary frequencies depend on the length of a sequence ({kind}), and its own code "
            "computes them in a way that so-tui cannot apply to each document"
        )
    else:
        return
    raise model_problem(code, model, message, remedy)


def _unknown_rotary(causal: PreTrainedModel) -> str | None:
    """Return the type of rotary frequencies by the length of a sequence, if no rotary embedding of
    transformers' computes them.
    """
    if any(map(trained.rope_types, causal.modules())):
        return None
    config = causal.config
    asked = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = str(asked.get("rope_type") or asked.get("type") or "")
    return kind if trained.by_length(kind) or kind == "su" else None


def _passes_boundaries(causal: PreTrainedModel) -> bool:
    """Return whether transformers' code gives document boundaries to all attention of a model.

    Models with recurrent layers do so for its flash attention, although they do not say that they
    take any other.
    """
    model_class, config = type(causal), causal.config
    kinds = set(kinds_of(config))
    carrying = recurrent_kinds(kinds)
    without_attention = carrying and layers_without_attention(kinds) == len(kinds)
    attends = model_class._supports_attention_backend or (
        carrying and model_class._supports_flash_attn
    )
    return bool(attends or without_attention)


def _refuse_unlisted(causal: PreTrainedModel, model: ModelSpec) -> None:
    """Refuse a model with layers that carry a state from token to token, unless its spec says so:
    data is laid out by the spec.

    Raises:
        InputError: It has such layers, and ``model.config`` lists none.
    """
    layers = trained.documents_of(causal).layers
    if layers and not needs_rows_apart(model):
        raise reject(
            "recurrent-layers-unlisted",
            "model.config.layer_types",
            "",
            f"does not list the {layers} layers that carry a state from token to token",
            "Add the model anew with `so-tui presets add`, or list the kind of each layer, such as "
            "linear_attention.",
        )


def build(
    spec: RunSpec,
    device: torch.device,
    ds_config: dict[str, Any],
    on_files: weights.OnFiles = lambda done, total: None,
) -> TrainedModel:
    """Build the model in bf16, sharded as ``ds_config`` says, ready to train.

    Args:
        spec: The run's spec.
        device: The rank's device.
        ds_config: DeepSpeed's configuration.
        on_files: Called with how many files of weights have been read, and how many there are.

    Raises:
        InputError: The model cannot be loaded, the weights are not the model's, this kind of model
            is not supported, or its documents cannot be packed.
    """
    config = load_config(spec.model)
    kinds = kinds_of(config)
    if spec.data.packing and (problem := packing_problem(kinds)):
        raise InputError([problem])
    if problem := sharing_problem(kinds, spec.train.sequence_parallel):
        raise InputError([problem])
    dropped = disable_dropout(config)
    causal, implementation = _causal(spec, config, device, ds_config, on_files)
    refuse_unsupported(causal, spec.model)
    _refuse_unlisted(causal, spec.model)
    causal.config.use_cache = False
    if spec.model.kernels == "auto":
        fused.install_kernels(causal)
    checkpointing.install(
        causal, spec.model.policy, _host_activations(causal, spec, implementation, device)
    )
    if spec.model.tiles_mlp and not fused.install_tiles(causal, MLP_TILE_TOKENS):
        raise reject(
            "nothing-to-tile",
            "model.tiled_mlp",
            "on",
            "no layer has a feed-forward block of its own whose tokens are computed one by one",
            "Set it to off.",
        )
    _set_leaf_modules(causal, spec)
    causal.train()
    coefficient = spec.train.router_loss_coefficient
    router = RouterLoss(causal, coefficient) if coefficient else None
    return TrainedModel(causal, implementation, router, dropped)


def _host_activations(
    causal: PreTrainedModel, spec: RunSpec, implementation: str, device: torch.device
) -> HostActivations | None:
    if not spec.model.offloads_inputs and not spec.model.offloads_results:
        return None
    layers = len(checkpointing.checkpointed_layers(causal))
    tokens, text = spec.micro_batch_tokens, causal.config.get_text_config()
    inputs, results = None, list[Room]()
    if spec.model.offloads_inputs:
        inputs = Room(layers, tokens * text.hidden_size * causal.dtype.itemsize)
    # Other implementations compute attention again.
    if spec.model.offloads_results and attention.takes_boundaries(implementation):
        shape = architecture(spec.model.config)
        results = [Room(layers - shape.other_layers, tokens * size) for size in shape.result_bytes]
    return HostActivations(inputs, results, device)


def _causal(
    run: RunSpec,
    config: PretrainedConfig,
    device: torch.device,
    ds_config: dict[str, Any],
    on_files: weights.OnFiles,
) -> tuple[PreTrainedModel, str]:
    """Build the sharded model with its weights, and choose its attention implementation."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import initialize_weights_zero3

    spec = run.model
    if AutoModelForCausalLM._model_mapping.get(type(config), None) is None:
        raise model_problem(
            "model-not-causal",
            spec,
            f"is a {config.model_type}, which transformers has no causal language model for",
            "Choose a causal language model.",
        )
    meta = meta_model(config)
    needs = attention.needs_of(meta)
    implementation = attention.choose(spec, needs, device, run.train.sequence_parallel)
    index, found = {}, None
    if spec.weights == "pretrained":
        index = read_index(weights_folder(spec))
        found = weights.match_weights(meta, index)
        weights.refuse_mismatch(found, spec)
        weights.refuse_untied(meta, found, index, spec)
    causal = weights.empty_model(config, meta, implementation, ds_config)
    if found is not None:
        weights.load(causal, meta, found, index, on_files)
    else:
        # Each module's parameters are all-gathered on their device meanwhile.
        initialize_weights_zero3(causal)  # type: ignore[no-untyped-call]
    return causal, implementation


def _set_leaf_modules(causal: PreTrainedModel, spec: RunSpec) -> None:
    """Make ZeRO-3 all-gather certain modules as a whole: those named in the spec (experts), and
    every layer.

    Which experts a token uses is not known beforehand. For layers it saves time: hooks on every
    inner module take longer than a layer's forward pass, even on a single rank, and their
    prefetching reaches so far ahead that it waits for weights that are still being stepped.

    Raises:
        InputError: The model has no module of a class that the spec names.
    """
    from deepspeed.utils import set_z3_leaf_modules
    from transformers.modeling_layers import GradientCheckpointingLayer

    classes = {type(module).__name__: type(module) for module in causal.modules()}
    named = spec.model.leaf_modules
    if absent := [name for name in named if name not in classes]:
        raise reject(
            "leaf-module-unknown",
            "model.leaf_modules",
            ", ".join(named),
            f"the model has no {', '.join(absent)}",
            f"It has {', '.join(sorted(classes))}.",
        )
    layers = [found for found in classes.values() if issubclass(found, GradientCheckpointingLayer)]
    if whole := list(dict.fromkeys([*(classes[name] for name in named), *layers])):
        set_z3_leaf_modules(causal, whole)
