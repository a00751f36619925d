"""What older supported versions of torch and transformers lack. Each part says when it can go."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _by_group(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply group after group, as ``grouped_mm`` does at once. Waits for the GPU, to know the
    groups.

    Args:
        left: [rows, inner], or [columns, rows].
        right: [groups, inner, columns], or [rows, inner].
        offs: [groups]; one past each group's last row.

    Returns:
        [rows, columns], or [groups, columns, inner].
    """
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if right.dim() == 3:
        return torch.cat(
            [left[group] @ matrix for group, matrix in zip(groups, right, strict=True)]
        )
    return torch.stack([left[:, group] @ right[group] for group in groups])


grouped_mm: Callable[..., Tensor] = getattr(torch.nn.functional, "grouped_mm", _by_group)
"""torch's product of groups of rows, which ``torch.nn.functional`` has since 2.10: with that as the
oldest version, this can go.
"""

all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""torch's names of these since 2.13, which warns of the older ones: with that as the oldest
version, they can go.
"""


def cache_argument(function: Callable[..., Any]) -> str:
    """Return how a function of transformers, or the ``forward`` of a model, calls the keys and
    values of earlier tokens.

    transformers 5.24 has renamed it, and says that the older name goes with 5.40. With 5.24 as the
    oldest version, this can go, but for models whose code comes with their weights.
    """
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"
