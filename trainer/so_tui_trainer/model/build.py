"""The model: from a hub id, a folder, or a shape with random weights, cut over the ranks by ZeRO-3 as it is built."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.spec import InputError, ModelSpec, Problem, RunSpec, first_line, resolve_source
from so_tui.spec.types import decays
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.model import attention, kernels, loading, matching, recompute
from so_tui_trainer.model.loss import HeadLoss
from so_tui_trainer.model.matching import meta_model
from so_tui_trainer.model.pretrained import weights_folder
from so_tui_trainer.model.router import RouterLoss
from so_tui_trainer.model.stored import read_index

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PREFIX = "causal."
"""What stands before a parameter's name in the Hugging Face model."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_UNSUPPORTED_TYPES = {"opt", "nemotron"}
"""Models that go through transformers' attention, but make their mask without looking at positions, or do not hand on to attention where
documents start."""
_LOGIT_SCALES = ("logits_scaling", "logit_scale")


class TrainedModel(nn.Module):
    """The Hugging Face model, and the loss in place of its output projection."""

    def __init__(self, causal: PreTrainedModel, implementation: str, router: RouterLoss | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.attention = implementation
        head = _head(causal)
        self.loss = HeadLoss(head)
        self.dtype = head.dtype
        """Noted here: at the first look at a module's parameter from outside, ZeRO-3 takes it for a parameter of whoever looks, and gathers
        it for all of this forward. The forward would wait for the head's weights, the last to be stepped, before it begins.
        """
        self.router = router
        self.last_router_loss: Tensor | None = None
        """What the last forward made of ``router_scale``, without the coefficient; detached."""

    def forward(self, batch: Batch, scale: float, router_scale: float = 0.0) -> Tensor:
        """``scale`` times the summed loss of the batch's trained tokens.

        Where there is a router loss, plus ``router_scale`` times the batch's real tokens times that loss, times its coefficient.
        """
        if self.router is None or not router_scale:
            return self._language_loss(batch, scale)
        with self.router.watching() as logits:
            loss = self._language_loss(batch, scale)
        balance = router_scale * self.router(logits, batch.real)
        self.last_router_loss = balance.detach()
        return loss + self.router.coefficient * balance

    def _language_loss(self, batch: Batch, scale: float) -> Tensor:
        hidden = self.causal.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **attention.arguments(batch, self.attention, self.causal.config, self.dtype),
        ).last_hidden_state
        loss: Tensor = self.loss(hidden, batch.predictors, batch.targets, scale)
        return loss


