"""Whether a supervisor may act for an attempt: start it with the starter's token, or attach to its living processes.

Problem codes:
    no-such-attempt, unreadable-attempt: The attempt was never made, or its files are damaged.
    not-started-by-hand: There is no token, and the attempt has never been started.
    wrong-starter-token: The token was made for another attempt.
    attempt-already-started: The attempt has a state, or a later one was started first.
    not-this-host: The attempt runs on another host.
    no-living-process: Every process of the attempt has ended, so there is nothing to supervise.
"""

from __future__ import annotations

from so_tui.launch.marker import markers
from so_tui.launch.processes import OwnProcesses
from so_tui.launch.starter import may_start
from so_tui.runs.directory import RunDirectory
from so_tui.runs.host import host_of, sees_processes_of, this_host
from so_tui.runs.own import refuse_unless_own
from so_tui.runs.records import RunState
from so_tui.spec import InputError, Problem
from so_tui.trust.ownership import Distrust, distrust_of_file


def refuse_unknown_attempt(run: RunDirectory, attempt: int) -> None:
    """Refuse an attempt that was never made, or whose run is not this user's own.

    Raises:
        InputError, Refused: With the codes of this module and of ``so_tui.runs.own``.
    """
    if attempt < 1 or distrust_of_file(run.plan_path(attempt)) is Distrust.MISSING:
        raise _refused(
            "no-such-attempt",
            attempt,
            f"{run.path} has no such attempt",
            "`so-tui resume` makes the next one.",
        )
    refuse_unless_own(run, attempt)


def refuse_start(run: RunDirectory, attempt: int, state: RunState, token: str) -> None:
    """Refuse to start an attempt without its own token, or a second time.

    Raises:
        InputError: With the codes of this module.
    """
    refuse_wrong_token(run, attempt, token)
    if state.attempt >= attempt:
        raise _refused(
            "attempt-already-started",
            attempt,
            f"attempt {state.attempt} of the run was started already",
            _BY_COMMAND,
        )


def refuse_wrong_token(run: RunDirectory, attempt: int, token: str) -> None:
    """Refuse to start an attempt without its own token. Raises InputError with a code of this module."""
    if not may_start(run, attempt, token):
        raise _refused(
            "wrong-starter-token",
            attempt,
            "the starter's token was made for another attempt",
            _BY_COMMAND,
        )


def refuse_attaching(run: RunDirectory, attempt: int, state: RunState) -> None:
    """Refuse to attach to an attempt that has no living process of this user here.

    Raises:
        InputError: With the codes of this module.
    """
    if state.attempt != attempt:
        raise _refused(
            "not-started-by-hand",
            attempt,
            "the attempt is not running, and only its starter can start it",
            _BY_COMMAND,
        )
    if not sees_processes_of(this_host(), host_of(state)):
        raise _refused(
            "not-this-host",
            attempt,
            f"the attempt runs on {state.host or 'no host'}",
            "Supervise it there.",
        )
    if not OwnProcesses().carry(markers(run, attempt)):
        raise _refused(
            "no-living-process", attempt, "every process of the attempt has ended", _BY_COMMAND
        )


_BY_COMMAND = "`so-tui run` and `so-tui resume` start attempts, each with a supervisor of its own."


def _refused(code: str, attempt: int, message: str, remedy: str) -> InputError:
    return InputError(
        [Problem(code=code, field="--attempt", value=str(attempt), message=message, remedy=remedy)]
    )
