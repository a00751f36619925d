"""Tokenised rows, as the cache stores them and every rank reads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from so_tui.spec import DataSpec, RunSpec
from so_tui.spec.data_notes import Dropped, DropReason, Found
from so_tui.spec.errors import reject
from so_tui.trust.decoding import read_json
from so_tui.trust.files import NotOwnError, open_descriptor
from so_tui.trust.folders import open_named
from so_tui.units import significant, thousands

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from so_tui_trainer.data.sources import Opened


Int64s = npt.NDArray[np.int64]
"""Lengths, offsets or indices."""
MAX_ROUNDS = 10_000
"""How often an epoch may repeat a document. A weight that exceeds it is a mistake, and the epoch
would not fit into memory.
"""
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
    kinds: dict[str, Found] = {}
    """What is not trained as the rows have it (``so_tui.spec.data_notes``)."""
    dropped_rows: dict[DropReason, Dropped] = {}
    """Dropped rows by reason."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rows + other.rows,
            self.truncated + other.truncated,
            self.dropped + other.dropped,
            self.dropped_too_long + other.dropped_too_long,
            self.cut + other.cut,
            _sums(self.kinds, other.kinds),
            _sums(self.dropped_rows, other.dropped_rows),
        )


_Key = TypeVar("_Key", bound=str)
_Count = TypeVar("_Count", Found, Dropped)


def _sums(one: dict[_Key, _Count], other: dict[_Key, _Count]) -> dict[_Key, _Count]:
    """Return the sums of what has equal keys, and the rest as it is."""
    if not other:
        return one
    return one | {key: one[key] + count if key in one else count for key, count in other.items()}


class SourcePart(Struct, frozen=True, omit_defaults=True):
    """The documents of one source; they are contiguous."""

    layout: str
    documents: int
    counts: Counts
    source: str = ""
    """Not stored, like the weight: runs may name and weigh the same rows differently."""
    weight: float = 1.0
    unused: tuple[str, ...] = ()
    """Columns that its layout does not read."""


class Padding(NamedTuple):
    """What fills rows up (``data.loss = "padded"``)."""

    token: int
    length: int
    """Tokens of a row, padding included."""


class Documents(NamedTuple):
    """All documents end to end; document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``."""

    tokens: npt.NDArray[np.int32]
    """Token ids, [tokens]."""
    trained: npt.NDArray[np.bool_]
    """Whether predicting a token counts in the loss, [tokens]."""
    offsets: Int64s
    """Start of each document, then the total, [documents + 1]."""
    counts: Counts
    fingerprint: str
    """Hash of the rows, the tokenizer and the options: equal data have an equal fingerprint."""
    rows: Int64s
    """Number of each document's row in its source, from 1, [documents]."""
    parts: tuple[SourcePart, ...] = ()
    """The sources in order."""
    warnings: tuple[str, ...] = ()
    padding: Padding | None = None
    """Each document is a row that is filled up with this, and the padding is trained, too. It is
    not stored.
    """

    @property
    def source_starts(self) -> Int64s:
        """First document of each source, then the total, [sources + 1]."""
        return np.cumsum([0, *(part.documents for part in self.parts)])

    @property
    def lengths(self) -> Int64s:
        """Tokens of each document, [documents]."""
        return np.diff(self.offsets)

    @property
    def trained_lengths(self) -> Int64s:
        """Trained tokens of each document, [documents].

        Counted in parts: eight bytes for each flag might exceed the memory.
        """
        if self.padding is not None:
            return np.full(len(self.offsets) - 1, self.padding.length - 1, dtype=np.int64)
        counted = []
        for first in range(0, len(self.offsets) - 1, _PART_DOCUMENTS):
            ends = self.offsets[first : first + _PART_DOCUMENTS + 1]
            flags = self.trained[ends[0] : ends[-1]]
            counted.append(np.add.reduceat(flags, ends[:-1] - ends[0], dtype=np.int64))
        return np.concatenate(counted)

    def epoch(self, seed: int, members: Int64s | None = None) -> Int64s:
        """Return the documents of an epoch, where those of a source with a large weight occur
        several times.

        Args:
            seed: Chooses the documents that occur once more than others.
            members: Indices to choose from, ascending; all documents by default.

        Raises:
            InputError: A weight is too large.
        """
        members = np.arange(len(self.offsets) - 1) if members is None else members
        if len(self.parts) < 2:
            return members
        source_members = np.split(members, np.searchsorted(members, self.source_starts[1:-1]))
        per_document = [
            (part.weight / len(own), part)
            for part, own in zip(self.parts, source_members, strict=True)
            if len(own)
        ]
        most, part = max(per_document, key=lambda pair: pair[0])
        rounds = most / min(weight for weight, _ in per_document)
        if rounds > MAX_ROUNDS:
            raise reject(
                "data-weight-too-large",
                "data.source",
                f"weight {part.weight:g} of {part.source}",
                "an epoch, which uses every row of every source, would repeat its rows "
                f"{significant(rounds)} times; the limit is {thousands(MAX_ROUNDS)}",
                'Lower the weight, or use a part of the largest source (split = "train[:10%]").',
            )
        return _mixture(source_members, [part.weight for part in self.parts], seed)


