"""Read and write ``state.json`` and ``spec.json``: whole files, replaced atomically.

Problem codes:
    run-gone: The folder of the run does not exist any more.
    unreadable-state, unreadable-spec: ``state.json`` or ``spec.json`` is missing or malformed.
"""

from __future__ import annotations

import errno
import getpass
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from so_tui.runs.directory import RunDirectory, refuse_another_users, write_run_json
from so_tui.runs.records import RunState
from so_tui.spec.check import exists
from so_tui.spec.errors import InputError, reject
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.decoding import prepare, read_json, readable_json

# Requests of users to a run: small files in ``control/`` that rank 0 checks between steps.


Action = Literal["stop", "checkpoint"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Author, time and reason of a request."""

    by: str
    time: float
    reason: str = ""
    warned: bool = False
    """Whether a scheduler's warning asks, before it ends the job, and no person: then another job
    may continue.
    """
    signalled: bool = False
    """Whether a signal to a supervisor asks, as of a scheduler that ends a job: only that job
    itself may continue, if it starts again.
    """

    @property
    def by_a_person(self) -> bool:
        """Whether neither a scheduler nor a signal asks."""
        return not self.warned and not self.signalled


prepare(Request)


def request(run: RunDirectory, action: Action, kind: type[Request] = Request, **given: Any) -> None:
    """Ask the run to stop (with a checkpoint) or to save a checkpoint. Neither a warning nor a
    signal replaces a person's request, and a warning no signal's.

    Args:
        run: The run.
        action: What to do.
        kind: The type of the request.
        given: Its fields but author and time.

    Raises:
        Refused: It is another user's run (code ``not-your-run``).
        OSError: The folder cannot be written.
    """
    refuse_another_users(run)
    by = f"{_user()}@{socket.gethostname()} pid {os.getpid()}"
    asked = kind(by=by, time=time.time(), **given)
    before = None if asked.by_a_person else details(run, action)
    if before is not None and not (before.warned or (asked.signalled and before.signalled)):
        return
    run.control_dir.mkdir(exist_ok=True)
    write_run_json(run, run.control_dir / action, asked)


def pending(run: RunDirectory) -> frozenset[Action]:
    """Return the requests that are not cleared yet; none while the file system is away. Cheap,
    because rank 0 calls it after every step.
    """
    return frozenset(action for action in ACTIONS if exists(run.control_dir / action))


def details(run: RunDirectory, action: Action) -> Request | None:
    """Return who asked for an action; None if nobody did or the file cannot be read."""
    return readable_json(run.control_dir / action, Request)


def clear(run: RunDirectory, action: Action) -> None:
    """Remove a request that was carried out or belongs to an earlier attempt. Raises OSError if the
    folder cannot be written.
    """
    (run.control_dir / action).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose uid has no name
        return str(os.getuid())


T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writing to a full disk or above a quota."""


def write_state(run: RunDirectory, state: RunState) -> None:
    """Replace ``state.json``. Raises OSError if the disk is full or the folder is gone."""
    write_run_json(run, run.state_path, state)


def write_state_even_if_full(run: RunDirectory, state: RunState) -> None:
    """Replace ``state.json``. If the disk is full, overwrite the old file, whose block is already
    allocated.

    Only where the state must be recorded, as at an end: a reader may see a half-written file for a
    moment and must read again.

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
    """Overwrite a file in place, padding shorter content with blanks to the old size. Raises
    OSError.
    """
    with path.open("r+b") as file:
        file.write(content.ljust(os.fstat(file.fileno()).st_size))


def read_state(run: RunDirectory) -> RunState:
    """Return the recorded state, which ``liveness`` may correct. Raises InputError if it is missing
    or cannot be read.
    """
    return _read(
        run.state_path, RunState, "unreadable-state", "Check that this is the folder of a run."
    )


def write_spec(run: RunDirectory, spec: RunSpec) -> None:
    """Replace ``spec.json``. Raises OSError."""
    write_run_json(run, run.spec_path, spec, indented=True)


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
        raise reject(
            code, "run", str(path.parent), f"{path.name} cannot be read: {reason}", remedy
        ) from error
