"""The starter's token: what lets a supervisor start an attempt.

``start`` and ``resume`` make a token for each attempt and pass it in the supervisor's environment, also through a scheduler. The attempt's
folder holds only a keyed hash of its number, so a folder that was copied, unpacked or written by somebody else starts nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import MutableMapping

import msgspec
from msgspec import Struct

from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.trust.decoding import decode_json
from so_tui.trust.reading import read_bounded

TOKEN_VARIABLE = "SO_TUI_STARTER_TOKEN"
"""Passes the token from ``start`` to the supervisor; never in an argument list, which every user of the host can read."""

_TOKEN_BYTES = 32
_LARGEST_BYTES = 4096


class Starter(Struct, frozen=True, kw_only=True):
    """``starter.json``: what the token of an attempt is checked against."""

    v: int = 1
    sha256: str
    """HMAC-SHA256 of the attempt's number, with the token as its key."""


def new_token() -> str:
    """Return a token that nobody can guess."""
    return os.urandom(_TOKEN_BYTES).hex()


def record_token(run: RunDirectory, attempt: int, token: str) -> None:
    """Let this token start an attempt. Raises OSError if the attempt's folder cannot be written."""
    write_run_file(
        run,
        run.starter_path(attempt),
        msgspec.json.encode(Starter(sha256=_keyed_hash(token, attempt))),
    )


def may_start(run: RunDirectory, attempt: int, token: str) -> bool:
    """Return whether a token was made for this attempt."""
    try:
        recorded = decode_json(read_bounded(run.starter_path(attempt), _LARGEST_BYTES), Starter)
    except (OSError, msgspec.DecodeError):
        return False
    return hmac.compare_digest(recorded.sha256.encode(), _keyed_hash(token, attempt).encode())


def take_token(environ: MutableMapping[str, str]) -> str | None:
    """Remove the token from an environment, so that no process started with it inherits the token, and return it."""
    return environ.pop(TOKEN_VARIABLE, None)


def _keyed_hash(token: str, attempt: int) -> str:
    return hmac.new(token.encode(), str(attempt).encode(), hashlib.sha256).hexdigest()
