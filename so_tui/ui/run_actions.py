"""What can be done to a run, the same on the Dashboard and in the list of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from textual.message import Message

from so_tui.runs import RunDirectory, delete_run, log_readers, read_spec, read_state
from so_tui.runs import state as control
from so_tui.runs.listing import RunNotes, read_notes, write_notes
from so_tui.runs.liveness import Liveness, sighting
from so_tui.runs.lock import evidence, record_end
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.spec import InputError, Problem, Refused, SoTuiError
from so_tui.spec.check import path_fault
from so_tui.trust.text import brief_message, quoted, so_tui_command
from so_tui.ui import messages
from so_tui.ui.charts.series import Line, chart_svg
from so_tui.ui.messages import Failed
from so_tui.units import plural, thousands

if TYPE_CHECKING:
    from so_tui.ui.page import Page
    from so_tui.ui.run_rows import RunRow
    from so_tui.ui.shared_app import SharedApp


RESUMABLE = frozenset({"stopped", "failed", "lost"})


class Change(Protocol):
    """Changes a run, unless its processes may live where they cannot be seen and the user does not
    say that they have ended.
    """

    def __call__(self, run: RunDirectory, *, assume_dead: bool) -> object: ...


def ask_to_stop(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to stop ``run``, and have it stopped."""
    from so_tui.ui.dialogs import Question

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
        _ask_whether_ended(
            app,
            run,
            f"{run.name} {evidence(state, seen)}.",
            partial(_change, app, run, _record_end, "stopped", "record the end of a run"),
        )
        return
    lines = [
        f"It is at step {thousands(state.step)} of {thousands(state.total_steps)}.",
        (
            "It finishes the current step and ends. Unless the preset says otherwise, it saves a "
            "checkpoint to resume from."
        ),
    ]

    def answered(yes: bool | None) -> None:
        if yes:
            _request(app, run, "stop", "Stopping after this step")

    app.push_screen(Question(f"Stop {run.name}?", lines, yes="Stop", no="Keep running"), answered)


def _ask_to_leave_the_queue(app: SharedApp, run: RunDirectory, state: RunState) -> None:
    from so_tui.ui.dialogs import Question

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
    from so_tui.launch.lifecycle import stop

    stop(run, assume_dead=assume_dead)


def _record_end(run: RunDirectory, *, assume_dead: bool) -> None:
    record_end(run)  # by the user's word, which was asked for already


