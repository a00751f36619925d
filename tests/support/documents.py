"""Made-up documents, and a spec that packs them into short sequences."""

from __future__ import annotations

import numpy as np

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


def spec(**changes: str) -> RunSpec:
    """Return the tiny preset with sequences of 64 tokens and three gradient accumulation steps."""
    small = {"data__sequence_length": "64", "train__micro_batch": "2"}
    return tiny(**(small | {"train__gradient_accumulation": "3"} | changes))
