"""The load-balancing loss of mixture-of-experts models (Switch Transformer, equations 4 to 6), over real tokens only.

With E experts and k of them chosen for each token, it is E x the sum over experts of (times chosen / tokens) x (mean probability). Counts
and probabilities are taken over all layers together, as in transformers' ``load_balancing_loss_func``. An even load gives k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.spec import InputError, Problem
from so_tui_trainer.model.layer_types import same_in_all_layers
from so_tui_trainer.model.matching import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RouterLoss:
    """Collects the logits of a model's routers in a forward pass and computes the loss."""

    def __init__(self, causal: PreTrainedModel, coefficient: float) -> None:
        """Register hooks on the routers.

        Raises:
            InputError: The model has no routers, records them in several ways (JetMoE), or their numbers of chosen experts differ.
        """
        self.coefficient = coefficient
        self._experts_per_token = int(
            same_in_all_layers(getattr(causal.config, "num_experts_per_tok", None)) or 0
        )
        self._seen: list[Tensor] | None = None
        routers = _routers(causal)
        if not routers or not self._experts_per_token:
            raise InputError(
                [
                    Problem(
                        code="model-without-routers",
                        field="train.router_loss_coefficient",
                        value=f"{coefficient:g}",
                        message=f"a {causal.config.model_type} has no routers that transformers records and that choose equally many",
                        remedy="Set it to 0.",
                    )
                ]
            )
        for router, place in routers:
            router.register_forward_hook(partial(self._notice, place))

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """Collect the routers' logits, [tokens, experts] for each layer.

        Recomputations in the backward pass run outside this context and are not collected.
        """
        seen: list[Tensor] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    def __call__(self, logits: list[Tensor], real: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            logits: [tokens, experts] for each layer.
            real: bool, any shape; False in padding.

        Returns:
            The loss times the number of real tokens, so that micro-batches are weighted by their size; fp32 scalar.
        """
        mask = real.flatten().to(torch.float32)
        experts = logits[0].shape[-1]
        chosen = torch.zeros(experts, dtype=torch.float32, device=mask.device)
        probability = torch.zeros_like(chosen)
        for layer in logits:
            best = layer.detach().topk(self._experts_per_token, dim=-1).indices
            chosen.scatter_add_(0, best.flatten(), mask.repeat_interleave(self._experts_per_token))
            probability = probability + _ProbabilitySum.apply(layer, mask)  # type: ignore[no-untyped-call]
        tokens, layers = mask.sum(), len(logits)
        return experts * (chosen * probability).sum() / (tokens * layers**2)

    def _notice(self, place: int, router: nn.Module, _: Any, output: Any) -> None:
        if self._seen is not None:
            self._seen.append(output[place] if isinstance(output, tuple) else output)


class _ProbabilitySum(torch.autograd.Function):
    """Sums the softmax over the unmasked tokens. Saves only the logits, not an fp32 softmax for every layer."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(logits, mask)
        return mask @ logits.softmax(-1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, mask = ctx.saved_tensors
        (gradient,) = gradients
        softmax = logits.softmax(-1, dtype=torch.float32)
        wanted = softmax * (gradient - (softmax @ gradient)[:, None]) * mask[:, None]
        return wanted.to(logits.dtype), None


def _routers(causal: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the modules whose logits transformers itself would record, and where in their result these are: second in Llama 4."""
    recorded = getattr(causal, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits") or (
        getattr(decoder_of(causal), "_can_record_outputs", None) or {}
    ).get("router_logits")
    kind, place = getattr(recorder, "target_class", None), getattr(recorder, "index", 0)
    return (
        []
        if kind is None
        else [(module, place) for module in causal.modules() if isinstance(module, kind)]
    )
