"""The load-balancing loss of mixture-of-experts models (Switch Transformer, equations 4 to 6), over real tokens only.

For E experts, of which the router chooses k for each token: E x sum over experts of (times chosen / tokens) x (mean probability). Counts
and probabilities are taken over all layers together, as transformers' ``load_balancing_loss_func`` does. It is k where the load is even.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.spec import InputError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RouterLoss:
    """Sees what the routers of a model say in a forward pass, and makes the loss of it."""

    def __init__(self, causal: PreTrainedModel, coefficient: float) -> None:
        """Raises InputError for a model without routers."""
        self.coefficient = coefficient
        self._experts_per_token = int(getattr(causal.config, "num_experts_per_tok", 0))
        self._seen: list[Tensor] | None = None
        routers = _routers(causal)
        if not routers:
            message, remedy = f"a {causal.config.model_type} has no routers whose load could be balanced", "Set it to 0."
            raise InputError([Problem(field="train.router_loss_coefficient", value=f"{coefficient:g}", message=message, remedy=remedy)])
        for router in routers:
            router.register_forward_hook(self._notice)

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """Collects the routers' logits, [tokens, experts] a layer. Not while a checkpointed layer is computed again in backward."""
        seen: list[Tensor] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    def __call__(self, logits: list[Tensor], real: Tensor) -> Tensor:
        """The loss times the number of real tokens, so that micro-batches weigh what they hold; fp32 scalar. ``real``: bool, any shape."""
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

    def _notice(self, router: nn.Module, _: Any, output: Any) -> None:
        if self._seen is not None:
            self._seen.append(output[0] if isinstance(output, tuple) else output)


class _ProbabilitySum(torch.autograd.Function):
    """Sum over the masked tokens of the softmax over experts. Keeps the logits alone: an fp32 softmax of every layer would be kept else."""

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


def _routers(causal: PreTrainedModel) -> list[nn.Module]:
    """The modules whose logits transformers itself would record."""
    recorded = getattr(causal, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits") or (getattr(causal.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    return [] if kind is None else [module for module in causal.modules() if isinstance(module, kind)]
