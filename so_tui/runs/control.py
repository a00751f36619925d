"""Requests of users to a run: small files in ``control/`` that rank 0 checks between steps."""

from __future__ import annotations

import getpass
import os
import socket
import time
from typing import Literal, get_args

import msgspec

from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.runs.own import refuse_another_users
from so_tui.spec.files import exists
from so_tui.structs import prepare
from so_tui.trust.decoding import read_json

Action = Literal["stop", "checkpoint"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Author, time and reason of a request."""

    by: str
    time: float
    reason: str = ""
    warned: bool = False
    """Whether a scheduler's warning asks, before it ends the job, and no person: then another job may continue."""
    signalled: bool = False
    """Whether a signal to a supervisor asks, as of a scheduler that ends a job: only that job itself may continue, if it starts again."""


prepare(Request)


def request(
    run: RunDirectory,
    action: Action,
    *,
    reason: str = "",
    warned: bool = False,
    signalled: bool = False,
) -> None:
    """Ask the run to stop (with a checkpoint) or to save a checkpoint. Neither a warning nor a signal replaces a person's request.

    Raises:
        Refused: It is another user's run (code ``not-your-run``).
        OSError: The folder cannot be written.
    """
    refuse_another_users(run)
    if (
        (warned or signalled)
        and (before := details(run, action)) is not None
        and not (before.warned or (signalled and before.signalled))
    ):
        return
    run.control_dir.mkdir(exist_ok=True)
    asked = Request(
        by=f"{_user()}@{socket.gethostname()} pid {os.getpid()}",
        time=time.time(),
        reason=reason,
        warned=warned,
        signalled=signalled,
    )
    write_run_file(run, run.control_dir / action, msgspec.json.encode(asked))


def pending(run: RunDirectory) -> frozenset[Action]:
    """Return the requests that are not cleared yet; none while the file system is away. Cheap, because rank 0 calls it after every step."""
    return frozenset(action for action in ACTIONS if exists(run.control_dir / action))


def details(run: RunDirectory, action: Action) -> Request | None:
    """Return who asked for an action; None if nobody did or the file cannot be read."""
    try:
        return read_json(run.control_dir / action, Request)
    except (OSError, msgspec.DecodeError):
        return None


def clear(run: RunDirectory, action: Action) -> None:
    """Remove a request that was carried out or belongs to an earlier attempt. Raises OSError if the folder cannot be written."""
    (run.control_dir / action).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose uid has no name
        return str(os.getuid())