def _mixture(members: Sequence[Int64s], weights: Sequence[float], seed: int) -> Int64s:
    """Mix documents of several sources in proportion to their weights.

    Every document occurs at least once. A source that has too few documents for its share is
    repeated as a whole, and the rest of its share is drawn at random. A source without documents
    has no share.

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


# Cache of tokenised data, shared by ranks, runs and hosts.
#
# An entry is a folder of raw arrays and an ``info.json`` with their sizes and checksums, named by
# its content. It is written under a temporary name and renamed when it is complete; two runs that
# start together may do the same work twice, but never damage an entry.


_VERSION = 12
_ARRAYS: dict[str, Any] = {
    "tokens": np.int32,
    "trained": np.bool_,
    "offsets": np.int64,
    "rows": np.int64,
}
_BLOCK_BYTES = 1 << 22
_STALE_S = 86_400.0
"""A partial entry that nothing was written to for this long belongs to a process that was
killed.
"""


class _Info(Struct, frozen=True):
    tallies: tuple[SourcePart, ...]
    warnings: tuple[str, ...]
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of each array."""
    padding: Padding | None = None


def padding_of(tokenizer: PreTrainedTokenizerBase, data: DataSpec) -> Padding | None:
    """Return what fills up the rows of a spec; None where nothing is trained on it.

    Raises:
        InputError: The tokenizer has none, or puts it in front.
    """
    if data.loss != "padded":
        return None
    token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if token is None:
        raise reject(
            "data-no-padding-token",
            "data.loss",
            data.loss,
            "fills rows up, and the tokenizer has neither a padding nor an end token for it",
            "Name another tokenizer in `model.tokenizer`, or set `data.loss=all`.",
        )
    if tokenizer.padding_side != "right":
        raise reject(
            "data-padding-side",
            "data.loss",
            data.loss,
            f"fills rows up at their end, the tokenizer at the {tokenizer.padding_side}",
            "Set `padding_side` to right in its tokenizer_config.json, or set `data.loss=all`.",
        )
    return Padding(int(token), data.sequence_length)


