"""Cache of tokenised data, shared by ranks, runs and hosts.

An entry is a folder of raw arrays and an ``info.json`` with their sizes and checksums, named by its content. It is written under a
temporary name and renamed when it is complete; two runs that start together may do the same work twice, but never damage an entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from so_tui.folders import cache_home
from so_tui.spec import DataSpec, InputError, Problem, RunSpec
from so_tui.trust.decoding import read_json
from so_tui_trainer.data.documents import Counts, Documents, SourcePart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from so_tui_trainer.data.sources import Opened

_VERSION = 9
_ARRAYS: dict[str, Any] = {
    "tokens": np.int32,
    "trained": np.bool_,
    "offsets": np.int64,
    "rows": np.int64,
}
_BLOCK_BYTES = 1 << 22
_STALE_S = 86_400.0
"""A partial entry that nothing was written to for this long belongs to a process that was killed."""


class Tally(Struct, frozen=True):
    """What became of the rows of a source, whatever its name and weight."""

    layout: str
    documents: int
    counts: Counts


class _Info(Struct, frozen=True):
    tallies: tuple[Tally, ...]
    warnings: tuple[str, ...]
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of each array."""


def default_folder() -> Path:
    """Return the cache folder for tokenised data, by the XDG rules."""
    return cache_home() / "data"


def fingerprint(
    sources: Sequence[Opened], tokenizer: PreTrainedTokenizerBase, spec: RunSpec
) -> str:
    """Return a hash of the rows, the tokenizer with its chat template, and every option that affects the tokens."""
    digest = hashlib.sha256()
    for opened in sources:
        digest.update(
            f"{opened.layout.name} {opened.source.format} {len(opened.rows)} {opened.warnings} ".encode()
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
    ]
    digest.update(json.dumps(options, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def read(folder: Path, data: DataSpec) -> Documents:
    """Return the documents of an entry, memory-mapped so that the ranks of a host share the pages.

    Args:
        folder: The entry.
        data: The data section that it was made for.
    """
    info = _info(folder)
    tokens, trained, offsets, rows = (
        np.memmap(folder / f"{name}.bin", dtype=kind, mode="r") for name, kind in _ARRAYS.items()
    )
    parts = tuple(
        SourcePart(source.source, source.weight, tally.layout, tally.documents, tally.counts)
        for source, tally in zip(data.sources, info.tallies, strict=True)
    )
    counts = sum((part.counts for part in parts), Counts(0, 0, 0))
    return Documents(tokens, trained, offsets, counts, folder.name, parts, rows, info.warnings)


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
    """Context manager that writes a new entry. ``close`` publishes it; leaving the block without it removes everything."""

    def __init__(self, folder: Path) -> None:
        """Create a partial entry.

        Raises:
            InputError: The folder cannot be written.
        """
        self._folder = folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder.parent)
            self.partial = Path(
                tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent)
            )
        except OSError as error:
            raise _unwritable(folder, error) from error

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)

    def append(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append to an array.

        Raises:
            InputError: The disk is full.
        """
        try:
            with (self.partial / f"{name}.bin").open("ab") as file:
                file.write(np.ascontiguousarray(values, dtype=_ARRAYS[name]).data)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def take(self, name: str, source: Path) -> None:
        """Move the content of a raw file to the end of an array.

        Raises:
            InputError: The disk is full.
        """
        try:
            with (self.partial / f"{name}.bin").open("ab") as file, source.open("rb") as piece:
                shutil.copyfileobj(piece, file, _BLOCK_BYTES)
            source.unlink()
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def close(self, tallies: tuple[Tally, ...], warnings: tuple[str, ...]) -> None:
        """Publish the entry. If another run was faster, its entry stays.

        Raises:
            InputError: The entry cannot be written.
        """
        try:
            files = {name: _checksum(self.partial / f"{name}.bin") for name in _ARRAYS}
            (self.partial / "info.json").write_bytes(
                msgspec.json.encode(_Info(tallies, warnings, files))
            )
            if self._folder.exists() and not intact(self._folder):
                with contextlib.suppress(OSError):  # Another run may be replacing it as well.
                    self._folder.rename(self.partial / "damaged")
            self.partial.rename(self._folder)
            shutil.rmtree(self._folder / "damaged", ignore_errors=True)
        except OSError as error:
            if not intact(self._folder):
                raise _unwritable(self._folder, error) from error


def _info(folder: Path) -> _Info:
    return read_json(folder / "info.json", _Info)


def _checksum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _remove_stale(folder: Path) -> None:
    for path in folder.glob("*.partial-*"):
        with contextlib.suppress(OSError):  # It belongs to another user, or is gone.
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(
        [
            Problem(
                code="cache-unwritable",
                field="XDG_CACHE_HOME",
                value=str(folder.parent),
                message=f"cannot be written ({error.strerror})",
                remedy="Free some space there, or set XDG_CACHE_HOME to a folder with more space.",
            )
        ]
    )
