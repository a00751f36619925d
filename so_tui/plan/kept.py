"""What plans know from before: small JSON files in the state folder, each read once for as long as it stays as it is."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from so_tui.spec.files import write_atomic

T = TypeVar("T", bound=Struct)


def read(path: Path, kind: type[T]) -> T | None:
    """None where there is no such file, or none that can be read."""
    try:
        stamp = path.stat()
    except OSError:
        return None
    return _read(path, kind, stamp.st_mtime_ns, stamp.st_size)


def write(path: Path, value: Struct) -> Path:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
    return path


@lru_cache(maxsize=256)
def _read(path: Path, kind: type[T], modified_ns: int, size: int) -> T | None:
    # Keyed by the file's stamp: a plan costs one look at the folder, not one reading.
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
