"""Refuse files that Git LFS has left in place of the real ones: a clone without LFS has small texts
that name them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from so_tui.spec.errors import reject
from so_tui.trust.files import open_descriptor

_BEGIN = b"version https://git-lfs.github.com/spec/"


def refuse_pointers(paths: Iterable[Path], field: str, value: str) -> None:
    """Refuse pointers of Git LFS among files.

    Args:
        paths: The files. Other things and missing files are left to their readers.
        field: The field that names them.
        value: What the user calls the file or its folder.

    Raises:
        InputError: One of them is a pointer (``lfs-pointer``).
        OSError: One of them cannot be read.
    """
    for path in filter(is_pointer, paths):
        raise reject(
            "lfs-pointer",
            field,
            value,
            f"{path.name} is a pointer of Git LFS, not the file itself",
            f"Run `git lfs pull` in {path.parent}, or download the file.",
        )


def is_pointer(path: Path) -> bool:
    """Return whether a file is a pointer of Git LFS."""
    if not path.is_file():
        return False
    with os.fdopen(open_descriptor(path), "rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN
