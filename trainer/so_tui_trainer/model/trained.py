"""The model that is trained: transformers' decoder with a loss of our own, and its parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.spec import RunSpec
from so_tui.spec.run_spec import decays
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.model import Gradients, apply, attention, kinds_of
from so_tui_trainer.model.checkpointing import checkpointed_layers
from so_tui_trainer.model.experts import RouterLoss
from so_tui_trainer.model.loss import HeadLoss, logit_changes
from so_tui_trainer.model.weights import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# What some layers must know of the documents in a micro-batch: where each begins, or its length.


_OWNED = "_so_tui_documents"
"""Attribute of a model that has its ``_Documents``."""


class _Documents:
    """The documents of the micro-batch that a model computes. Backward recomputes layers with the
    same.
    """

    rows: tuple[Tensor, ...] = ()
    """The documents as rows (``Batch.apart``), on the model's device."""
    lengths: Tensor | None = None
    """[rows, width] int32, the length of each token's document, for rotary frequencies that depend
    on it; None before the first micro-batch.
    """
    distinct: tuple[int, ...] = ()
    """Those of them for which dynamic frequencies differ from those of short documents."""

    def __init__(self, causal: PreTrainedModel) -> None:
        """Make the layers of ``causal`` that carry a state compute each document as a row, and
        rotary frequencies that depend on a length be those of each document's.
        """
        kinds = chain(kinds_of(causal.config.get_text_config()), repeat(None))
        mixers = [
            mixer
            for layer, kind in zip(checkpointed_layers(causal), kinds, strict=False)
            if (mixer := _mixer(layer, kind)) is not None
        ]
        for mixer in mixers:
            others = _other_arguments(mixer.forward)
            mixer.forward = partial(_each_alone, mixer.forward, others, self)
        self.layers = len(mixers)
        """How many layers of the model carry a state from token to token."""
        rotaries: list[Any] = [
            module for module in causal.modules() if any(map(by_length, rope_types(module)))
        ]
        for rotary in rotaries:
            rotary.forward = partial(_by_document, rotary.forward, rotary, self)
        self._asks_lengths = bool(rotaries)
        self._dynamic_beyond = min(
            (
                int(rotary.original_max_seq_len)
                for rotary in rotaries
                if any(map(_is_dynamic, rope_types(rotary)))
            ),
            default=math.inf,
        )

    def see(self, batch: Batch) -> None:
        """Note the documents of a micro-batch, which is computed next."""
        self.rows = batch.apart
        if self._asks_lengths:
            self.lengths, self.distinct = batch.document_lengths(), ()
            if batch.longest > self._dynamic_beyond:
                longer = self.lengths[self.lengths > self._dynamic_beyond]
                self.distinct = tuple(torch.unique(longer).tolist())  # waits for the GPU


def documents_of(causal: PreTrainedModel) -> _Documents:
    """Return the documents by which layers of ``causal`` compute; the first call makes them do
    so.
    """
    if _OWNED not in causal.__dict__:
        causal.__dict__[_OWNED] = _Documents(causal)
    found: _Documents = causal.__dict__[_OWNED]
    return found


# Rotary frequencies by the length of each document.
#
# With LongRoPE (Phi-3, Phi-4-mini, MiniCPM 3) documents that are longer than the model's original
# length have other frequencies, and with dynamic ones (NTK) each such length has its own.
# transformers takes those of the largest position for a whole forward pass, and may keep them for
# later ones. That is wrong where documents are packed, and where ranks have parts of them.


def by_length(rope_type: str) -> bool:
    """Return whether frequencies depend on the length of a sequence."""
    return rope_type == "longrope" or _is_dynamic(rope_type)


def _is_dynamic(rope_type: str) -> bool:
    return "dynamic" in rope_type


def rope_types(rotary: nn.Module) -> tuple[str, ...]:
    """Return the types of a rotary embedding of transformers', several if kinds of layers have
    their own; none for other modules.
    """
    found = getattr(rotary, "rope_type", None)
    return tuple(found.values()) if isinstance(found, dict) else (found,) if found else ()


