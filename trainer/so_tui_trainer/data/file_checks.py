"""What is checked of a local data file before ``datasets`` reads it, which takes minutes and much memory for a file that is no data.

Other errors are left to the readers of ``datasets``.
"""

from __future__ import annotations

import lzma
import re
import stat
import zlib
from pathlib import Path
from typing import BinaryIO

import fsspec
import numpy as np

from so_tui.spec import DataSource, InputError, Problem
from so_tui_trainer.data.rows import bad_row

LONGEST_ROW_BYTES = 32 << 20
"""Of a line of JSON. A million tokens of text are about 5 MB."""
MOST_NESTED = 100
"""Levels of lists and objects in a row. Tool calls have about ten."""
_LONGEST_LIST_BYTES = 256 << 20
"""Of a file that is one JSON list: its reader holds all of it in memory, several times."""
_CHECKED_BYTES = 1 << 30
"""Beyond this, the reader's own errors must do: reading all of a large file twice would double the time to open it."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""Without its end, too, in a line that was cut off: otherwise it would be read again from each quote in it."""
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_CHUNK_BYTES = 1 << 20
_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


def check_file(path: Path, source: DataSource, name: str = "") -> None:
    """Refuse a file without rows, or with a line that no reader can handle.

    Args:
        path: The file.
        source: The source that it belongs to.
        name: What errors call it; by default the name of the source.

    Raises:
        InputError: It is no regular file (``data-source-not-a-file``), or has a row that is too long (``data-row-too-long``) or nested
            too deeply (``data-row-too-deep``).
        OSError: It cannot be read.
    """
    name = name or source.source
    if not stat.S_ISREG(path.stat().st_mode):
        message, remedy = (
            f"{path} is a pipe or a device",
            "Name a JSON, JSONL, Parquet, CSV or TSV file, or a folder of such files.",
        )
        raise InputError(
            [
                Problem(
                    code="data-source-not-a-file",
                    field="data.source",
                    value=name,
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    if ending(path) not in _LINES:
        return
    compressed = path.suffix.lower() in COMPRESSED
    try:
        with (
            fsspec.open(str(path), "rb", compression="infer")
            if compressed
            else path.open("rb") as file
        ):
            _check_rows(file, name)
    except (
        EOFError,
        ValueError,
        zlib.error,
        lzma.LZMAError,
    ):  # cut short, damaged, or its package is missing: the reader says which
        return


def ending(path: Path) -> str:
    """Return a file's ending without that of a compression, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    return suffixes[-1] if suffixes else ""


def _check_rows(file: BinaryIO, name: str) -> None:
    """Check the lines of a file of rows, or a file that is one JSON list as a whole."""
    checked_bytes = row = 0
    while checked_bytes < _CHECKED_BYTES and (line := file.readline(LONGEST_ROW_BYTES + 1)):
        checked_bytes, row = checked_bytes + len(line), row + 1
        if row == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            _check_list(line + file.read(_LONGEST_LIST_BYTES), name)
            return
        if len(line) > LONGEST_ROW_BYTES:
            message = (
                f"is longer than {LONGEST_ROW_BYTES >> 20} MiB; a file of rows has one row a line"
            )
            raise bad_row("data-row-too-long", name, row, message)
        if _is_deep(line):
            raise bad_row(
                "data-row-too-deep", name, row, f"is nested more than {MOST_NESTED} levels deep"
            )


def _check_list(content: bytes, name: str) -> None:
    if len(content) > _LONGEST_LIST_BYTES:
        message = f"is a JSON list of more than {_LONGEST_LIST_BYTES >> 20} MiB"
        remedy = "Write one row a line (JSONL), which is read in parts, or use Parquet."
        raise InputError(
            [
                Problem(
                    code="data-list-too-long",
                    field="data.source",
                    value=name,
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    if _is_deep(content):
        message, remedy = (
            f"is nested more than {MOST_NESTED} levels deep",
            "Remove the rows that are.",
        )
        raise InputError(
            [
                Problem(
                    code="data-row-too-deep",
                    field="data.source",
                    value=name,
                    message=message,
                    remedy=remedy,
                )
            ]
        )


def _is_deep(text: bytes) -> bool:
    """Return whether brackets outside of strings are nested too deeply: Arrow's reader would end the process."""
    if text.count(b"[") + text.count(b"{") <= MOST_NESTED:
        return False
    # Taking the strings out costs most, and brackets in them are rarely as many.
    return _deepest(text) > MOST_NESTED and _deepest(_STRING.sub(b"", text)) > MOST_NESTED


def _deepest(text: bytes) -> int:
    """Return how deeply brackets are nested, in chunks: one sum over all of them would take many times the memory of the text."""
    level = deepest = 0
    for start in range(0, len(text), _CHUNK_BYTES):
        chunk = np.frombuffer(
            text, dtype=np.uint8, count=min(_CHUNK_BYTES, len(text) - start), offset=start
        )
        levels = np.cumsum(_STEPS[chunk], dtype=np.int32)
        deepest, level = max(deepest, level + int(levels.max())), level + int(levels[-1])
    return deepest
