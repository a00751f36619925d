"""Atomic file writes, and checks of path names."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095
"""Limits of Linux and its common file systems."""


def path_fault(text: str) -> str:
    """Return why a text cannot be a path, or an empty string if it can.

    Even testing whether such a path exists raises an error, so check before.
    """
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError:
        return "contains characters that file names cannot have"
    if len(path) > _LONGEST_PATH_BYTES or max(map(len, path.split(b"/"))) > _LONGEST_NAME_BYTES:
        return "is too long for a file name"
    if b"\0" in path:
        return "contains a NUL character, which file names cannot have"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "begins with `~` and the name of an unknown user"
    return ""


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new.

    Raises:
        OSError: If writing fails; the old file is unchanged and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")  # unique: processes on other hosts may write the same file
    try:
        with open(temporary, "wb", opener=_own_file) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error from a descriptor (disk full) has no file name
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _own_file(path: str, flags: int) -> int:
    """Open a file that no umask lets the group write: a run whose files others can change is not acted upon."""
    return os.open(path, flags, 0o644)
