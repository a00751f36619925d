"""Tokenised rows, as the cache stores them and every rank reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from so_tui.spec import InputError, Problem
from so_tui.units import significant, thousands

MAX_ROUNDS = 10_000
"""How often an epoch may repeat a document. A weight that exceeds it is a mistake, and the epoch would not fit into memory."""
_PART_DOCUMENTS = 10_000
"""Documents whose trained tokens are counted together."""


class Counts(Struct, frozen=True):
    """What became of the rows of a source, or of all sources."""

    rows: int
    truncated: int
    """Rows longer than a sequence, which lost their end."""
    dropped: int
    """Rows without a trained token within a sequence."""
    dropped_too_long: int = 0
    """Dropped rows whose prompt fills a sequence."""
    cut: int = 0
    """Rows of plain text that were cut into several documents, without loss."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__)
        )


class SourcePart(Struct, frozen=True):
    """The documents of one source; they are contiguous."""

    source: str
    weight: float
    layout: str
    documents: int
    counts: Counts


class Documents(NamedTuple):
    """All documents end to end; document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``."""

    tokens: npt.NDArray[np.int32]
    """Token ids, [tokens]."""
    trained: npt.NDArray[np.bool_]
    """Whether predicting a token counts in the loss, [tokens]."""
    offsets: npt.NDArray[np.int64]
    """Start of each document, then the total, [documents + 1]."""
    counts: Counts
    fingerprint: str
    """Hash of the rows, the tokenizer and the options: equal data have an equal fingerprint."""
    parts: tuple[SourcePart, ...] = ()
    """The sources in order; empty for one source."""
    rows: npt.NDArray[np.int64] | None = None
    """Number of each document's row in its source, from 1, [documents]; None if each row is a document."""
    warnings: tuple[str, ...] = ()

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, [documents]."""
        return np.diff(self.offsets)

    @property
    def trained_lengths(self) -> npt.NDArray[np.int64]:
        """Trained tokens of each document, [documents].

        Counted in parts: eight bytes for each flag might exceed the memory.
        """
        counted = []
        for first in range(0, len(self.offsets) - 1, _PART_DOCUMENTS):
            ends = self.offsets[first : first + _PART_DOCUMENTS + 1]
            totals = np.concatenate(
                ([0], np.cumsum(self.trained[ends[0] : ends[-1]], dtype=np.int64))
            )
            counted.append(np.diff(totals[ends - ends[0]]))
        return np.concatenate(counted)

    def row_of(self, document: int) -> int:
        """Return the number of a document's row in its source, from 1."""
        return document + 1 if self.rows is None else int(self.rows[document])

    def epoch(
        self, seed: int, members: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the documents of an epoch, where those of a source with a large weight occur several times.

        Args:
            seed: Chooses the documents that occur once more than others.
            members: Indices to choose from, ascending; all documents by default.

        Raises:
            InputError: A weight is too large.
        """
        members = np.arange(len(self.offsets) - 1) if members is None else members
        if len(self.parts) < 2:
            return members
        ends = np.cumsum([part.documents for part in self.parts])
        source_members = np.split(members, np.searchsorted(members, ends[:-1]))
        self._check_weights([len(mine) for mine in source_members])
        return mixture(source_members, [part.weight for part in self.parts], seed)

    def _check_weights(self, sizes: Sequence[int]) -> None:
        """Refuse weights that would repeat documents too often.

        Args:
            sizes: Number of documents of each source.

        Raises:
            InputError: A weight is too large.
        """
        per_document = [
            (part.weight / size, part) for part, size in zip(self.parts, sizes, strict=True) if size
        ]
        most, part = max(per_document, key=lambda pair: pair[0])
        rounds = most / min(weight for weight, _ in per_document)
        if rounds > MAX_ROUNDS:
            times = f"{significant(rounds)} times; the limit is {thousands(MAX_ROUNDS)}"
            message = (
                f"an epoch, which uses every row of every source, would repeat its rows {times}"
            )
            remedy = (
                'Lower the weight, or use a part of the largest source (split = "train[:10%]").'
            )
            value = f"weight {part.weight:g} of {part.source}"
            raise InputError(
                [
                    Problem(
                        code="data-weight-too-large",
                        field="data.source",
                        value=value,
                        message=message,
                        remedy=remedy,
                    )
                ]
            )


def mixture(
    members: Sequence[npt.NDArray[np.int64]], weights: Sequence[float], seed: int
) -> npt.NDArray[np.int64]:
    """Mix documents of several sources in proportion to their weights.

    Every document occurs at least once. A source that has too few documents for its share is repeated as a whole, and the rest of its
    share is drawn at random. A source without documents has no share.

    Args:
        members: Document indices of each source.
        weights: Weight of each source.
        seed: Seed of the random choice.

    Returns:
        Indices of the documents of an epoch, [documents].
    """
    present = [
        (source_members, weight)
        for source_members, weight in zip(members, weights, strict=True)
        if len(source_members)
    ]
    total_weight = sum(weight for _, weight in present)
    size = max(len(source_members) * total_weight / weight for source_members, weight in present)
    rng = np.random.default_rng(seed)
    chosen = []
    for source_members, weight in present:
        copies, rest = divmod(
            max(len(source_members), round(size * weight / total_weight)), len(source_members)
        )
        chosen += [
            np.tile(source_members, copies),
            np.sort(rng.choice(source_members, rest, replace=False)),
        ]
    return np.concatenate(chosen)