def load_config(model: ModelSpec) -> PretrainedConfig:
    """The model's configuration, for weights in bf16 whatever they were. Raises InputError when it cannot be had."""
    from transformers import AutoConfig

    try:
        if model.weights == "random":
            shape = dict(model.config)
            config: PretrainedConfig = AutoConfig.for_model(shape.pop("model_type"), **shape)
            return config
        found: PretrainedConfig = AutoConfig.from_pretrained(
            resolve_source(model.id), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        if hasattr(found, "quantization_config"):
            del found.quantization_config
        return found
    except KeyError as error:
        remedy = "Give the model's `config.json` as `[model.config]`, with `model_type`."
        raise InputError([Problem(field="model.config", value="", message=f"lacks {error}", remedy=remedy)]) from error
    except (OSError, ValueError) as error:
        remedy = "Check the name and the network, log in with `hf auth login` if it is gated, or fetch it first with `so-tui fetch`."
        raise InputError(
            [Problem(field="model.id", value=model.id, message=f"cannot be read ({first_line(error)})", remedy=remedy)]
        ) from error


def build(spec: RunSpec, device: torch.device, ds_config: dict[str, Any]) -> TrainedModel:
    """The model in bf16, cut over the ranks as ``ds_config`` says, ready to train.

    Raises InputError: model not to be had, weights that are not the model's, or a kind of model that is not supported.
    """
    config = load_config(spec.model)
    disable_dropout(config)
    causal, implementation = _causal(spec.model, config, device, ds_config)
    refuse_unsupported(causal, spec.model)
    causal.config.use_cache = False
    if spec.model.kernels == "auto":
        kernels.install(causal)
    policy = spec.model.activation_checkpointing
    recompute.install(causal, "full" if policy == "auto" else policy)
    set_leaf_modules(causal, spec)
    causal.train()
    coefficient = spec.train.router_loss_coefficient
    return TrainedModel(causal, implementation, RouterLoss(causal, coefficient) if coefficient else None)


def disable_dropout(config: PretrainedConfig) -> None:
    """Fine-tuning runs without dropout, whatever pre-training used (Seed-OSS names 0.1): the varlen kernels have none."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def parameter_groups(model: nn.Module, spec: RunSpec) -> list[dict[str, Any]]:
    """For AdamW: the parameters with weight decay, then those without (norms, biases), each in the model's order.

    Under ZeRO-3 a parameter here is empty, and its shape is in ``ds_shape``.
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
    """Parameters of the whole model, whatever part of them is here."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def expected_first_loss(config: PretrainedConfig) -> float:
    """Loss of random weights: ln(vocabulary), plus half the variance of the logits, which a normalised hidden state and the head's
    initial spread make ``hidden_size * initializer_range**2``.
    """
    spread = float(getattr(config, "initializer_range", None) or 0.02)
    vocabulary, hidden = int(config.vocab_size), int(config.hidden_size)
    return math.log(vocabulary) + hidden * spread**2 / 2


def _model_class(config: PretrainedConfig, model: ModelSpec) -> type[PreTrainedModel]:
    from transformers import AutoModelForCausalLM

    try:
        found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        message = f"is a {config.model_type}, which transformers knows no causal language model for"
        raise InputError([Problem(field="model.id", value=model.id, message=message, remedy="Choose a causal language model.")]) from error
    model_class: type[PreTrainedModel] = found
    return model_class


def _causal(spec: ModelSpec, config: PretrainedConfig, device: torch.device, ds_config: dict[str, Any]) -> tuple[PreTrainedModel, str]:
    """The model with its weights, cut over the ranks, and its attention implementation."""
    model_class = _model_class(config, spec)
    meta = meta_model(config, trust_remote_code=spec.trust_remote_code)
    sinks = attention.has_sinks(meta)
    implementation = attention.choose(spec, supports_sdpa=bool(model_class._supports_sdpa), has_sinks=sinks, device=device)
    if spec.weights == "random":
        causal = loading.empty_model(config, meta, implementation, ds_config, trust_remote_code=spec.trust_remote_code)
        loading.initialise(causal)
        return causal, implementation
    index = read_index(weights_folder(spec))
    found = matching.match(meta, index)
    matching.refuse(found, spec)
    causal = loading.empty_model(config, meta, implementation, ds_config, trust_remote_code=spec.trust_remote_code)
    loading.load(causal, meta, found, index)
    return causal, implementation


def set_leaf_modules(causal: PreTrainedModel, spec: RunSpec) -> None:
    """Tell ZeRO-3 which blocks to gather in one piece: those of experts, since which experts a token meets is not known beforehand, and
    every layer. Module by module, the Python of gathering takes longer than a layer's forward, on one rank too, where there is nothing to
    gather; and it looks so far ahead that it waits for weights that are still being stepped.
    """
    from deepspeed.utils import set_z3_leaf_modules
    from transformers.modeling_layers import GradientCheckpointingLayer

    classes = {type(module).__name__: type(module) for module in causal.modules()}
    named = spec.model.leaf_modules
    if absent := [name for name in named if name not in classes]:
        message, remedy = f"the model has no {', '.join(absent)}", f"It has {', '.join(sorted(classes))}."
        raise InputError([Problem(field="model.leaf_modules", value=", ".join(named), message=message, remedy=remedy)])
    layers = [found for found in classes.values() if issubclass(found, GradientCheckpointingLayer)]
    if whole := list(dict.fromkeys([*(classes[name] for name in named), *layers])):
        set_z3_leaf_modules(causal, whole)


def _head(causal: PreTrainedModel) -> nn.Parameter:
    weight: nn.Parameter = causal.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    return weight


def refuse_unsupported(causal: PreTrainedModel, model: ModelSpec) -> None:
    """Raises InputError for a model that would be trained wrongly: its loss is not that of a plain output projection, or packed documents
    would see each other.
    """
    head = causal.get_output_embeddings()  # type: ignore[no-untyped-call]
    config = causal.config
    recurrent = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if getattr(head, "bias", None) is not None:
        message, remedy = "its output projection has a bias", "Choose a model with a plain output projection."
    elif getattr(config, "final_logit_softcapping", None) or any(getattr(config, key, None) not in (None, 1.0) for key in _LOGIT_SCALES):
        message, remedy = "it changes its logits after the output projection", "Choose a model with a plain output projection."
    elif recurrent:
        message = f"it has layers of {', '.join(sorted(recurrent))}, in which documents packed into one sequence would see each other"
        remedy = "Choose a model with attention in every layer."
    elif not type(causal)._supports_attention_backend or config.model_type in _UNSUPPORTED_TYPES:
        message = f"documents packed into one sequence cannot be told apart in transformers' code for {config.model_type}"
        remedy = "Choose a model of a newer kind."
    else:
        return
    raise InputError([Problem(field="model.id", value=model.id, message=message, remedy=remedy)])
