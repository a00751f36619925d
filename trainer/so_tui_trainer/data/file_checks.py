"""What is checked of a local data file before ``datasets`` reads it, which takes minutes and much memory for a file that is no data."""

from __future__ import annotations

import stat
from pathlib import Path

from so_tui.spec import DataSource, InputError, Problem
from so_tui_trainer.data.rows import bad_row

LONGEST_ROW_BYTES = 32 << 20
"""Of a line of JSON. A million tokens of text are about 5 MB."""
_BLOCK_BYTES = 1 << 20
_CHECKED_BYTES = 1 << 30
"""Beyond this, the reader's own errors must do: reading all of a large file twice would double the time to open it."""
_LINES = (".jsonl", ".ndjson", ".json")


def check_file(path: Path, source: DataSource) -> None:
    """Refuse a file without rows, or with a line that no reader can handle.

    Raises:
        InputError: It is no regular file (``data-source-not-a-file``), or has a line that is too long (``data-row-too-long``).
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        message, remedy = f"{path} is a pipe or a device", "Name a JSON, JSONL, Parquet, CSV or TSV file, or a folder of such files."
        raise InputError([Problem(code="data-source-not-a-file", field="data.source", value=source.source, message=message, remedy=remedy)])
    if path.suffix.lower() in _LINES and (row := _too_long_row(path)):
        message = f"is longer than {LONGEST_ROW_BYTES >> 20} MiB; a file of rows has one row a line"
        raise bad_row("data-row-too-long", source.source, row, message)


def _too_long_row(path: Path) -> int | None:
    """Return the number (from 1) of the first line that is too long; None if there is none, or the file is one JSON list."""
    row, length = 1, 0
    with path.open("rb") as file:
        for position in range(0, _CHECKED_BYTES, _BLOCK_BYTES):
            block = file.read(_BLOCK_BYTES)
            if position == 0 and block.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                return None
            if b"\n" in block:
                if length + block.index(b"\n") > LONGEST_ROW_BYTES:
                    return row
                row, length = row + block.count(b"\n"), len(block) - block.rindex(b"\n") - 1
            else:
                length += len(block)
            if length > LONGEST_ROW_BYTES:
                return row
            if not block:
                return None
    return None
