"""What is checked of a local data file before ``datasets`` reads it, which takes minutes and much memory for a file that is no data."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import numpy as np

from so_tui.spec import DataSource, InputError, Problem
from so_tui_trainer.data.rows import bad_row

LONGEST_ROW_BYTES = 32 << 20
"""Of a line of JSON. A million tokens of text are about 5 MB."""
MOST_NESTED = 100
"""Levels of lists and objects in a row. Tool calls have about ten."""
_CHECKED_BYTES = 1 << 30
"""Beyond this, the reader's own errors must do: reading all of a large file twice would double the time to open it."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_STEPS = np.zeros(256, dtype=np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_LINES = (".jsonl", ".ndjson", ".json")


def check_file(path: Path, source: DataSource) -> None:
    """Refuse a file without rows, or with a line that no reader can handle.

    Raises:
        InputError: It is no regular file (``data-source-not-a-file``), or has a row that is too long (``data-row-too-long``) or nested
            too deeply (``data-row-too-deep``).
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        message, remedy = f"{path} is a pipe or a device", "Name a JSON, JSONL, Parquet, CSV or TSV file, or a folder of such files."
        raise InputError([Problem(code="data-source-not-a-file", field="data.source", value=source.source, message=message, remedy=remedy)])
    if path.suffix.lower() in _LINES:
        _check_rows(path, source)


def _check_rows(path: Path, source: DataSource) -> None:
    """Check the lines of a file of rows; a file that is one JSON list is left to its reader."""
    checked_bytes = row = 0
    with path.open("rb") as file:
        while checked_bytes < _CHECKED_BYTES and (line := file.readline(LONGEST_ROW_BYTES + 1)):
            checked_bytes, row = checked_bytes + len(line), row + 1
            whole = row == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
            if len(line) > LONGEST_ROW_BYTES and not whole:
                message = f"is longer than {LONGEST_ROW_BYTES >> 20} MiB; a file of rows has one row a line"
                raise bad_row("data-row-too-long", source.source, row, message)
            if line.count(b"[") + line.count(b"{") > MOST_NESTED and _is_deep(line):
                raise bad_row("data-row-too-deep", source.source, row, f"is nested more than {MOST_NESTED} levels deep")
            if whole:
                return


def _is_deep(line: bytes) -> bool:
    """Return whether brackets outside of strings are nested too deeply: Arrow's reader would end the process."""
    if _deepest(line) <= MOST_NESTED:  # with those in strings, which rarely are as many
        return False
    return _deepest(_STRING.sub(b"", line)) > MOST_NESTED


def _deepest(line: bytes) -> int:
    return int(np.cumsum(_STEPS[np.frombuffer(line, dtype=np.uint8)]).max())
