"""Read and write ``state.json`` and ``spec.json``: whole files, replaced atomically.

Problem codes:
    run-gone: The folder of the run does not exist any more.
    unreadable-state, unreadable-spec: ``state.json`` or ``spec.json`` is missing or malformed.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from so_tui.runs.codec import is_count, is_time
from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.runs.records import RunState
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.files import exists
from so_tui.spec.types import RunSpec
from so_tui.trust.decoding import read_json

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writing to a full disk or above a quota."""


def write_state(run: RunDirectory, state: RunState) -> None:
    """Replace ``state.json``. Raises OSError if the disk is full or the folder is gone."""
    write_run_file(run, run.state_path, msgspec.json.encode(state))


def write_state_even_if_full(run: RunDirectory, state: RunState) -> None:
    """Replace ``state.json``. If the disk is full, overwrite the old file, whose block is already allocated.

    Only where the state must be recorded, as at an end: a reader may see a half-written file for a moment and must read again.

    Raises:
        OSError: If writing fails for another reason than a full disk.
    """
    try:
        write_state(run, state)
    except OSError as error:
        if error.errno not in FULL:
            raise
        overwrite(run.state_path, msgspec.json.encode(state))


def overwrite(path: Path, content: bytes) -> None:
    """Overwrite a file in place, padding shorter content with blanks to the old size. Raises OSError."""
    with path.open("r+b") as file:
        file.write(content.ljust(os.fstat(file.fileno()).st_size))


def read_state(run: RunDirectory) -> RunState:
    """Return the recorded state, which ``liveness`` may correct. Raises InputError if it is missing or cannot be read."""
    remedy = "Check that this is the folder of a run."
    state = _read(run.state_path, RunState, "unreadable-state", remedy)
    if not _plausible(state):
        message = f"{run.state_path.name} holds a time or a number that no run can have"
        raise InputError(
            [
                Problem(
                    code="unreadable-state",
                    field="run",
                    value=str(run.path),
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    return state


def _plausible(state: RunState) -> bool:
    """Return whether times can be shown as dates, and counts are in a range to compute with."""
    alerts = state.alerts
    times = (
        state.started,
        state.ended,
        state.attempt_started,
        state.saved_at,
        *(alert.time for alert in alerts),
    )
    counts = (
        state.attempt,
        state.step,
        state.total_steps,
        state.saved_step,
        state.heartbeat,
        *(alert.step for alert in alerts),
    )
    return all(time is None or is_time(time) for time in times) and all(
        count is None or is_count(count) for count in counts
    )


def write_spec(run: RunDirectory, spec: RunSpec) -> None:
    """Replace ``spec.json``. Raises OSError."""
    write_run_file(run, run.spec_path, msgspec.json.format(msgspec.json.encode(spec), indent=1))


def read_spec(run: RunDirectory) -> RunSpec:
    """Return the spec of the run. Raises InputError if ``spec.json`` is missing or malformed."""
    remedy = "The run was written by another version of so-tui, or its folder is damaged."
    return _read(run.spec_path, RunSpec, "unreadable-spec", remedy)


def readable_spec(run: RunDirectory) -> RunSpec | None:
    """Return the spec of the run; None where ``spec.json`` is missing or malformed."""
    try:
        return read_spec(run)
    except InputError:
        return None


def _read(path: Path, kind: type[T], code: str, remedy: str) -> T:
    try:
        return read_json(path, kind)
    except (OSError, msgspec.DecodeError) as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not exists(path.parent):
            code, remedy = "run-gone", "The folder of the run was deleted or moved."
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        message = f"{path.name} cannot be read: {reason}"
        raise InputError(
            [
                Problem(
                    code=code, field="run", value=str(path.parent), message=message, remedy=remedy
                )
            ]
        ) from error
