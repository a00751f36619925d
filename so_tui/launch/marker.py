"""The entries in the environment of a run's processes by which its supervisor recognises them."""

from __future__ import annotations

import msgspec

from so_tui.launch.environment import ATTEMPT_MARKER, NODE_MARKER, RUN_ID_MARKER, RUN_MARKER
from so_tui.runs.directory import RunDirectory
from so_tui.runs.manifest import run_id


def known_id(run: RunDirectory) -> str:
    """Return the run's id; empty for a run of an older version, and for one whose ``run.json`` is damaged."""
    try:
        return run_id(run)
    except (OSError, msgspec.DecodeError):
        return ""


def markers(
    run: RunDirectory, attempt: int | None = None, node: int | None = None
) -> frozenset[bytes]:
    """Return the entries that a process of the run has, all of them: its path, its id if it has one, and the attempt.

    A run at the same path as an earlier one has another id, and a copy of a run has another path.

    Args:
        run: The run.
        attempt: Only processes of this attempt.
        node: Only processes of this node, of a run on several.
    """
    numbers = {ATTEMPT_MARKER: attempt, NODE_MARKER: node}
    values = {RUN_MARKER: str(run.path), RUN_ID_MARKER: known_id(run)}
    values |= {name: str(number) for name, number in numbers.items() if number is not None}
    return frozenset(f"{name}={value}".encode() for name, value in values.items() if value)
