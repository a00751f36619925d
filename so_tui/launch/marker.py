"""The entries in the environment of a run's processes by which its supervisor recognises them."""

from __future__ import annotations

import msgspec

from so_tui.launch.environment import RUN_ID_MARKER, RUN_MARKER
from so_tui.runs.directory import RunDirectory
from so_tui.runs.manifest import run_id


def known_id(run: RunDirectory) -> str:
    """Return the run's id; empty for a run of an older version, and for one whose ``run.json`` is damaged."""
    try:
        return run_id(run)
    except (OSError, msgspec.DecodeError):
        return ""


def markers(run: RunDirectory) -> frozenset[bytes]:
    """Return the entries that a process of the run has, all of them: its path, and its id if it has one.

    A run at the same path as an earlier one has another id, and a copy of a run has another path.
    """
    path, known = f"{RUN_MARKER}={run.path}", known_id(run)
    return frozenset({path.encode(), f"{RUN_ID_MARKER}={known}".encode()} if known else {path.encode()})
