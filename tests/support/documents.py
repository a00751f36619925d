"""Made-up documents, and a spec that packs them into short sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from so_tui.spec import RunSpec
from so_tui_trainer.data.documents import Counts, Documents
from tests.support.launching import tiny


def documents(count: int = 50, seed: int = 0, longest: int = 60) -> Documents:
    """Return ``count`` documents of random tokens; all but the first quarter of each is trained."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, longest, size=count)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    trained = np.concatenate([np.arange(length) >= max(1, length // 4) for length in lengths])
    tokens = rng.integers(1, 2000, size=offsets[-1]).astype(np.int32)
    rows = np.arange(1, count + 1)
    return Documents(tokens, trained, offsets, Counts(count, 0, 0), "made-up", rows)


def ids_of(docs: Documents, index: int) -> Tensor:
    part = slice(docs.offsets[index], docs.offsets[index + 1])
    return torch.tensor(docs.tokens[part], dtype=torch.int64)[None]


def loss_alone(causal: Any, docs: Documents, members: Iterable[int]) -> Tensor:
    total = torch.zeros(())
    for member in members:
        ids, trained = ids_of(docs, member), docs.trained[docs.offsets[member] :][1:]
        labels = torch.where(torch.tensor(trained[: ids.shape[1] - 1]), ids[0, 1:], -100)
        logits = causal(input_ids=ids).logits[0, :-1]
        total = total + cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total


def spec(**changes: str) -> RunSpec:
    """Return the tiny preset with sequences of 64 tokens and three gradient accumulation steps."""
    small = {"data__sequence_length": "64", "train__micro_batch": "2"}
    return tiny(**small | {"train__gradient_accumulation": "3"} | changes)
