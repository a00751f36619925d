"""``state.json`` and ``spec.json``: whole files, replaced atomically, so that a reader sees the old one or the new one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import RunState
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.files import write_atomic
from so_tui.spec.types import RunSpec

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What writing fails with on a disk without room, or room for this user."""


def write_state(run: RunDirectory, state: RunState) -> None:
    """Replaces ``state.json``. Raises OSError (disk full, folder gone)."""
    write_atomic(run.state_path, msgspec.json.encode(state))


def write_last_state(run: RunDirectory, state: RunState) -> None:
    """As ``write_state``; a disk too full for another file takes it over the old one, whose block is there. Raises OSError.

    For the last word alone: who reads at that very moment may see a torn one, and looks again.
    """
    try:
        write_state(run, state)
    except OSError as error:
        if error.errno not in FULL:
            raise
        overwrite(run.state_path, msgspec.json.encode(state))


def overwrite(path: Path, content: bytes) -> None:
    """Writes over the file, without a byte more where that will do; what is left of the old is blanked out. Raises OSError."""
    with path.open("r+b") as file:
        file.write(content.ljust(os.fstat(file.fileno()).st_size))


def read_state(run: RunDirectory) -> RunState:
    """The state as recorded (see liveness for the truth). Raises InputError when there is none or it cannot be read."""
    return _read(run.state_path, RunState, "is this the folder of a run?")


def write_spec(run: RunDirectory, spec: RunSpec) -> None:
    """Replaces ``spec.json``. Raises OSError."""
    write_atomic(run.spec_path, msgspec.json.format(msgspec.json.encode(spec), indent=1))


def read_spec(run: RunDirectory) -> RunSpec:
    """What the run trains. Raises InputError when ``spec.json`` is missing or malformed."""
    return _read(run.spec_path, RunSpec, "the run was written by another version of so-tui, or its folder is damaged")


def _read(path: Path, kind: type[T], hint: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        if not path.parent.exists():
            hint = "the folder of the run is gone: it was deleted or moved"
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problem = Problem(field="run", value=str(path.parent), message=f"{path.name} cannot be read: {reason}", remedy=hint)
        raise InputError([problem]) from error
