"""Build the model from a hub id, a folder, or a shape with random weights; ZeRO-3 shards it as it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.model.activations import MLP_TILE_TOKENS, offloads_inputs, policy_of, tiles_mlp
from so_tui.spec import InputError, ModelSpec, Problem, RunSpec, first_line, resolve_source
from so_tui.spec.layers import layers_without_attention, packing_problem, recurrent_kinds
from so_tui.spec.sections.parameters import decays
from so_tui.spec.sharing import sharing_problem
from so_tui_trainer.data.batches import Batch, needs_rows_apart
from so_tui_trainer.model import attention, kernels, loading, matching, recompute, recurrent, rope, tiles
from so_tui_trainer.model.host_inputs import HostInputs
from so_tui_trainer.model.layer_types import kinds_of
from so_tui_trainer.model.loss import HeadLoss
from so_tui_trainer.model.matching import decoder_of, meta_model
from so_tui_trainer.model.pretrained import weights_folder
from so_tui_trainer.model.router import RouterLoss
from so_tui_trainer.model.stored import read_index

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PREFIX = "causal."
"""Precedes a parameter's Hugging Face name in ``TrainedModel``."""
_UNSUPPORTED_TYPES = {"opt", "nemotron"}
"""Models that build their mask without position ids, or do not pass the document boundaries on to their attention."""
_PLAIN_HEAD = "Choose a model with a plain output projection."
_LOGIT_KEYS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier", "final_logit_softcapping")
"""Configuration keys of models that change their logits after the output projection."""


class TrainedModel(nn.Module):
    """A Hugging Face model with a loss in place of its output projection."""

    def __init__(self, causal: PreTrainedModel, implementation: str, router: RouterLoss | None = None) -> None:
        """Wrap a model.

        Args:
            causal: The model with its weights.
            implementation: Its attention implementation.
            router: The load-balancing loss, if there is one.
        """
        super().__init__()
        self.causal = causal
        self.attention = implementation
        head = _head(causal)
        self.loss = HeadLoss(head, *logit_changes(causal.config))
        self.dtype = head.dtype
        """Type of the weights, read once.

        Reading it from a parameter of another module in every forward pass would make ZeRO-3 treat that parameter as one of this module's,
        and all-gather it for the whole forward pass. The pass would then wait for the head's weights, which are stepped last, before it
        starts.
        """
        self.router = router
        self._documents = recurrent.documents_of(causal)
        self.last_router_loss: Tensor | None = None
        """The router loss of the last forward pass, scaled but without its coefficient; detached."""

    def forward(self, batch: Batch, scale: float, router_scale: float = 0.0, *, logits: bool = False) -> Tensor:
        """Compute the scaled loss of a micro-batch, or logits.

        Args:
            batch: The micro-batch.
            scale: Weight of each trained token's cross-entropy.
            router_scale: Weight of each real token's router loss, which is also multiplied by the coefficient.
            logits: Return the logits of the batch's predictors instead, [predictors, vocabulary].

        Returns:
            The sum of both losses; fp32 scalar.
        """
        if logits:
            return self._of_hidden(batch, None)
        if self.router is None or not router_scale:
            return self._language_loss(batch, scale)
        with self.router.watching() as router_logits:
            loss = self._language_loss(batch, scale)
        balance = router_scale * self.router(router_logits, batch.real)
        self.last_router_loss = balance.detach()
        return loss + self.router.coefficient * balance

    def _language_loss(self, batch: Batch, scale: float) -> Tensor:
        return self._of_hidden(batch, batch.targets, scale)

    def _of_hidden(self, batch: Batch, targets: Tensor | None, scale: float = 1.0) -> Tensor:
        self._documents.rows = batch.apart
        hidden = decoder_of(self.causal)(
            input_ids=batch.input_ids,
            use_cache=False,
            **attention.arguments(batch, self.attention, self.causal.config, self.dtype),
        ).last_hidden_state
        result: Tensor = self.loss(hidden, batch.predictors, targets, scale)
        return result


