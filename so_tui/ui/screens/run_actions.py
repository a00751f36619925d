"""What can be done to a run, the same on the Dashboard and in the list of runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from so_tui.runs import RunDirectory, control, delete_run, read_spec
from so_tui.runs.ended import evidence, record_end
from so_tui.runs.liveness import Liveness, sighting
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.spec import InputError, Refused, SoTuiError
from so_tui.trust.printable import brief_message, quoted
from so_tui.ui import messages
from so_tui.ui.text import plural
from so_tui.units import thousands

if TYPE_CHECKING:
    from so_tui.ui.shared_app import SharedApp

RESUMABLE = frozenset({"stopped", "failed", "lost"})


class Change(Protocol):
    """Changes a run, unless its processes may live where they cannot be seen and the user does not say that they have ended."""

    def __call__(self, run: RunDirectory, *, assume_dead: bool) -> object: ...


def ask_to_stop(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to stop ``run``, and have it stopped."""
    from so_tui.ui.dialogs.basic import Question

    state = _state(app, run)
    if state is None:
        return
    if state.state in FINAL_STATES:
        app.notify(f"{run.name} has already ended: {state.state}", markup=False)
        return
    if state.state == "queued":
        _ask_to_leave_the_queue(app, run, state)
        return
    seen = sighting(run, state)
    if seen.liveness is Liveness.UNKNOWN:
        ask_whether_ended(
            app,
            run,
            f"{run.name} {evidence(state, seen)}.",
            partial(_change, app, run, _record_end, "stopped", "record the end of a run"),
        )
        return
    lines = [
        f"It is at step {thousands(state.step)} of {thousands(state.total_steps)}.",
        "It finishes the current step and ends. Unless the preset says otherwise, it saves a checkpoint to resume from.",
    ]

    def answered(yes: bool | None) -> None:
        if yes:
            _request(app, run, "stop", "Stopping after this step")

    app.push_screen(Question(f"Stop {run.name}?", lines, yes="Stop", no="Keep running"), answered)


def _ask_to_leave_the_queue(app: SharedApp, run: RunDirectory, state: RunState) -> None:
    from so_tui.ui.dialogs.basic import Question

    def answered(yes: bool | None) -> None:
        if yes:
            _change(app, run, _leave_queue, "cancelled", "take a run out of the queue")

    lines = [
        brief_message(state.detail) or "It waits in the queue.",
        "Nothing of it has run yet." if not state.attempt else "",
    ]
    app.push_screen(
        Question(
            f"Cancel {run.name}?",
            [line for line in lines if line],
            yes="Cancel it",
            no="Keep waiting",
        ),
        answered,
    )


def _leave_queue(run: RunDirectory, *, assume_dead: bool) -> None:
    from so_tui.launch import stop

    stop(run, assume_dead=assume_dead)


def _record_end(run: RunDirectory, *, assume_dead: bool) -> None:
    record_end(run)  # by the user's word, which was asked for already