def _by_document(
    run: Callable[..., tuple[Tensor, Tensor]],
    rotary: Any,
    documents: _Documents,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> tuple[Tensor, ...]:
    """Return cosines and sines of each token, [rows, width, size]: ``run`` once with the
    frequencies of short documents, and once with each of the others.
    """
    given = () if layer_type is None else (layer_type,)
    kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    if documents.lengths is None or not by_length(kind):
        return run(x, position_ids, *given)

    is_dynamic = _is_dynamic(kind)

    def angles(length: int, positions: Tensor) -> Iterator[Tensor]:
        """Yield cosines and sines as in a sequence of this length."""
        if is_dynamic:
            _forget(rotary, layer_type)
        last = positions.new_full((len(positions), 1), length - 1)
        return (made[:, :-1] for made in run(x, torch.cat((positions, last), dim=1), *given))

    if is_dynamic:
        original = int(rotary.original_max_seq_len)
    else:
        parameters = rotary.config.rope_parameters
        of_kind = parameters if layer_type is None else parameters[layer_type]
        original = int(of_kind["original_max_position_embeddings"])
    found = tuple(angles(original, position_ids.clamp(max=original - 1)))
    if not is_dynamic:
        return _chosen(documents.lengths > original, angles(original + 1, position_ids), found)
    for length in documents.distinct:
        if length > original:
            own = angles(length, position_ids.clamp(max=length - 1))
            found = _chosen(documents.lengths == length, own, found)
    return found


def _chosen(where: Tensor, these: Iterable[Tensor], others: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        torch.where(where[..., None], this, other)
        for this, other in zip(these, others, strict=True)
    )


def _forget(rotary: Any, layer_type: str | None) -> None:
    """Make dynamic frequencies those of a short sequence again, whatever has been computed."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    setattr(rotary, f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq"))
    for name in dict.fromkeys(("max_seq_len_cached", f"{prefix}max_seq_len_cached")):
        setattr(rotary, name, rotary.original_max_seq_len)


# Layers that carry a state from token to token (Mamba, gated delta rule, short convolutions):
# packed documents stay apart in them.
#
# Their kernels start each row with an empty state, and few take document boundaries. So the part
# of a layer that mixes tokens computes each document as a row of its own
# (``so_tui_trainer.data.batches``); attention and feed-forward blocks see the packed tokens as
# always.


def _mixer(layer: nn.Module, kind: str | None) -> nn.Module | None:
    """Return the part of a layer that has a convolution over tokens, as nearly all recurrences
    have; else attention that is linear.
    """
    for module in layer.modules():
        if any(type(part) is nn.Conv1d for part in module.children()):
            return module
    return getattr(layer, "self_attn", None) if kind == "linear_attention" else None


def _other_arguments(run: Callable[..., Any]) -> dict[str, None]:
    """Return what else a function demands: masks and caches, of which a row that is one document
    needs none.
    """
    _, *others = inspect.signature(run).parameters.values()
    demanded = (
        other.name
        for other in others
        if other.default is other.empty and other.kind is other.POSITIONAL_OR_KEYWORD
    )
    return dict.fromkeys(demanded)


def _each_alone(
    run: Callable[..., Any],
    others: dict[str, None],
    documents: _Documents,
    hidden_states: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    """Compute ``run`` with each document as a row, [rows, width, size] to the same. Without
    documents, as it was called.
    """
    if not documents.rows:
        return run(hidden_states, *rest, **options)
    places, *groups = documents.rows
    spread: Any = _Spread
    parts = spread.apply(hidden_states.flatten(0, 1), places, *groups)
    found = [run(part, **others) for part in parts]
    several = isinstance(found[0], tuple)
    mixed = [part[0] for part in found] if several else found
    joined = apply(_Join, places, *mixed).view(*hidden_states.shape[:-1], -1)
    return (joined, *found[0][1:]) if several else joined


class _Spread(torch.autograd.Function):
    """[tokens, size] to rows, a tensor for each group. What is beyond a document's end has no
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, *groups: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places)
        return tuple(tokens[group] for group in groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        (places,) = ctx.saved_tensors
        together = torch.cat([gradient.flatten(0, 1) for gradient in gradients])
        return together[places], None, *(None for _ in gradients)


class _Join(torch.autograd.Function):
    """Rows, a tensor for each group, to [tokens, size]."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shapes = [part.shape for part in parts]
        return torch.cat([part.flatten(0, 1) for part in parts])[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        (places,) = ctx.saved_tensors
        sizes = [rows * width for rows, width, _ in ctx.shapes]
        together = gradients[0].new_zeros(sum(sizes), gradients[0].shape[-1])
        together[places] = gradients[0]
        return None, *(
            part.view(shape)
            for part, shape in zip(torch.split(together, sizes), ctx.shapes, strict=True)
        )


PREFIX = "causal."
"""Precedes a parameter's Hugging Face name in ``TrainedModel``."""


class TrainedModel(nn.Module):
    """A Hugging Face model with a loss in place of its output projection."""

    def __init__(
        self,
        causal: PreTrainedModel,
        implementation: str,
        router: RouterLoss | None = None,
        dropouts: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Wrap a model.

        Args:
            causal: The model with its weights.
            implementation: Its attention implementation.
            router: The load-balancing loss, if there is one.
            dropouts: What its configuration asked to drop, which nothing does.
        """
        super().__init__()
        self.causal = causal
        self.attention = implementation
        self.dropouts = dropouts
        head: nn.Parameter = causal.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        self.loss = HeadLoss(head, *logit_changes(causal.config))
        self.dtype = head.dtype
        """Type of the weights, read once.

        Reading it from a parameter of another module in every forward pass would make ZeRO-3 treat
        that parameter as one of this module's, and all-gather it for the whole forward pass. The
        pass would then wait for the head's weights, which are stepped last, before it starts.
        """
        self.router = router
        self._documents = documents_of(causal)
        self.last_router_loss: Tensor | None = None
        """The router loss of the last forward pass, scaled but without its coefficient;
        detached.
        """

    def forward(
        self, batch: Batch, scale: float, router_scale: float = 0.0, *, logits: bool = False
    ) -> Tensor:
        """Compute the scaled loss of a micro-batch, or logits.

        Args:
            batch: The micro-batch.
            scale: Weight of each trained token's cross-entropy.
            router_scale: Weight of each real token's router loss, which is also multiplied by the
                coefficient.
            logits: Return the logits of the batch's predictors instead, [predictors, vocabulary].

        Returns:
            The sum of both losses; fp32 scalar.
        """
        if logits:
            return self._of_hidden(batch, None)
        if self.router is None or not router_scale:
            return self._of_hidden(batch, batch.targets, scale)
        with self.router.watching() as router_logits:
            loss = self._of_hidden(batch, batch.targets, scale)
        balance = router_scale * self.router(router_logits, batch.real)
        self.last_router_loss = balance.detach()
        return loss + self.router.coefficient * balance

    def _of_hidden(self, batch: Batch, targets: Tensor | None, scale: float = 1.0) -> Tensor:
        self._documents.see(batch)
        hidden = decoder_of(self.causal)(
            input_ids=batch.input_ids,
            use_cache=False,
            **attention.arguments(batch, self.attention, self.causal.config, self.dtype),
        ).last_hidden_state
        result: Tensor = self.loss(hidden, batch.predictors, targets, scale)
        return result


def parameter_groups(model: nn.Module, spec: RunSpec) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: parameters with weight decay, then those without (norms,
    biases), each in the model's order.

    Under ZeRO-3 a parameter is empty, and its shape is in ``ds_shape``.
    """
    groups = []
    for decay in (True, False):
        members = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and decays(name, len(getattr(parameter, "ds_shape", parameter.shape))) == decay
        }
        if members:
            groups.append(
                {
                    "params": list(members.values()),
                    "names": list(members),
                    "weight_decay": spec.train.weight_decay if decay else 0.0,
                    "lr": spec.train.learning_rate,
                }
            )
    return groups


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters of the whole model, whatever shard of them is here."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()
    )