def load_config(model: ModelSpec) -> PretrainedConfig:
    """Load the model's configuration, without its quantisation, and with the spec's scaling of rotary positions.

    Raises:
        InputError: It cannot be loaded, or its positions cannot be scaled.
    """
    config = _given_config(model)
    if model.rope_scaling != "model":
        rope.scale(config, model)
    return config


def config_of(shape: Mapping[str, Any]) -> PretrainedConfig:
    """Build the configuration that ``[model.config]`` describes, without the keys that the model's own class computes.

    Raises:
        KeyError: There is no ``model_type``.
        ValueError: transformers does not know it.
    """
    from transformers import AutoConfig

    kind = shape["model_type"]
    owner = type(AutoConfig.for_model(kind))
    names = owner.attribute_map
    given = {key: value for key, value in shape.items() if key != "model_type" and not _is_computed(owner, names.get(key, key))}
    config: PretrainedConfig = AutoConfig.for_model(kind, **given)
    return config


def _is_computed(owner: type, name: str) -> bool:
    found = getattr(owner, name, None)
    return isinstance(found, property) and found.fset is None


def _given_config(model: ModelSpec) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        if model.weights == "random":
            return config_of(model.config)
        found: PretrainedConfig = AutoConfig.from_pretrained(
            resolve_source(model.id), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        found = language_part(found)
        if hasattr(found, "quantization_config"):
            del found.quantization_config
        return found
    except KeyError as error:
        remedy = "Give the model's `config.json` as `[model.config]`, with `model_type`."
        problem = Problem(code="model-config-incomplete", field="model.config", value="", message=f"lacks {error}", remedy=remedy)
        raise InputError([problem]) from error
    except Exception as error:  # a damaged config.json raises whatever it leads to
        message = f"cannot be read ({first_line(error)})"
        remedy = "Check the name and the network, log in with `hf auth login` if it is gated, or download it first with `so-tui fetch`."
        raise InputError([_problem("model-config-unreadable", model, message, remedy)]) from error


def language_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a multimodal model's language part, if transformers has a model for that alone; else the same one."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if text is config or config.is_encoder_decoder or type(text) not in AutoModelForCausalLM._model_mapping:
        return config
    # Mistral 3 says of the whole, by default, that its head is its embedding; a head that is stored must not be lost.
    text.tie_word_embeddings = bool(text.tie_word_embeddings and config.tie_word_embeddings)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def build(
    spec: RunSpec, device: torch.device, ds_config: dict[str, Any], on_files: loading.OnFiles = lambda done, total: None
) -> TrainedModel:
    """Build the model in bf16, sharded as ``ds_config`` says, ready to train.

    Args:
        spec: The run's spec.
        device: The rank's device.
        ds_config: DeepSpeed's configuration.
        on_files: Called with how many files of weights have been read, and how many there are.

    Raises:
        InputError: The model cannot be loaded, the weights are not the model's, this kind of model is not supported, or its documents
            cannot be packed.
    """
    config = load_config(spec.model)
    kinds = kinds_of(config)
    if spec.data.packing and (problem := packing_problem(kinds)):
        raise InputError([problem])
    if problem := sharing_problem(kinds, spec.train.sequence_parallel):
        raise InputError([problem])
    disable_dropout(config)
    causal, implementation = _causal(spec, config, device, ds_config, on_files)
    refuse_unsupported(causal, spec.model)
    refuse_unlisted(causal, spec.model)
    causal.config.use_cache = False
    if spec.model.kernels == "auto":
        kernels.install(causal)
    recompute.install(causal, policy_of(spec.model), _host_inputs(causal, spec, device))
    if tiles_mlp(spec.model) and not tiles.install(causal, MLP_TILE_TOKENS):
        message = "no layer has a feed-forward block of its own whose tokens are computed one by one"
        problem = Problem(code="nothing-to-tile", field="model.tiled_mlp", value="on", message=message, remedy="Set it to off.")
        raise InputError([problem])
    set_leaf_modules(causal, spec)
    causal.train()
    coefficient = spec.train.router_loss_coefficient
    return TrainedModel(causal, implementation, RouterLoss(causal, coefficient) if coefficient else None)


def _host_inputs(causal: PreTrainedModel, spec: RunSpec, device: torch.device) -> HostInputs | None:
    if not offloads_inputs(spec.model):
        return None
    width = causal.config.get_text_config().hidden_size * causal.dtype.itemsize
    return HostInputs(len(recompute.checkpointed_layers(causal)), spec.micro_batch_tokens * width, device)


def disable_dropout(config: PretrainedConfig) -> None:
    """Set every dropout of a configuration to 0: the varlen attention kernels have none (Seed-OSS names 0.1)."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def parameter_groups(model: nn.Module, spec: RunSpec) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: parameters with weight decay, then those without (norms, biases), each in the model's order.

    Under ZeRO-3 a parameter is empty, and its shape is in ``ds_shape``.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = []
    for decay in (True, False):
        members = [
            (name, parameter) for name, parameter in named if decays(name, len(getattr(parameter, "ds_shape", parameter.shape))) == decay
        ]
        if members:
            groups.append(
                {
                    "params": [parameter for _, parameter in members],
                    "names": [name for name, _ in members],
                    "weight_decay": spec.train.weight_decay if decay else 0.0,
                    "lr": spec.train.learning_rate,
                }
            )
    return groups


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters of the whole model, whatever shard of them is here."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def expected_first_loss(config: PretrainedConfig) -> float:
    """Return the expected loss of random weights, in nats per token.

    It is ln(vocabulary) plus half the variance of the logits. With a normalised hidden state that variance is ``hidden_size *
    initializer_range**2``, times the square of what the model multiplies its logits with.
    """
    spread = float(getattr(config, "initializer_range", None) or 0.02) * logit_changes(config)[0]
    vocabulary, hidden = int(config.vocab_size), int(config.hidden_size)
    return math.log(vocabulary) + hidden * spread**2 / 2


def _model_class(config: PretrainedConfig, model: ModelSpec) -> type[PreTrainedModel]:
    from transformers import AutoModelForCausalLM

    try:
        found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        message = f"is a {config.model_type}, which transformers has no causal language model for"
        raise InputError([_problem("model-not-causal", model, message, "Choose a causal language model.")]) from error
    model_class: type[PreTrainedModel] = found
    return model_class


def _causal(
    run: RunSpec, config: PretrainedConfig, device: torch.device, ds_config: dict[str, Any], on_files: loading.OnFiles
) -> tuple[PreTrainedModel, str]:
    """Build the sharded model with its weights, and choose its attention implementation."""
    spec = run.model
    model_class = _model_class(config, spec)
    meta = meta_model(config, trust_remote_code=spec.trust_remote_code)
    plain, sinks = bool(model_class._supports_sdpa), attention.has_sinks(meta)
    needs = attention.needs_of(config, supports_sdpa=plain, sinks=sinks, deterministic=run.train.deterministic)
    implementation = attention.choose(spec, needs, device, run.train.sequence_parallel)
    if spec.weights == "random":
        causal = loading.empty_model(config, meta, implementation, ds_config, trust_remote_code=spec.trust_remote_code)
        loading.initialise(causal)
        return causal, implementation
    index = read_index(weights_folder(spec))
    found = matching.match(meta, index)
    matching.refuse(found, spec)
    causal = loading.empty_model(config, meta, implementation, ds_config, trust_remote_code=spec.trust_remote_code)
    loading.load(causal, meta, found, index, on_files)
    return causal, implementation


def set_leaf_modules(causal: PreTrainedModel, spec: RunSpec) -> None:
    """Make ZeRO-3 all-gather certain modules as a whole: those named in the spec (experts), and every layer.

    Which experts a token uses is not known beforehand. For layers it saves time: hooks on every inner module take longer than a layer's
    forward pass, even on a single rank, and their prefetching reaches so far ahead that it waits for weights that are still being stepped.

    Raises:
        InputError: The model has no module of a class that the spec names.
    """
    from deepspeed.utils import set_z3_leaf_modules
    from transformers.modeling_layers import GradientCheckpointingLayer

    classes = {type(module).__name__: type(module) for module in causal.modules()}
    named = spec.model.leaf_modules
    if absent := [name for name in named if name not in classes]:
        message, remedy = f"the model has no {', '.join(absent)}", f"It has {', '.join(sorted(classes))}."
        problem = Problem(code="leaf-module-unknown", field="model.leaf_modules", value=", ".join(named), message=message, remedy=remedy)
        raise InputError([problem])
    layers = [found for found in classes.values() if issubclass(found, GradientCheckpointingLayer)]
    if whole := list(dict.fromkeys([*(classes[name] for name in named), *layers])):
        set_z3_leaf_modules(causal, whole)


def _head(causal: PreTrainedModel) -> nn.Parameter:
    weight: nn.Parameter = causal.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    return weight


def logit_changes(config: PretrainedConfig) -> tuple[float, float]:
    """Return what a model multiplies its logits with, and the limit that it caps them at (0: none)."""
    kind = config.model_type
    if kind.startswith("granite"):
        return 1.0 / (getattr(config, "logits_scaling", None) or 1.0), 0.0
    if kind.startswith("cohere"):
        return getattr(config, "logit_scale", None) or 1.0, 0.0
    if kind == "falcon_h1":
        return config.lm_head_multiplier, 0.0
    if kind.startswith(("gemma", "vaultgemma")):
        return 1.0, getattr(config, "final_logit_softcapping", None) or 0.0
    return 1.0, 0.0


def refuse_unsupported(causal: PreTrainedModel, model: ModelSpec) -> None:
    """Refuse a model that would be trained wrongly.

    Raises:
        InputError: Its loss is not that of a plain output projection, or its documents could not be kept apart.
    """
    head = causal.get_output_embeddings()  # type: ignore[no-untyped-call]
    config = causal.config
    if getattr(head, "bias", None) is not None:
        code, message, remedy = "model-head-bias", "its output projection has a bias", _PLAIN_HEAD
    elif logit_changes(config) == (1.0, 0.0) and any(getattr(config, key, None) not in (None, 1.0) for key in _LOGIT_KEYS):
        code, remedy = "model-logits-changed", _PLAIN_HEAD
        message = "it changes its logits after the output projection in a way that so-tui does not know"
    elif not attention.needs_rows(config) and not _passes_boundaries(causal):
        code, remedy = "model-packing-unsupported", "Choose a newer kind of model."
        message = f"documents that are packed into one sequence cannot be told apart by transformers' code for {config.model_type}"
    else:
        return
    raise InputError([_problem(code, model, message, remedy)])


def _passes_boundaries(causal: PreTrainedModel) -> bool:
    """Return whether transformers' code gives document boundaries to all attention of a model.

    Models with recurrent layers do so for its flash attention, although they do not say that they take any other.
    """
    model_class, config = type(causal), causal.config
    kinds = set(kinds_of(config))
    carrying = recurrent_kinds(kinds)
    without_attention = carrying and layers_without_attention(kinds) == len(kinds)
    attends = model_class._supports_attention_backend or (carrying and model_class._supports_flash_attn)
    return bool(attends or without_attention) and config.model_type not in _UNSUPPORTED_TYPES


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
            [Problem(code="recurrent-layers-unlisted", field="model.config.layer_types", value="", message=message, remedy=remedy)]
        )


def _problem(code: str, model: ModelSpec, message: str, remedy: str) -> Problem:
    return Problem(code=code, field="model.id", value=model.id, message=message, remedy=remedy)
