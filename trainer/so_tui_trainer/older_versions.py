"""What older supported versions of torch and transformers lack. Each part says when it can go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def by_group(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply group after group, as ``grouped_mm`` does at once. Waits for the GPU, to know the groups.

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
        return torch.cat([left[group] @ matrix for group, matrix in zip(groups, right, strict=True)])
    return torch.stack([left[:, group] @ right[group] for group in groups])


grouped_mm: Callable[..., Tensor] = getattr(torch.nn.functional, "grouped_mm", by_group)
"""torch's product of groups of rows, which ``torch.nn.functional`` has since 2.10: with that as the oldest version, this can go."""
