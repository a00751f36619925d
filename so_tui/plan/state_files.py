"""Small JSON files in the state folder that planning reads: each is decoded once for as long as it does not change."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from so_tui.spec.files import write_atomic
from so_tui.trust.decoding import read_json

_LOG = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)


def read(path: Path, kind: type[T]) -> T | None:
    """Return the file's content; None where there is no such file, or it cannot be read."""
    try:
        stamp = path.stat()
    except OSError:
        return None
    return _read(path, kind, stamp.st_mtime_ns, stamp.st_size)


def write(path: Path, value: Struct) -> Path:
    """Replace the file and return its path. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
    return path


@lru_cache(maxsize=256)
def _read(path: Path, kind: type[T], modified_ns: int, size: int) -> T | None:
    # Keyed by time and size, so that a plan costs a stat and not a decoding.
    try:
        found = read_json(path, kind)
    except (OSError, msgspec.DecodeError) as error:
        _LOG.info("%s is not used: %s", path, error)
        return None
    _LOG.info("%s is used", path)
    return found