def ask_to_delete(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to delete ``run`` with its folder, and delete it."""
    from so_tui.ui.dialogs.basic import Question

    def answered(yes: bool | None) -> None:
        if yes:
            _change(app, run, delete_run, "deleted", "delete a run")

    lines = [str(run.path), "Its metrics, log and the checkpoints inside this folder will be lost."]
    app.push_screen(
        Question(f"Delete {run.name}?", lines, yes="Delete", no="No, keep it"), answered
    )


def ask_whether_ended(
    app: SharedApp, run: RunDirectory, seen: str, proceed: Callable[[], object]
) -> None:
    """Ask whether a run has ended whose processes cannot be seen from here, and proceed if the user says so.

    Args:
        app: The application.
        run: The run.
        seen: What was seen of it.
        proceed: What to do then.
    """
    from so_tui.ui.dialogs.basic import Question

    lines = [
        seen,
        "If it still runs, two attempts may write the same checkpoints. Say yes only if you know that its host is down or restarted.",
    ]

    def answered(yes: bool | None) -> None:
        if yes:
            proceed()

    app.push_screen(
        Question(f"Has {run.name} ended?", lines, yes="It has ended", no="I do not know"), answered
    )


def may_be_live(error: SoTuiError) -> bool:
    """Return whether something was refused only because the run's host cannot be asked."""
    return isinstance(error, InputError) and any(
        problem.code == "run-may-be-live" for problem in error.problems
    )


def _change(
    app: SharedApp,
    run: RunDirectory,
    change: Change,
    done: str,
    name: str,
    *,
    assume_dead: bool = False,
) -> None:
    """Change a run in a thread, and say so where it was not done. Where its processes cannot be seen from here, the user is asked first.

    Args:
        app: The application.
        run: The run.
        change: What is done to it.
        done: What the run is then, such as ``deleted``.
        name: What is being done, for the user where it fails unexpectedly.
        assume_dead: The user says that the run has ended.
    """

    def work() -> None:
        try:
            change(run, assume_dead=assume_dead)
        except SoTuiError as error:
            if may_be_live(error):
                anyway = partial(_change, app, run, change, done, name, assume_dead=True)
                app.call_from_thread(ask_whether_ended, app, run, str(error), anyway)
                return
            app.post_message(
                messages.Failed(f"{run.name} was not {done}", tuple(str(error).splitlines()))
            )
        except OSError as error:
            where = error.filename or run.path
            app.post_message(
                messages.Failed(f"{run.name} could not be {done}", (f"{where}: {error.strerror}",))
            )
        app.call_from_thread(app.list_runs)

    app.run_worker(work, thread=True, group="request", name=name, exit_on_error=False)


def save_checkpoint(app: SharedApp, run: RunDirectory) -> None:
    """Have ``run`` save a checkpoint after its current step."""
    _request(app, run, "checkpoint", "Saving a checkpoint after this step")


def _request(app: SharedApp, run: RunDirectory, action: control.Action, confirmation: str) -> None:
    work = partial(_leave_request, app, run, action, confirmation)
    app.run_worker(
        work, thread=True, group="request", name="send a request to the run", exit_on_error=False
    )


def _leave_request(
    app: SharedApp, run: RunDirectory, action: control.Action, confirmation: str
) -> None:
    """Write a request into the run's folder, where rank 0 looks for it between steps. Runs in a thread."""
    from so_tui.launch import ensure_supervised

    try:
        control.request(run, action, reason="asked on the screen")
    except SoTuiError as error:  # another user's run
        app.post_message(
            messages.Failed(f"{run.name} was not asked", tuple(str(error).splitlines()))
        )
        return
    except OSError as error:
        app.post_message(
            messages.Failed(
                f"{run.name} could not be asked", (f"{run.control_dir}: {error.strerror}",)
            )
        )
        return
    ensure_supervised(run)
    app.call_from_thread(app.notify, confirmation, markup=False)


def ask_to_resume(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to resume ``run`` from its last checkpoint, and start another attempt."""
    from so_tui.launch.executors import executor_of
    from so_tui.ui.dialogs.basic import Question

    state = _state(app, run)
    if state is None:
        return
    seen = sighting(run, state)
    if state.state not in FINAL_STATES and seen.liveness is Liveness.UNKNOWN:
        ask_whether_ended(
            app,
            run,
            f"{run.name} {evidence(state, seen)}.",
            partial(_start_resume, app, run, assume_dead=True),
        )
        return
    if state.state not in FINAL_STATES:
        app.notify(f"{run.name} is live: {state.state}", markup=False)
        return
    try:
        place = "on this machine" if executor_of(read_spec(run)).here else "in a new job"
    except InputError as error:
        app.post_message(
            messages.Failed(f"{run.name} cannot be resumed", tuple(map(str, error.problems)))
        )
        return
    saved = (
        f"step {thousands(state.saved_step)}"
        if state.saved_step is not None
        else "the beginning: nothing was saved"
    )

    def answered(yes: bool | None) -> None:
        if yes:
            _start_resume(app, run)

    lines = [f"It continues from {saved}, {place}."]
    app.push_screen(
        Question(f"Resume {run.name}?", lines, yes="Resume", default_yes=True), answered
    )


def _start_resume(
    app: SharedApp, run: RunDirectory, *, start_over: bool = False, assume_dead: bool = False
) -> None:
    if app.may_start():
        app.starting = run.name
        work = partial(_resume, app, run, start_over=start_over, assume_dead=assume_dead)
        app.run_worker(work, thread=True, group="launch", name="resume", exit_on_error=False)


def _ask_to_start_over(
    app: SharedApp, run: RunDirectory, error: Refused, *, assume_dead: bool
) -> None:
    """Ask whether to train from step 0, because what the run saved is not there."""
    from so_tui.ui.dialogs.basic import Question

    def answered(yes: bool | None) -> None:
        if yes:
            _start_resume(app, run, start_over=True, assume_dead=assume_dead)

    app.starting = ""
    app.push_screen(
        Question(f"Train {run.name} from step 0 again?", list(error.reasons), yes="Start over"),
        answered,
    )


def _ask_to_resume_anyway(
    app: SharedApp, run: RunDirectory, error: SoTuiError, *, start_over: bool
) -> None:
    app.starting = ""
    ask_whether_ended(
        app,
        run,
        str(error),
        partial(_start_resume, app, run, start_over=start_over, assume_dead=True),
    )


def _resume(app: SharedApp, run: RunDirectory, *, start_over: bool, assume_dead: bool) -> None:
    """Start another attempt of ``run`` where its spec says. Runs in a thread."""
    from so_tui.launch import machine_of, prepare_resume, resume

    try:
        resume(
            run,
            prepare_resume(
                run, machine_of(read_spec(run)), start_over=start_over, assume_dead=assume_dead
            ),
        )
    except SoTuiError as error:
        if may_be_live(error):
            app.call_from_thread(_ask_to_resume_anyway, app, run, error, start_over=start_over)
            return
        if isinstance(error, Refused) and "checkpoint-missing" in error.codes:
            app.call_from_thread(_ask_to_start_over, app, run, error, assume_dead=assume_dead)
            return
        app.post_message(
            messages.Failed(f"{run.name} was not resumed", tuple(str(error).splitlines()))
        )
    else:
        app.post_message(messages.Launched(run))


def show_settings(app: SharedApp, run: RunDirectory) -> None:
    """Show every setting of ``run`` that is not the default."""
    from so_tui.spec import spec_tree
    from so_tui.ui.dialogs.basic import Notice
    from so_tui.ui.form import flat, text_of

    try:
        spec = read_spec(run)
    except InputError as error:
        app.post_message(
            messages.Failed(
                f"The settings of {run.name} cannot be read", tuple(map(str, error.problems))
            )
        )
        return
    lines = [f"{path} = {text_of(value)}" for path, value in flat(spec_tree(spec, full=False))]
    app.push_screen(
        Notice(
            f"{run.name}: {plural(len(lines), 'setting')} that are not the default",
            ["\n".join(lines)],
            bad=False,
        )
    )


def copy_path(app: SharedApp, run: RunDirectory) -> None:
    """Copy the path of the run directory to the clipboard."""
    app.copy_to_clipboard(quoted(str(run.path)))
    app.notify(f"Copied {run.path}", markup=False)


def chat(app: SharedApp, run: RunDirectory) -> None:
    """Open a conversation with the last checkpoint of ``run``, and with its base model if it has one."""
    from so_tui.spec.generation import LoadModel

    try:
        compare = read_spec(run).model.weights == "pretrained"
    except InputError as error:
        app.post_message(
            messages.Failed(f"{run.name} cannot be asked", tuple(map(str, error.problems)))
        )
    else:
        app.open_chat(LoadModel(run=str(run.path), compare=compare))


def _state(app: SharedApp, run: RunDirectory) -> RunState | None:
    """Return the state of ``run``; report it and return None where it cannot be read, as when the folder was deleted.

    No scheduler is asked here, which can take seconds: the lists of runs do that in their thread, and record how jobs ended.
    """
    from so_tui.runs import read_state, state_with_truth

    try:
        recorded = read_state(run)
        return recorded if recorded.state == "queued" else state_with_truth(run)
    except InputError as error:
        app.post_message(
            messages.Failed(
                f"The state of {run.name} cannot be read", tuple(map(str, error.problems))
            )
        )
        return None
