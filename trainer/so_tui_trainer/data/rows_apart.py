"""Where packed documents are as rows of their own, for layers that carry a state from token to token.

Such a layer starts each row with an empty state. So each document is a row, and documents of similar lengths are computed together: few
calls, and little padding, which lies behind a document's end, where none of its tokens sees it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LEAST_SHARE = 0.75
"""Of the longest document of a group: shorter ones begin another."""
_SHORT = 64
"""Tokens up to which documents are one group, whatever their shares: a kernel's block is no shorter."""


def rows_apart(boundaries: npt.NDArray[np.int32]) -> tuple[Tensor, ...]:
    """Lay out the documents of a micro-batch as rows.

    Args:
        boundaries: Cumulative lengths of the documents over the flattened tokens, [documents + 1].

    Returns:
        The place of each token, in its row, in all groups end to end, [tokens] int64. Then for each group the flattened tokens of its rows,
        [documents, tokens of the longest] int64; beyond a document's end its last token.
    """
    lengths, starts = np.diff(boundaries).astype(np.int64), boundaries[:-1].astype(np.int64)
    places = np.empty(int(lengths.sum()), dtype=np.int64)
    groups: list[npt.NDArray[np.int64]] = []
    before = 0
    for members in _groups(lengths):
        columns = np.arange(lengths[members[0]])
        tokens = starts[members, None] + np.minimum(columns, lengths[members, None] - 1)
        inside = columns < lengths[members, None]
        places[tokens[inside]] = before + np.flatnonzero(inside)
        before += tokens.size
        groups.append(tokens)
    return (torch.from_numpy(places), *map(torch.from_numpy, groups))


def _groups(lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield indices of documents that are computed together, the longest first."""
    left = np.argsort(-lengths, kind="stable")
    left = left[lengths[left] > 0]
    while len(left):
        longest = int(lengths[left[0]])
        least = 0.0 if longest <= _SHORT else _LEAST_SHARE * longest
        count = int(np.count_nonzero(lengths[left] >= least))
        yield left[:count]
        left = left[count:]
