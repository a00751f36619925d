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
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from so_tui.runs.directory import RunDirectory, asked_run, write_run_json
from so_tui.runs.records import RunState
from so_tui.spec.check import exists
from so_tui.spec.errors import InputError, reject
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.decoding import LARGEST_FILE_BYTES, decode_json, prepare, readable_json
from so_tui.trust.files import Distrust, read_judged

# Requests of users to a run: small files in ``control/`` that rank 0 checks between steps.


Action = Literal["stop", "checkpoint"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class Request(Struct, frozen=True, kw_only=True):
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
    by = f"{_user()}@{socket.gethostname()} pid {os.getpid()}"
    asked = kind(by=by, time=time.time(), **given)
    with asked_run(run) as own:
        before = None if asked.by_a_person else details(own, action)
        if before is not None and not (before.warned or (asked.signalled and before.signalled)):
            return
        own.control_dir.mkdir(exist_ok=True)
        write_run_json(own, own.control_dir / action, asked)


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


# What ranks report before they give up.


class Failure(Struct, frozen=True, kw_only=True):
    """Why a rank failed: ``failure.rank<R>.json`` in the attempt's folder."""

    rank: int
    code: str = ""
    """What happened, in kebab-case: ``gpu-out-of-memory``. For wrong input it is the code of the
    first problem. Empty in files of older versions.
    """
    reason: str
    suggestion: str = ""
    step: int = 0


def report_failure(run: RunDirectory, attempt: int, failure: Failure) -> None:
    """Write a failure where rank 0 and the supervisor find it. Raises OSError."""
    write_run_json(run, run.attempt_dir(attempt) / f"failure.rank{failure.rank}.json", failure)


def failures(run: RunDirectory, attempt: int) -> tuple[Failure, ...]:
    """Return what the ranks reported, the earliest first; later failures are mostly its
    consequences. Leaves out what cannot be read: a rank was killed while it wrote, say.
    """
    found: list[tuple[int, int, Failure]] = []
    with suppress(OSError):  # the file system may be away, and the run must be concluded
        for file in run.attempt_dir(attempt).glob("failure.rank*.json"):
            with suppress(OSError):
                if failure := readable_json(file, Failure):
                    found.append((file.stat().st_mtime_ns, failure.rank, failure))
    return tuple(failure for *_, failure in sorted(found, key=lambda item: item[:2]))


T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writing to a full disk or above a quota."""


def write_state(run: RunDirectory, state: RunState) -> None:
    """Replace ``state.json``. Raises OSError if the disk is full or the folder is gone."""
    write_run_json(run, run.state_path, state)


def write_state_even_if_full(run: RunDirectory, state: RunState) -> None:
    """Replace ``state.json`` where it must be recorded, as at an end: as ``write_even_if_full``."""
    write_even_if_full(run, run.state_path, state)


def write_even_if_full(run: RunDirectory, path: Path, value: Struct) -> None:
    """Replace a file of a run by a value as JSON. If the disk is full, overwrite the old one, whose
    block is already allocated: a reader may see a half-written file for a moment and must read
    again.

    Raises:
        OSError: If writing fails for another reason than a full disk.
    """
    try:
        write_run_json(run, path, value)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _overwrite(path, msgspec.json.encode(value))


def overwrite_state(run: RunDirectory, state: RunState) -> None:
    """Write the state over the old one, on a full disk, in the blocks that it has already.

    Raises:
        OSError: It is too long for them, and the old one is still there.
    """
    content = msgspec.json.encode(state)
    found = run.state_path.stat()
    if len(content) > max(found.st_size, 512 * found.st_blocks):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.state_path))
    _overwrite(run.state_path, content)


def _overwrite(path: Path, content: bytes) -> None:
    """Overwrite a file in place, padding shorter content with blanks to the old size. Raises
    OSError.
    """
    with path.open("r+b") as file:
        file.write(content.ljust(os.fstat(file.fileno()).st_size))


def read_state(run: RunDirectory) -> RunState:
    """Return the recorded state, which ``liveness`` may correct. Raises InputError if it is missing
    or cannot be read.
    """
    remedy = "Check that this is the folder of a run."
    return _read(run, run.state_path, RunState, "unreadable-state", remedy)[0]


def write_spec(run: RunDirectory, spec: RunSpec) -> None:
    """Replace ``spec.json``. Raises OSError."""
    write_run_json(run, run.spec_path, spec, indented=True)


def read_spec(run: RunDirectory) -> RunSpec:
    """Return the spec of the run. In a file that others own or can write,
    ``model.trust_remote_code`` counts as false.

    Raises:
        InputError: ``spec.json`` is missing or malformed.
    """
    remedy = "The run was written by another version of so-tui, or its folder is damaged."
    spec, distrust = _read(run, run.spec_path, RunSpec, "unreadable-spec", remedy)
    return spec if distrust is None else spec.changed("model", trust_remote_code=False)


def readable_spec(run: RunDirectory) -> RunSpec | None:
    """Return the spec of the run; None where ``spec.json`` is missing or malformed."""
    try:
        return read_spec(run)
    except InputError:
        return None


def _read(
    run: RunDirectory, path: Path, kind: type[T], code: str, remedy: str
) -> tuple[T, Distrust | None]:
    """Return the content of a file, and why it is not this user's own; None if it is."""
    try:
        content, distrust = read_judged(path, LARGEST_FILE_BYTES)
        return decode_json(content, kind), distrust
    except (OSError, msgspec.DecodeError) as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not exists(path.parent):
            code, remedy = "run-gone", "The folder of the run was deleted or moved."
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise reject(
            code, "run", str(run.path), f"{path.name} cannot be read: {reason}", remedy
        ) from error