def fingerprint(
    sources: Sequence[Opened], tokenizer: PreTrainedTokenizerBase, spec: RunSpec
) -> str:
    """Return a hash of the rows, the tokenizer with its chat template, and every option that
    affects the tokens.
    """
    digest = hashlib.sha256()
    for opened in sources:
        digest.update(
            f"{opened.layout.name} {opened.source.format} {len(opened.rows)} "
            f"{opened.warnings} ".encode()
        )
        for batch in opened.rows.with_format("arrow").iter(batch_size=10_000):
            digest.update(
                batch.schema.remove_metadata().serialize()
            )  # the names: rows are serialized without them
            for part in batch.to_batches():
                digest.update(part.serialize())
    rules = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else repr(sorted(tokenizer.get_vocab().items()))
    )
    digest.update(rules.encode())
    options = [
        _VERSION,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        spec.data.loss,
        spec.data.sequence_length,
        spec.data.split_turns,
        padding_of(tokenizer, spec.data),
    ]
    digest.update(json.dumps(options, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def read(folder: Path, data: DataSpec) -> Documents:
    """Return the documents of an entry, memory-mapped so that the ranks of a host share the pages.

    Args:
        folder: The entry.
        data: The data section that it was made for.

    Raises:
        NotOwnError: The entry is not this user's own.
        OSError: It cannot be read.
    """
    with open_named(folder) as opened:
        if (distrust := opened.distrust) is not None:
            raise NotOwnError(folder, distrust)
        info = _info(opened.at)
        tokens, trained, offsets, rows = (
            _mapped(opened.at / f"{name}.bin", kind) for name, kind in _ARRAYS.items()
        )
    parts = tuple(
        replace(tally, source=source.source, weight=source.weight)
        for source, tally in zip(data.sources, info.tallies, strict=True)
    )
    counts = sum((part.counts for part in parts), Counts(0, 0, 0))
    return Documents(
        tokens, trained, offsets, counts, folder.name, rows, parts, info.warnings, info.padding
    )


def _mapped(path: Path, kind: Any) -> Any:
    """Return an array of a file; one without elements cannot be mapped."""
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.empty(0, dtype=kind)


def intact(folder: Path) -> bool:
    """Return whether an entry is complete and unchanged since it was written."""
    try:
        files = _info(folder).files
        return set(files) == set(_ARRAYS) and all(
            _checksum(folder / f"{name}.bin") == found for name, found in files.items()
        )
    except (OSError, msgspec.DecodeError):
        return False


class Writer:
    """Writes a new entry in the folder ``partial``, until ``publish`` gives it its name.

    All methods raise OSError if the folder cannot be written, or its disk is full.
    """

    def __init__(self, folder: Path) -> None:
        """Create a partial entry."""
        self._folder = folder
        for path in folder.parent.glob("*.partial-*"):
            with contextlib.suppress(OSError):  # It belongs to another user, or is gone.
                if time.time() - path.stat().st_mtime > _STALE_S:
                    shutil.rmtree(path, ignore_errors=True)
        self.partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))

    def append(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append to an array."""
        with (self.partial / f"{name}.bin").open("ab") as file:
            file.write(np.ascontiguousarray(values, dtype=_ARRAYS[name]).data)

    def take(self, name: str, source: Path) -> None:
        """Move the content of a raw file to the end of an array."""
        with (self.partial / f"{name}.bin").open("ab") as file, source.open("rb") as piece:
            shutil.copyfileobj(piece, file, _BLOCK_BYTES)
        source.unlink()

    def publish(
        self,
        tallies: tuple[SourcePart, ...],
        warnings: tuple[str, ...],
        padding: Padding | None = None,
    ) -> None:
        """Name the entry. If another run was faster, its entry stays."""
        try:
            files = {name: _checksum(self.partial / f"{name}.bin") for name in _ARRAYS}
            (self.partial / "info.json").write_bytes(
                msgspec.json.encode(_Info(tallies, warnings, files, padding))
            )
            if self._folder.exists() and not intact(self._folder):
                with contextlib.suppress(OSError):  # Another run may be replacing it as well.
                    self._folder.rename(self.partial / "damaged")
            self.partial.rename(self._folder)
            shutil.rmtree(self._folder / "damaged", ignore_errors=True)
        except OSError:
            if not intact(self._folder):
                raise


def _info(folder: Path) -> _Info:
    return read_json(folder / "info.json", _Info)


def _checksum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with os.fdopen(open_descriptor(path), "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


# Pack documents into training sequences. Pure functions on lengths.


_PADDING_MULTIPLE = 8
"""Without packing, the width of a micro-batch is a multiple of this."""


@dataclass(frozen=True)
class Sequences:
    """Training sequences; sequence ``i`` holds ``documents[offsets[i] : offsets[i + 1]]`` in that
    order.
    """

    documents: Int64s
    """Indices of documents, [documents]."""
    offsets: Int64s
    """Start of each sequence in ``documents``, then the total, [sequences + 1]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, index: int) -> Int64s:
        """Return the documents of a sequence."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    def efficiency(self, lengths: Int64s, capacity: int) -> float:
        """Return the share of useful tokens among all positions.

        Args:
            lengths: Tokens of each document.
            capacity: Positions of a sequence.
        """
        return float(lengths[self.documents].sum()) / (len(self) * capacity)

    def sums(self, values: Int64s) -> Int64s:
        """Return for each sequence the sum of a value over its documents, [sequences]."""
        return np.add.reduceat(values[self.documents], self.offsets[:-1])


def fill(lengths: Int64s, chosen: Int64s, spec: DataSpec) -> Sequences:
    """Return the sequences of an epoch, packed or one document each as the data section says.

    Args:
        lengths: Tokens of each document, [documents].
        chosen: Indices of the epoch's documents; they may repeat.
        spec: The data section.
    """
    if not spec.packing:
        return Sequences(chosen, np.arange(len(chosen) + 1))
    packed = _pack(lengths[chosen], spec.sequence_length)
    return Sequences(chosen[packed.documents], packed.offsets)


def _pack(lengths: Int64s, capacity: int) -> Sequences:
    """Pack best-fit-decreasing: the longest document first, each into the sequence that it leaves
    with the least space.

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
    documents = np.fromiter((document for content in bins for document in content), dtype=np.int64)
    ends = np.cumsum([len(content) for content in bins], dtype=np.int64)
    return Sequences(documents, np.concatenate(([0], ends)))


def row_widths(longest: Int64s, sequence_length: int) -> Int64s:
    """Return how wide the rows of micro-batches are without packing, by the tokens of their longest
    documents, [micro-batches].
    """
    return np.minimum(sequence_length, -(-longest // _PADDING_MULTIPLE) * _PADDING_MULTIPLE)
