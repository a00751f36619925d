"""Atomic file writes, and checks of paths and their names."""

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


def exists(path: Path) -> bool:
    """Return whether this user can see a file or folder there. Path's own method raises without permission and on a stale handle."""
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: Path) -> bool:
    """Return whether this user can see a folder there. Path's own method raises as for ``exists``."""
    return os.path.isdir(path)  # noqa: PTH112


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace a file atomically: readers see the old content or the new.

    Args:
        path: The file.
        content: All of its new content.
        mode: Its permissions, less those that the umask takes away.

    Raises:
        OSError: If writing fails; the old file is unchanged and no temporary file is left.
    """
    temporary = path.with_name(
        f".{path.name}.{os.urandom(4).hex()}.tmp"
    )  # unique: processes on other hosts may write the same file
    try:
        # With its mode from the beginning: one that is set later leaves a moment in which others may open it.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(
            path
        )  # an error from a descriptor (disk full) has no file name
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
