"""Cross-entropy from hidden states, in blocks of the vocabulary, so that the logits of a
micro-batch never exist as a whole.

The sizes of the blocks are in ``so_tui.model.flops``. The head's weight is a direct parameter of
the module, so ZeRO-3's own hooks all-gather it before ``forward`` and reduce its gradient after
``backward``. A weight tied to the embedding works the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from so_tui.model.flops import block_columns, kept_blocks
from so_tui_trainer.model import Gradients, apply
from so_tui_trainer.model.kernels import cross_entropy_gradient, log_sum_exp

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# What a model does to its logits.


LOGIT_KEYS = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "final_logit_softcapping",
    "logits_mup_width_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "unpadded_vocab_size",
)
"""Configuration keys of models that change their logits after the output projection."""


def logit_changes(config: PretrainedConfig) -> tuple[float, float]:
    """Return what a model multiplies its logits with, and the limit that it caps them at (0:
    none).
    """
    kind = config.model_type
    if kind.startswith(("granite", "minicpm3")):
        return 1.0 / (getattr(config, "logits_scaling", None) or 1.0), 0.0
    if kind.startswith("cohere"):
        return getattr(config, "logit_scale", None) or 1.0, 0.0
    if kind == "falcon_h1":
        return config.lm_head_multiplier, 0.0
    if kind.startswith(("gemma", "vaultgemma", "nanochat")):
        return 1.0, getattr(config, "final_logit_softcapping", None) or 0.0
    return 1.0, 0.0


def changes_logits_otherwise(config: PretrainedConfig) -> bool:
    """Return whether a model changes its logits in a way that ``logit_changes`` does not know."""
    return logit_changes(config) == (1.0, 0.0) and any(
        getattr(config, key, None) not in (None, 1.0) for key in LOGIT_KEYS
    )


class HeadLoss(nn.Module):
    """The output projection and the cross-entropy in one module."""

    def __init__(self, weight: nn.Parameter, factor: float = 1.0, cap: float = 0.0) -> None:
        """Use an output projection.

        Args:
            weight: [vocabulary, size]
            factor: What the model multiplies its logits with.
            cap: Limit of the logits afterwards: cap x tanh(logits / cap); 0: none.
        """
        super().__init__()
        self.weight, self._factor, self._cap = weight, factor, cap

    def forward(
        self, hidden: Tensor, predictors: Tensor, targets: Tensor | None, scale: float = 1.0
    ) -> Tensor:
        """Compute the scaled loss. Only trained tokens get logits.

        Args:
            hidden: [rows, width, size] hidden states.
            predictors: [trained] int64, indices into the flattened rows whose next token is
                predicted.
            targets: [trained] int64, those next tokens; None for the logits themselves.
            scale: Factor of the loss, above 0.

        Returns:
            ``scale`` times the summed cross-entropy, fp32 scalar; 0 with zero gradients if there
            are no trained tokens. Without targets the logits, [predictors, vocabulary].
        """
        chosen = hidden.flatten(0, -2).index_select(0, predictors)
        if self._factor != 1.0:
            chosen = chosen * self._factor
        if targets is None:
            return _logits(chosen, self.weight, self._cap)
        if not torch.is_grad_enabled():
            normaliser, score, _ = _normalise(chosen, self.weight, targets, self._cap, save=0)
            return (normaliser - score).sum() * scale
        return apply(_BlockedCrossEntropy, chosen, self.weight, targets, scale, self._cap)


class _BlockedCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients in the forward pass, while the head's weight is gathered;
    backward only scales the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, cap: float
    ) -> Tensor:
        normaliser, score, saved_blocks = _normalise(
            hidden, weight, targets, cap, save=kept_blocks(len(hidden), len(weight))
        )
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weight_gradient = torch.empty_like(weight)
        for block in _blocks(len(hidden), len(weight)):
            logits = saved_blocks.pop(block.start, None)
            logits = _logits(hidden, weight[block], cap) if logits is None else logits
            slope = 1 - (logits / cap).square_() if cap else None
            gradient = cross_entropy_gradient(logits, normaliser, targets - block.start, scale)
            if slope is not None:
                gradient.mul_(slope)
            del logits, slope
            hidden_gradient += gradient @ weight[block]
            torch.mm(gradient.t(), hidden, out=weight_gradient[block])
            del gradient  # Before the next block allocates.
        ctx.save_for_backward(hidden_gradient.to(hidden.dtype), weight_gradient)
        return (normaliser - score).sum() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        (gradient,) = gradients
        # In place, since each is used once. A copy of the weight's gradient would be the largest
        # temporary of the step.
        return hidden_gradient.mul_(gradient), weight_gradient.mul_(gradient), None, None, None


def _logits(hidden: Tensor, weight: Tensor, cap: float) -> Tensor:
    logits = hidden @ weight.t()
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _normalise(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, *, save: int
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Compute the log-sum-exp over the vocabulary.

    Args:
        hidden: [trained, size]
        weight: [vocabulary, size]
        targets: [trained]
        cap: Limit of the logits; 0: none.
        save: Number of blocks whose logits are saved for the gradients.

    Returns:
        The log-sum-exp and the logit of the target, both [trained] fp32, and the saved logits by
        the block's first column.
    """
    normaliser = hidden.new_full(targets.shape, -math.inf, dtype=torch.float32)
    score = torch.zeros_like(normaliser)
    saved_blocks: dict[int, Tensor] = {}
    for index, block in enumerate(_blocks(len(hidden), len(weight))):
        logits = _logits(hidden, weight[block], cap)
        column = targets - block.start  # of another block, where it is outside of this one
        inside = (column >= 0) & (column < logits.shape[1])
        column = column.clamp(0, logits.shape[1] - 1)
        score += logits.gather(-1, column[:, None])[:, 0] * inside
        normaliser = torch.logaddexp(normaliser, log_sum_exp(logits))
        if index < save:
            saved_blocks[block.start] = logits
    return normaliser, score, saved_blocks


def _blocks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Yield the rows of the head's weight that form a block."""
    columns = block_columns(tokens, vocabulary)
    for start in range(0, vocabulary, columns):
        yield slice(start, min(start + columns, vocabulary))
