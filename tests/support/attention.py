"""Plain causal attention within documents, in place of flash attention's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from so_tui.spec.attention import KERNELS as KNOWN
from so_tui.spec.attention import AttentionBackend, Needs, obstacle_to
from so_tui_trainer.model.attention import LOADERS, Documents, Kernels, present


def visible(documents: Documents) -> Tensor:
    """Return whether the row's token attends to the column's, [tokens, tokens]."""
    starts = documents.boundaries.long()
    position = torch.arange(int(starts[-1]), device=starts.device)
    document = torch.bucketize(position, starts, right=True)
    distance = position[:, None] - position
    near = distance < (documents.window or len(position))
    return (document[:, None] == document) & (distance >= 0) & near


def scores(query: Tensor, key: Tensor, documents: Documents) -> Tensor:
    """Return the scores, capped but not masked, [heads, tokens, tokens]."""
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    found = torch.einsum("qhd,khd->hqk", query, repeated).mul(documents.scale)
    return documents.softcap * (found / documents.softcap).tanh() if documents.softcap else found


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents
) -> tuple[Tensor, Tensor]:
    found = scores(query, key, documents).masked_fill(~visible(documents), -torch.inf)
    normaliser = found.logsumexp(-1)
    repeated = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", (found - normaliser[..., None]).exp(), repeated), normaliser


def plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients as a flash kernel does, from the given log-sum-exp and output."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    capped = scores(query, key, documents)
    seen = capped.masked_fill(~visible(documents), -torch.inf)
    probability = (seen - normaliser[..., None]).exp()
    delta = (gradient * out).sum(-1).t()
    slope = documents.scale * (1 - (capped / documents.softcap) ** 2 if documents.softcap else 1)
    of_scores = (
        probability * (torch.einsum("qhd,khd->hqk", gradient, values) - delta[..., None]) * slope
    )
    of_query = torch.einsum("hqk,khd->qhd", of_scores, keys)
    of_key = torch.einsum("hqk,qhd->khd", of_scores, query).view(*key.shape[:2], groups, -1).sum(2)
    of_value = torch.einsum("hqk,qhd->khd", probability, gradient)
    return of_query, of_key, of_value.view(*value.shape[:2], groups, -1).sum(2)


PLAIN = Kernels(plain_forward, plain_backward)


def backends(needs: Needs | None = None) -> dict[AttentionBackend, Kernels]:
    """Return the kernels of every backend that can be used here."""
    available = present(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    usable = [
        kernel.name
        for kernel in KNOWN
        if obstacle_to(kernel.name, needs or Needs(head_size=64), available) is None
    ]
    return {name: LOADERS[name]() for name in usable}
