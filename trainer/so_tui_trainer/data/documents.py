"""Tokenised rows, end to end, as they lie in the cache and as every rank reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from so_tui.spec import InputError, Problem

MAX_ROUNDS = 10_000
"""How often an epoch may meet a document, at most: beyond it is a weight that was meant otherwise, and no memory for the epoch."""
_PART_DOCUMENTS = 10_000


class Counts(Struct, frozen=True):
    """What became of the rows of a source, or of all."""

    rows: int
    truncated: int
    """Rows that lost their end: they are longer than a sequence."""
    dropped: int
    """Rows without a trained token within a sequence."""
    dropped_too_long: int = 0
    """Of those: rows whose prompt alone fills a sequence."""
    cut: int = 0
    """Rows of plain text that were cut into several documents; nothing of them is lost."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


class SourcePart(Struct, frozen=True):
    """The documents of one source; they lie in a row."""

    source: str
    weight: float
    layout: str
    documents: int
    counts: Counts


class Documents(NamedTuple):
    """Document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``."""

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    """Per token: whether predicting it counts in the loss."""
    offsets: npt.NDArray[np.int64]
    counts: Counts
    fingerprint: str
    """Hash of the rows, the tokenizer and the options: equal data has an equal fingerprint."""
    parts: tuple[SourcePart, ...] = ()
    """The sources in order; empty: one source."""
    rows: npt.NDArray[np.int64] | None = None
    """Per document: the number of its row in its source, from 1; None: each row is a document."""
    warnings: tuple[str, ...] = ()

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def trained_lengths(self) -> npt.NDArray[np.int64]:
        """Trained tokens of each document. Counted in parts: the flags may be more than memory holds eight bytes each for."""
        counted = []
        for first in range(0, len(self.offsets) - 1, _PART_DOCUMENTS):
            ends = self.offsets[first : first + _PART_DOCUMENTS + 1]
            totals = np.concatenate(([0], np.cumsum(self.trained[ends[0] : ends[-1]], dtype=np.int64)))
            counted.append(np.diff(totals[ends - ends[0]]))
        return np.concatenate(counted)

    def row_of(self, document: int) -> int:
        """The number of a document's row in its source, from 1."""
        return document + 1 if self.rows is None else int(self.rows[document])

    def epoch(self, seed: int, members: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """The documents that an epoch meets, of ``members`` (ascending; all by default): those of a source with a large weight several
        times. Raises InputError for weights that no epoch can have."""
        members = np.arange(len(self.offsets) - 1) if members is None else members
        if len(self.parts) < 2:
            return members
        ends = np.cumsum([part.documents for part in self.parts])
        source_members = np.split(members, np.searchsorted(members, ends[:-1]))
        self._check_weights([len(mine) for mine in source_members])
        return mixture(source_members, [part.weight for part in self.parts], seed)

    def _check_weights(self, sizes: Sequence[int]) -> None:
        """``sizes``: documents of each source. Raises InputError."""
        per_document = [(part.weight / size, part) for part, size in zip(self.parts, sizes, strict=True) if size]
        most, part = max(per_document, key=lambda pair: pair[0])
        rounds = most / min(weight for weight, _ in per_document)
        if rounds > MAX_ROUNDS:
            message = f"is so much that an epoch, which meets every row of every source, would meet its rows {rounds:,.0f} times each"
            remedy = f'Lower it, or take a part of the largest source (split = "train[:10%]"); {MAX_ROUNDS:,} times is the most.'
            raise InputError(
                [Problem(field="data.source", value=f"weight {part.weight:g} of {part.source}", message=message, remedy=remedy)]
            )


def mixture(members: Sequence[npt.NDArray[np.int64]], weights: Sequence[float], seed: int) -> npt.NDArray[np.int64]:
    """The documents of several sources, of each as many as its share by ``weights`` is.

    Every document is met at least once; what a source lacks for its share is filled with copies of all its documents, and the rest with
    some of them chosen by ``seed``. A source without documents has no share.
    """
    present = [(source_members, weight) for source_members, weight in zip(members, weights, strict=True) if len(source_members)]
    total_weight = sum(weight for _, weight in present)
    size = max(len(source_members) * total_weight / weight for source_members, weight in present)
    rng = np.random.default_rng(seed)
    chosen = []
    for source_members, weight in present:
        copies, rest = divmod(max(len(source_members), round(size * weight / total_weight)), len(source_members))
        chosen += [np.tile(source_members, copies), np.sort(rng.choice(source_members, rest, replace=False))]
    return np.concatenate(chosen)
