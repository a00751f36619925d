"""What a model does to its logits, and the loss that random weights begin with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    """Return what a model multiplies its logits with, and the limit that it caps them at (0: none)."""
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


def expected_first_loss(config: PretrainedConfig) -> float:
    """Return the expected loss of random weights, in nats per token.

    It is ln(vocabulary) plus half the variance of the logits. With a normalised hidden state that variance is ``hidden_size *
    initializer_range**2``, times the square of what the model multiplies its logits with.
    """
    spread = float(getattr(config, "initializer_range", None) or 0.02) * logit_changes(config)[0]
    vocabulary, hidden = int(config.vocab_size), int(config.hidden_size)
    return math.log(vocabulary) + hidden * spread**2 / 2
