"""What may be done only to a run that has ended: resuming and deleting it.

Problem codes:
    run-is-live: It still runs, as its processes show.
    run-may-be-live: Its host cannot be asked, and its last sign of life is not old enough, or its lock is still held. The user may say
        that it has ended.
"""

from __future__ import annotations

from so_tui.runs.directory import RunDirectory
from so_tui.runs.liveness import FRESH_S, OLD_S, STALE_S, Sighting, sighting, state_with_truth
from so_tui.runs.own import refuse_another_users
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.run_lock import run_lock
from so_tui.runs.state import read_state, write_state_even_if_full
from so_tui.runs.unobserved import concluded
from so_tui.spec.errors import InputError, Problem
from so_tui.trust.printable import printable_line, so_tui_command
from so_tui.units import duration


def ended_state(run: RunDirectory, *, assume_dead: bool = False) -> RunState:
    """Return the final state of a run.

    Args:
        run: The run.
        assume_dead: Take the user's word that it has ended, where its processes cannot be seen from here.

    Raises:
        InputError: It is live, or may be (codes of this module).
    """
    state = state_with_truth(run)
    if state.state in FINAL_STATES:
        return state
    seen = sighting(run, state)
    if seen.by_processes:
        remedy = f"Watch it with `{so_tui_command('watch', run.name)}`, or stop it first with `{so_tui_command('stop', run.name)}`."
        raise _refused("run-is-live", run, f"is still running ({state.state})", remedy)
    if assume_dead:
        return concluded(run, state)
    remedy = f"It counts as lost {duration(OLD_S)} after its last sign of life. If you know that it has ended, add --assume-dead."
    raise _refused("run-may-be-live", run, evidence(state, seen), remedy)


def record_end(run: RunDirectory) -> RunState:
    """Record that a run has ended, by the user's word, and return its final state. From then on it is final on every host.

    Raises:
        Refused: It is another user's.
        InputError: It is live here, or has a living supervisor elsewhere (code ``run-is-live``).
        OSError: Its folder cannot be written.
    """
    refuse_another_users(run)
    ended_state(
        run, assume_dead=True
    )  # before the lock is taken from a supervisor that lives here and has only been silent
    with run_lock(run, assume_dead=True) as lock:
        if lock is None:
            raise lock_held(run, assume_dead=True)
        state = ended_state(run, assume_dead=True)
        write_state_even_if_full(run, state)
    return state


def lock_held(run: RunDirectory, *, assume_dead: bool) -> InputError:
    """Return the refusal of a run whose lock another process holds; ``assume_dead`` if the user's word was not enough."""
    state = read_state(run)
    seen = sighting(run, state)
    if seen.by_processes:
        return _refused(
            "run-is-live",
            run,
            "has a living supervisor",
            f"Stop it first: `{so_tui_command('stop', run.name)}`.",
        )
    message = f"{evidence(state, seen)}; its supervisor's lock is held"
    if assume_dead:
        remedy = f"If it has ended, it can be taken over {duration(STALE_S)} after its last sign of life. Try again then."
        return _refused("run-is-live", run, message, remedy)
    return _refused(
        "run-may-be-live", run, message, "If you know that it has ended, add --assume-dead."
    )


def evidence(state: RunState, seen: Sighting) -> str:
    """Return what was seen of a run whose processes cannot be examined from here, as a clause."""
    host = printable_line(seen.host)
    age = _age(seen.heartbeat_age_s)
    if seen.restarted:
        return f"was {state.state} on {host} before that host restarted{age}"
    return f"is {state.state} on {host}, whose processes cannot be seen from here{age}"


def _age(age_s: float | None) -> str:
    if age_s is None:
        return ""
    if age_s < -FRESH_S:
        return f", and its last sign of life is dated {duration(-age_s)} ahead of this file system's clock"
    return f", and its last sign of life was {duration(max(0.0, age_s))} ago"


def _refused(code: str, run: RunDirectory, message: str, remedy: str) -> InputError:
    return InputError(
        [Problem(code=code, field="run", value=run.name, message=message, remedy=remedy)]
    )
