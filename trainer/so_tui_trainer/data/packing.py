"""Pack documents into training sequences. Pure functions on lengths."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from so_tui.spec import DataSpec

_PADDING_MULTIPLE = 8
"""Without packing, the width of a micro-batch is a multiple of this."""


@dataclass(frozen=True)
class Sequences:
    """Training sequences; sequence ``i`` holds ``documents[offsets[i] : offsets[i + 1]]`` in that order."""

    documents: npt.NDArray[np.int64]
    """Indices of documents, [documents]."""
    offsets: npt.NDArray[np.int64]
    """Start of each sequence in ``documents``, then the total, [sequences + 1]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def holding(self, documents: npt.NDArray[np.int64]) -> Sequences:
        """Return the same sequences with document ``i`` replaced by ``documents[i]``."""
        return Sequences(documents[self.documents], self.offsets)

    def of(self, index: int) -> npt.NDArray[np.int64]:
        """Return the documents of a sequence."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    def efficiency(self, lengths: npt.NDArray[np.int64], capacity: int) -> float:
        """Return the share of useful tokens among all positions.

        Args:
            lengths: Tokens of each document.
            capacity: Positions of a sequence.
        """
        return float(lengths[self.documents].sum()) / (len(self) * capacity)

    def sums(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each sequence the sum of a value over its documents, [sequences]."""
        totals = np.concatenate(([0], np.cumsum(values[self.documents], dtype=np.int64)))
        return np.diff(totals[self.offsets])


def fill(
    lengths: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64], spec: DataSpec
) -> Sequences:
    """Return the sequences of an epoch, packed or one document each as the data section says.

    Args:
        lengths: Tokens of each document, [documents].
        chosen: Indices of the epoch's documents; they may repeat.
        spec: The data section.
    """
    packed = pack(lengths[chosen], spec.sequence_length) if spec.packing else one_each(len(chosen))
    return packed.holding(chosen)


def pack(lengths: npt.NDArray[np.int64], capacity: int) -> Sequences:
    """Pack best-fit-decreasing: the longest document first, each into the sequence that it leaves with the least space.

    Args:
        lengths: Tokens of each document, 1 to ``capacity``.
        capacity: Tokens of a sequence.

    Returns:
        The sequences. Deterministic: documents of equal length keep their order.
    """
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # Free tokens -> sequences with exactly that many.
    spaces: list[int] = []  # Keys of by_space, ascending.
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            target = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
            bins[target].append(document)
        else:
            space, target = capacity, len(bins)
            bins.append([document])
        left = space - length
        if left not in by_space:
            by_space[left] = []
            insort(spaces, left)
        by_space[left].append(target)
    return _sequences(bins)


def one_each(documents: int) -> Sequences:
    """Return one sequence for each document: no packing."""
    return Sequences(np.arange(documents), np.arange(documents + 1))


def _sequences(bins: Sequence[Sequence[int]]) -> Sequences:
    documents = np.fromiter((document for content in bins for document in content), dtype=np.int64)
    return Sequences(
        documents,
        np.concatenate(([0], np.cumsum([len(content) for content in bins], dtype=np.int64))),
    )


def row_widths(longest: npt.NDArray[np.int64], sequence_length: int) -> npt.NDArray[np.int64]:
    """Return how wide the rows of micro-batches are without packing, by the tokens of their longest documents, [micro-batches]."""
    return np.minimum(sequence_length, -(-longest // _PADDING_MULTIPLE) * _PADDING_MULTIPLE)
