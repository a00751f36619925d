"""The request to stop: what ``so-tui stop`` writes into ``control/`` and the supervisor reads."""

from __future__ import annotations

import time

import msgspec

from so_tui.runs import control
from so_tui.runs.directory import RunDirectory
from so_tui.spec.files import write_atomic

DEFAULT_GRACE_S = 600.0
"""How long a stop may take: the step in progress, then a checkpoint of possibly hundreds of GB."""


class StopRequest(control.Request, frozen=True, kw_only=True):
    """A stop with a limit, after which the processes are killed."""

    grace_s: float = DEFAULT_GRACE_S


def request_stop(run: RunDirectory, *, grace_s: float = DEFAULT_GRACE_S, reason: str = "") -> None:
    """Ask the run to stop within ``grace_s`` seconds; a later request replaces an earlier one. Raises OSError."""
    control.request(run, "stop", reason=reason)
    asked = control.details(run, "stop")
    bounded = StopRequest(by=asked.by if asked else "", time=time.time(), reason=reason, grace_s=grace_s)
    write_atomic(run.control_dir / "stop", msgspec.json.encode(bounded))


def stop_request(run: RunDirectory) -> StopRequest | None:
    """The pending request; None when there is none."""
    try:
        return msgspec.json.decode((run.control_dir / "stop").read_bytes(), type=StopRequest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError):
        # Unreadable, and yet it is there: it means stop (a person may have made it with `touch`).
        return StopRequest(by="", time=0.0)