def ask_to_delete(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to delete ``run`` with its folder, and delete it."""
    from so_tui.ui.dialogs import Question

    def answered(yes: bool | None) -> None:
        if yes:
            _change(app, run, delete_run, "deleted", "delete a run")

    lines = [str(run.path), "Its metrics, log and the checkpoints inside this folder will be lost."]
    app.push_screen(
        Question(f"Delete {run.name}?", lines, yes="Delete", no="No, keep it"), answered
    )


def _ask_whether_ended(
    app: SharedApp, run: RunDirectory, seen: str, proceed: Callable[[], object]
) -> None:
    """Ask whether a run has ended whose processes cannot be seen from here, and proceed if the user
    says so.

    Args:
        app: The application.
        run: The run.
        seen: What was seen of it.
        proceed: What to do then.
    """
    from so_tui.ui.dialogs import Question

    lines = [
        seen,
        (
            "If it still runs, two attempts may write the same checkpoints. Say yes only if you "
            "know that its host is down or restarted."
        ),
    ]

    def answered(yes: bool | None) -> None:
        if yes:
            proceed()

    app.push_screen(
        Question(f"Has {run.name} ended?", lines, yes="It has ended", no="I do not know"), answered
    )


def _may_be_live(error: SoTuiError) -> bool:
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
    """Change a run in a thread, and say so where it was not done. Where its processes cannot be
    seen from here, the user is asked first.

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
            if _may_be_live(error):
                anyway = partial(_change, app, run, change, done, name, assume_dead=True)
                app.call_from_thread(_ask_whether_ended, app, run, str(error), anyway)
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
    """Write a request into the run's folder, where rank 0 looks for it between steps. Runs in a
    thread.
    """
    from so_tui.launch.executors import ensure_supervised

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
    from so_tui.ui.dialogs import Question

    state = _state(app, run)
    if state is None:
        return
    seen = sighting(run, state)
    if state.state not in FINAL_STATES and seen.liveness is Liveness.UNKNOWN:
        _ask_whether_ended(
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
    from so_tui.ui.dialogs import Question

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
    _ask_whether_ended(
        app,
        run,
        str(error),
        partial(_start_resume, app, run, start_over=start_over, assume_dead=True),
    )


def _resume(app: SharedApp, run: RunDirectory, *, start_over: bool, assume_dead: bool) -> None:
    """Start another attempt of ``run`` where its spec says. Runs in a thread."""
    from so_tui.launch.launch import prepare_resume
    from so_tui.launch.lifecycle import resume
    from so_tui.launch.places import machine_of

    try:
        resume(
            run,
            prepare_resume(
                run, machine_of(read_spec(run)), start_over=start_over, assume_dead=assume_dead
            ),
        )
    except SoTuiError as error:
        if _may_be_live(error):
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
    from so_tui.ui.dialogs import Notice
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
    """Open a conversation with the last checkpoint of ``run``, and with its base model if it has
    one.
    """
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
    """Return the state of ``run``; report it and return None where it cannot be read, as when the
    folder was deleted.

    No scheduler is asked here, which can take seconds: the lists of runs do that in their thread,
    and record how jobs ended.
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


# A run's note and tags, and taking its metrics, its chart or its model elsewhere, from the list of
# runs.


_MOST_ATTEMPTS, _LOG_LINES = 5, 40
WROTE_S = 15.0
"""How long is shown where a file was written: long enough to note it."""
METRICS, PICTURE = (".csv", ".parquet"), ".svg"


class Exporting(Message):
    """How far an export is; empty when it has ended."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__()

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Exporting)


class Exported(Message):
    """Something of a run was written to a file or folder."""

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self.run, self.path = run, path
        super().__init__()


def _note_text(notes: RunNotes) -> str:
    """Return a note with its tags as one line for typing."""
    return " ".join((*notes.note.split(), *(f"#{tag}" for tag in notes.tags)))


def _parsed_note(text: str) -> RunNotes:
    """Return what was typed: words that begin with ``#`` are tags."""
    words = text.split()
    tags = dict.fromkeys(word.removeprefix("#") for word in words if word.startswith("#"))
    return RunNotes(
        note=" ".join(word for word in words if not word.startswith("#")), tags=tuple(tags)
    )


def ask_for_note(app: SharedApp, run: RunDirectory) -> None:
    """Ask for a note and tags, and keep them with the run."""
    from so_tui.ui.dialogs import AskText

    def read(text: str) -> RunNotes:
        notes = _parsed_note(text)
        try:
            write_notes(run, notes)
        except InputError:
            raise
        except SoTuiError as error:  # another user's run
            raise InputError(
                [
                    Problem(
                        code="not-kept",
                        field="note",
                        value="",
                        message=str(error),
                        remedy="It is only read.",
                    )
                ]
            ) from None
        return notes

    hint = "Words that begin with # are tags: too short #paper"
    dialog = AskText(
        f"Note on {run.name}",
        hint,
        _note_text(read_notes(run)),
        yes="Keep",
        read=read,
        may_be_empty=True,
    )
    app.push_screen(dialog, lambda _: app.list_runs())


def show_earlier_logs(app: SharedApp, run: RunDirectory) -> None:
    """Show the last lines of each earlier attempt's log, the newest attempt first."""
    app.run_worker(
        partial(_read_earlier_logs, app, run),
        thread=True,
        group="request",
        name="read earlier logs",
        exit_on_error=False,
    )


def _read_earlier_logs(app: SharedApp, run: RunDirectory) -> None:
    """Read the logs in a thread."""
    earlier = run.attempts()[-2::-1][:_MOST_ATTEMPTS]
    found = []
    for attempt in earlier:
        lines = [line for reader in log_readers(run, attempt) for line in reader.tail(_LOG_LINES)]
        found.append("\n".join((f"attempt {attempt}", *(lines or ["no log"]))))
    more = f"`{so_tui_command('logs', run.name, '--attempt', 'N')}` prints all of one."
    shown = (
        [*found, more] if found else [f"{run.name} has one attempt; the dashboard shows its log."]
    )
    app.call_from_thread(_show_lines, app, f"{run.name}: logs of earlier attempts", shown)


def _show_lines(app: SharedApp, title: str, lines: list[str]) -> None:
    from so_tui.ui.dialogs import Notice

    app.push_screen(Notice(title, lines, bad=False))


def new_path(text: str) -> Path:
    """Return the path that was typed; no file may have it. Raises InputError."""
    if fault := path_fault(text):
        raise InputError(
            [
                Problem(
                    code="invalid-path",
                    field="file",
                    value=text,
                    message=fault,
                    remedy="Give another name.",
                )
            ]
        )
    path = Path(text).expanduser().absolute()
    if path.suffix in (*METRICS, PICTURE) and path.exists():
        raise InputError(
            [
                Problem(
                    code="file-exists",
                    field="file",
                    value=text,
                    message="exists already",
                    remedy="Choose another name.",
                )
            ]
        )
    return path


def ask_to_export(screen: Page, row: RunRow, lines: Sequence[Line], names: Sequence[str]) -> None:
    """Ask where to, and export: what it is follows from the name."""
    run = row.run
    from so_tui.ui.dialogs import AskText

    def named(path: Path | None) -> None:
        if path is not None:
            work = partial(_export, screen, run, path, tuple(lines), tuple(names))
            screen.run_worker(work, thread=True, group="export", name="export", exit_on_error=False)

    hint = (
        "Up, down or a click choose what. Another name or path can be given; its ending says what "
        "is written."
    )
    choices = [
        *(
            [(f"{run.name}-model", "the model, a folder for from_pretrained")]
            if _has_checkpoint(row)
            else []
        ),
        (f"{run.name}.csv", "every step"),
        (f"{run.name}.parquet", "every step (with pyarrow)"),
        (f"{run.name}.svg", "the chart as shown"),
    ]
    dialog = AskText(
        f"Export {run.name} to", hint, choices[0][0], yes="Export", read=new_path, choices=choices
    )
    screen.app.push_screen(dialog, named)


def _has_checkpoint(row: RunRow) -> bool:
    """Return whether a run has a checkpoint now: the list is some seconds old."""
    try:
        return read_state(row.run).saved_step is not None
    except InputError:
        return row.state.saved_step is not None


def _export(
    screen: Page, run: RunDirectory, path: Path, lines: tuple[Line, ...], names: tuple[str, ...]
) -> None:
    """Export in a thread."""
    app = screen.app
    try:
        screen.post_message(Exporting(f"exporting to {path.name} …"))
        if path.suffix in METRICS:
            said = _export_metrics(screen, run, path)
        elif path.suffix == PICTURE:
            with path.open("x", encoding="utf-8") as file:
                file.write(chart_svg("loss", lines, names))
            said = plural(len(lines), "line")
        else:
            said = _export_model(screen, run, path)
    except SoTuiError as error:
        app.post_message(Failed(f"{run.name} was not exported", tuple(str(error).splitlines())))
    except OSError as error:
        app.post_message(
            Failed(f"{run.name} could not be exported", (f"{path}: {error.strerror}",))
        )
    else:
        screen.post_message(Exported(run, path))
        app.call_from_thread(app.notify, f"Wrote {path}: {said}", markup=False, timeout=WROTE_S)
    screen.post_message(Exporting(""))


def _export_metrics(screen: Page, run: RunDirectory, path: Path) -> str:
    from so_tui.runs.export import export_metrics
    from so_tui.runs.results import read_all

    def show(rows: int) -> None:
        screen.post_message(Exporting(f"{path.name}: {thousands(rows)} rows"))

    count = export_metrics(read_all(run), path, show)
    return plural(count, "row")


def _export_model(screen: Page, run: RunDirectory, path: Path) -> str:
    from so_tui.launch.checks import writable
    from so_tui.launch.helper_jobs import export_model

    writable(path, "folder")
    for event in export_model(run, path):
        screen.post_message(Exporting(f"{path.name}: {brief_message(str(event))}"))
    return f"the model; `{so_tui_command('chat', str(path))}` talks to it"
