"""The entries in the environment of a run's processes by which its supervisor recognises them."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from so_tui.launch.environment import RUN_ID_MARKER, RUN_MARKER
from so_tui.runs.directory import RunDirectory
from so_tui.trust.reading import read_bounded

_LARGEST_BYTES = 64 << 10


class _Identity(Struct, frozen=True):
    id: str = ""


def run_id(run: RunDirectory) -> str:
    """Return the id in ``run.json``; empty for a run of an older version, which has none."""
    try:
        return msgspec.json.decode(read_bounded(run.path / "run.json", _LARGEST_BYTES), type=_Identity).id
    except (OSError, msgspec.DecodeError):
        return ""


def markers(run: RunDirectory) -> frozenset[bytes]:
    """Return the entries that a process of the run has, all of them: its path, and its id if it has one.

    A run at the same path as an earlier one has another id, and a copy of a run has another path.
    """
    path, known = f"{RUN_MARKER}={run.path}", run_id(run)
    return frozenset({path.encode(), f"{RUN_ID_MARKER}={known}".encode()} if known else {path.encode()})
