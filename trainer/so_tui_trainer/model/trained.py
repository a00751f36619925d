"""The model that is trained: transformers' decoder with a loss of our own, and its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from so_tui.spec import RunSpec
from so_tui.spec.sections.parameters import decays
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.model import attention, recurrent
from so_tui_trainer.model.logits import logit_changes
from so_tui_trainer.model.longrope import long_documents_of
from so_tui_trainer.model.loss import HeadLoss
from so_tui_trainer.model.matching import decoder_of
from so_tui_trainer.model.router import RouterLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "causal."
"""Precedes a parameter's Hugging Face name in ``TrainedModel``."""


class TrainedModel(nn.Module):
    """A Hugging Face model with a loss in place of its output projection."""

    def __init__(
        self, causal: PreTrainedModel, implementation: str, router: RouterLoss | None = None
    ) -> None:
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
        self._long_documents = long_documents_of(causal)
        self.last_router_loss: Tensor | None = None
        """The router loss of the last forward pass, scaled but without its coefficient; detached."""

    def forward(
        self, batch: Batch, scale: float, router_scale: float = 0.0, *, logits: bool = False
    ) -> Tensor:
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
        self._long_documents.look_at(batch)
        hidden = decoder_of(self.causal)(
            input_ids=batch.input_ids,
            use_cache=False,
            **attention.arguments(batch, self.attention, self.causal.config, self.dtype),
        ).last_hidden_state
        result: Tensor = self.loss(hidden, batch.predictors, targets, scale)
        return result


def _head(causal: PreTrainedModel) -> nn.Parameter:
    weight: nn.Parameter = causal.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    return weight


def parameter_groups(model: nn.Module, spec: RunSpec) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: parameters with weight decay, then those without (norms, biases), each in the model's order.

    Under ZeRO-3 a parameter is empty, and its shape is in ``ds_shape``.
    """
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    groups = []
    for decay in (True, False):
        members = [
            (name, parameter)
            for name, parameter in named
            if decays(name, len(getattr(parameter, "ds_shape", parameter.shape))) == decay
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
    return sum(
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()
    )
