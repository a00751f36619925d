"""How a run is ended: the user's request to stop, and when its processes are terminated and killed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import msgspec

from so_tui.launch.time_limits import DEFAULT_GRACE_S, EXIT_GRACE_S, KILL_AFTER_S
from so_tui.runs import control
from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.trust.decoding import read_json

KillAction = Literal["wait", "terminate", "kill"]


class StopRequest(control.Request, frozen=True, kw_only=True):
    """A stop with a time limit, after which the processes are killed. ``so-tui stop`` writes it, the supervisor reads it."""

    grace_s: float = DEFAULT_GRACE_S


def request_stop(
    run: RunDirectory,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    reason: str = "",
    warned: bool = False,
    signalled: bool = False,
) -> None:
    """Ask the run to stop within ``grace_s`` seconds. A later request replaces an earlier one.

    Args:
        run: The run.
        grace_s: After how many seconds it is killed.
        reason: Why, in words.
        warned: A scheduler's warning asks.
        signalled: A signal to a supervisor asks.

    Raises:
        OSError: The run directory cannot be written.
    """
    control.request(run, "stop", reason=reason, warned=warned, signalled=signalled)
    asked = control.details(run, "stop")
    if asked is not None and (asked.warned, asked.signalled) != (warned, signalled):
        return  # a person's request stays
    bounded = StopRequest(
        by=asked.by if asked else "",
        time=time.time(),
        reason=reason,
        grace_s=grace_s,
        warned=warned,
        signalled=signalled,
    )
    write_run_file(run, run.control_dir / "stop", msgspec.json.encode(bounded))


def stop_request(run: RunDirectory) -> StopRequest | None:
    """Return the pending request, or None."""
    try:
        return read_json(run.control_dir / "stop", StopRequest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError):
        # The file exists, so a stop is wanted: a person may have made it with `touch`.
        return StopRequest(by="", time=0.0)


@dataclass
class Shutdown:
    """Decides when an attempt's processes are terminated and killed. Pure: all times are passed in (seconds, monotonic)."""

    ended_at: float | None = None
    """When the trainer's end record was seen."""
    broken_at: float | None = None
    """When the runner or the launcher was lost before that, or the launcher gave up because a rank failed."""
    overdue_at: float | None = None
    """When a requested stop must have been carried out."""
    terminated_at: float | None = None
    _stop: tuple[StopRequest, int | None] | None = None
    """The stop that is pending, and the last checkpoint when its time was given."""

    def stop(self, asked: StopRequest, saved_step: int | None, now: float) -> None:
        """Give a requested stop its time.

        A stop may have to wait for the checkpoint that is being written before it writes the last one. With the default grace, each one
        that completes gives it the whole time anew.

        Args:
            asked: The request.
            saved_step: The step of the newest checkpoint.
            now: The time.
        """
        known = asked, saved_step if asked.grace_s == DEFAULT_GRACE_S else None
        if known != self._stop:
            self._stop, self.overdue_at = known, now + asked.grace_s

    def next_action(self, now: float) -> KillAction:
        """Return what to do to the processes now. The caller does it."""
        if self.terminated_at is not None:
            return "kill" if now >= self.terminated_at + KILL_AFTER_S else "wait"
        if self._due(now):
            self.terminated_at = now
            return "terminate"
        return "wait"

    def stop_overdue(self, now: float) -> bool:
        """Return whether a requested stop was not carried out in time."""
        return self.ended_at is None and self.overdue_at is not None and now >= self.overdue_at

    def _due(self, now: float) -> bool:
        if self.ended_at is not None:
            return now >= self.ended_at + EXIT_GRACE_S
        return self.broken_at is not None or self.stop_overdue(now)
