"""Files that readers see whole, whenever they look."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces the file as a whole. Raises OSError and leaves the old file and no other when that fails."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")  # others may write it too, from other hosts
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
