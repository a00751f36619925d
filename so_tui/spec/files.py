"""Files that readers see whole, whenever they look."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095
"""Of Linux and its file systems."""


def path_fault(text: str) -> str:
    """Why this text can be no path, empty where it can: of such a one even the question what lies there is an error."""
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError:
        return "holds characters that no name may"
    if len(path) > _LONGEST_PATH_BYTES or max(map(len, path.split(b"/"))) > _LONGEST_NAME_BYTES:
        return "is too long for a name"
    if b"\0" in path:
        return "holds a NUL, which no name may"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "begins with `~` and a user who is not known here"
    return ""


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces the file as a whole. Raises OSError and leaves the old file and no other when that fails."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")  # others may write it too, from other hosts
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk is told of a descriptor, not of a name
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
