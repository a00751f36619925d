"""Delete runs.

Problem and refusal codes:
    run-is-live, run-may-be-live, not-your-run: see ``ended`` and ``own``.
    not-deletable: The run directory, or a part of it, cannot be deleted.
"""

from __future__ import annotations

from so_tui.runs.directory import RunDirectory
from so_tui.runs.ended import ended_state, lock_held
from so_tui.runs.host import host_of, sees_processes_of, this_host
from so_tui.runs.leftovers import remove_leftovers
from so_tui.runs.listing import DELETED
from so_tui.runs.own import refuse_another_users
from so_tui.runs.records import RunState
from so_tui.runs.run_lock import run_lock
from so_tui.runs.state import read_state
from so_tui.spec.errors import InputError, Problem
from so_tui.trust.printable import printable_line


def delete_run(run: RunDirectory, *, assume_dead: bool = False) -> None:
    """Delete a run that has ended, with the checkpoints in its folder. Checkpoints in other folders stay.

    The supervisor's lock is held meanwhile, so no attempt can begin between the check and the deletion.

    Args:
        run: The run.
        assume_dead: Take the user's word that it has ended, where its processes cannot be seen from here.

    Raises:
        Refused: It is another user's.
        InputError: It is live or may be, its folder is not a run, or it cannot be deleted.
    """
    refuse_another_users(run)
    try:
        _ended(run, assume_dead)
        with run_lock(run, assume_dead=assume_dead) as lock:
            if lock is None:
                raise lock_held(run, assume_dead=assume_dead)
            state = _ended(run, assume_dead)
            _remove(run)
        if sees_processes_of(this_host(), host_of(state)):
            remove_leftovers(state.processes)
    except OSError as error:
        message, remedy = f"cannot be deleted: {error.strerror}", "Check the owner of its folder."
        raise InputError(
            [
                Problem(
                    code="not-deletable",
                    field="run",
                    value=str(run.path),
                    message=message,
                    remedy=remedy,
                )
            ]
        ) from error


def _ended(run: RunDirectory, assume_dead: bool) -> RunState:
    """Return the final state of a run, or that of one of which nothing was ever started. Raises InputError if it lives or is queued."""
    state = read_state(run)
    return state if state.state == "created" else ended_state(run, assume_dead=assume_dead)


def _remove(run: RunDirectory) -> None:
    import shutil  # imports every compression module, which listing runs does not need

    hidden = run.path.with_name(f".{run.name}{DELETED}")
    run.path.rename(hidden)  # hides the run from readers immediately; deleting may take long
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        message = f"is what is left of the run {printable_line(run.name)}, which is no longer listed: {error.strerror}"
        remedy = "Remove this folder once nobody uses a file in it."
        raise InputError(
            [
                Problem(
                    code="not-deletable",
                    field="run",
                    value=str(hidden),
                    message=message,
                    remedy=remedy,
                )
            ]
        ) from error
