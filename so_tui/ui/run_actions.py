"""What can be done to a run, the same on the Dashboard and in the list of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.widgets import Input

from so_tui.runs import (
    RunDirectory,
    delete_run,
    log_readers,
    read_spec,
    read_state,
    state_with_truth,
)
from so_tui.runs import state as run_state
from so_tui.runs.listing import RunNotes, read_notes, write_notes
from so_tui.runs.liveness import sighting
from so_tui.runs.lock import evidence, record_end
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.spec import InputError, Refused, SoTuiError
from so_tui.spec.check import path_fault
from so_tui.spec.errors import reject
from so_tui.trust.text import brief_message, quoted, so_tui_command
from so_tui.ui import messages
from so_tui.ui.charts.series import Named, write_picture
from so_tui.ui.messages import failure, in_thread, reporting
from so_tui.units import plural, thousands

if TYPE_CHECKING:
    from so_tui.ui.page import Page
    from so_tui.ui.run_rows import RunRow
    from so_tui.ui.shared_app import SharedApp


RESUMABLE = frozenset({"stopped", "failed", "lost"})


def _ask_to_stop(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to stop ``run``, and have it stopped."""
    from so_tui.launch import lifecycle

    state = _state(run)
    if state.state in FINAL_STATES:
        app.notify(f"{run.name} has already ended: {state.state}", markup=False)
        return
    if state.state == "queued":
        app.ask(
            f"Cancel {run.name}?",
            [
                brief_message(state.detail) or "It waits in the queue.",
                *([] if state.attempt else ["Nothing of it has run yet."]),
            ],
            partial(_change, app, run, lifecycle.stop, "cancelled", "take a run out of the queue"),
            yes="Cancel it",
            no="Keep waiting",
        )
        return
    seen = sighting(run, state)
    if seen.alive is None:

        def record(run: RunDirectory, *, assume_dead: bool) -> None:
            record_end(run)  # by the user's word, which was asked for already

        _ask_whether_ended(
            app,
            run,
            f"{run.name} {evidence(state, seen)}.",
            partial(_change, app, run, record, "stopped", "record the end of a run"),
        )
        return
    app.ask(
        f"Stop {run.name}?",
        [
            f"It is at step {thousands(state.step)} of {thousands(state.total_steps)}.",
            (
                "It finishes the current step and ends. Unless the preset says otherwise, it saves "
                "a checkpoint to resume from."
            ),
        ],
        partial(_request, "stop", "Stopping after this step", app, run),
        yes="Stop",
        no="Keep running",
    )


def _ask_to_delete(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to delete ``run`` with its folder, and delete it."""
    app.ask(
        f"Delete {run.name}?",
        [str(run.path), "Its metrics, log and the checkpoints inside this folder will be lost."],
        partial(_change, app, run, delete_run, "deleted", "delete a run"),
        yes="Delete",
        no="No, keep it",
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
    app.ask(
        f"Has {run.name} ended?",
        [
            seen,
            (
                "If it still runs, two attempts may write the same checkpoints. Say yes only if "
                "you know that its host is down or restarted."
            ),
        ],
        proceed,
        yes="It has ended",
        no="I do not know",
    )


def _may_be_live(error: SoTuiError) -> bool:
    """Return whether something was refused only because the run's host cannot be asked."""
    return isinstance(error, InputError) and any(
        problem.code == "run-may-be-live" for problem in error.problems
    )


def _change(
    app: SharedApp,
    run: RunDirectory,
    change: Callable[..., object],
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
        change: What is done to it, unless its processes may live where they cannot be seen and
            ``assume_dead`` is False.
        done: What the run is then, such as ``deleted``.
        name: What is being done, for the user where it fails unexpectedly.
        assume_dead: The user says that the run has ended.
    """

    def work() -> None:
        with reporting(app, run.name, done, run.path):
            try:
                change(run, assume_dead=assume_dead)
            except SoTuiError as error:
                if not _may_be_live(error):
                    raise
                anyway = partial(_change, app, run, change, done, name, assume_dead=True)
                app.call_from_thread(_ask_whether_ended, app, run, str(error), anyway)
                return
        app.call_from_thread(app.list_runs)

    in_thread(app, work, name, group="request")


def _request(
    action: run_state.Action, confirmation: str, app: SharedApp, run: RunDirectory
) -> None:
    """Write a request into the run's folder, where rank 0 looks for it between steps."""

    def work() -> None:
        from so_tui.launch.executors import ensure_supervised

        with reporting(app, run.name, "asked", run.control_dir):  # it may be another user's run
            run_state.request(run, action, reason="asked on the screen")
            ensure_supervised(run)
            app.call_from_thread(app.notify, confirmation, markup=False)

    in_thread(app, work, "send a request to the run", group="request")


def _ask_to_resume(app: SharedApp, run: RunDirectory) -> None:
    """Ask whether to resume ``run`` from its last checkpoint, and start another attempt."""
    from so_tui.launch.executors import executor_of

    state = _state(run)
    seen = sighting(run, state)
    if state.state not in FINAL_STATES:
        if seen.alive is None:
            _ask_whether_ended(
                app,
                run,
                f"{run.name} {evidence(state, seen)}.",
                partial(_start_resume, app, run, assume_dead=True),
            )
        else:
            app.notify(f"{run.name} is live: {state.state}", markup=False)
        return
    place = "on this machine" if executor_of(read_spec(run)).here else "in a new job"
    saved = (
        f"step {thousands(state.saved_step)}"
        if state.saved_step is not None
        else "the beginning: nothing was saved"
    )
    app.ask(
        f"Resume {run.name}?",
        [f"It continues from {saved}, {place}."],
        partial(_start_resume, app, run),
        yes="Resume",
        default_yes=True,
    )


def _start_resume(
    app: SharedApp, run: RunDirectory, *, start_over: bool = False, assume_dead: bool = False
) -> None:
    if app.may_start():
        app.starting = run.name
        in_thread(
            app,
            partial(_resume, app, run, start_over=start_over, assume_dead=assume_dead),
            "resume",
            group="launch",
        )


def _resume(app: SharedApp, run: RunDirectory, *, start_over: bool, assume_dead: bool) -> None:
    """Start another attempt of ``run`` where its spec says, or ask whether to start it anyway. Runs
    in a thread.
    """
    from so_tui.launch.launch import prepare_resume
    from so_tui.launch.lifecycle import resume
    from so_tui.launch.places import machine_of

    def ask(error: SoTuiError) -> None:
        app.starting = ""
        if isinstance(error, Refused):
            app.ask(
                f"Train {run.name} from step 0 again?",
                error.reasons,
                partial(_start_resume, app, run, start_over=True, assume_dead=assume_dead),
                yes="Start over",
            )
        else:
            _ask_whether_ended(
                app,
                run,
                str(error),
                partial(_start_resume, app, run, start_over=start_over, assume_dead=True),
            )

    try:
        launch = prepare_resume(
            run,
            machine_of(read_spec(run).slurm),
            start_over=start_over,
            assume_dead=assume_dead,
        )
        resume(run, launch)
    except SoTuiError as error:
        # What the run saved is not there, or its host cannot be asked.
        missing = isinstance(error, Refused) and "checkpoint-missing" in error.codes
        if missing or _may_be_live(error):
            app.call_from_thread(ask, error)
        else:
            app.post_message(failure(f"{run.name} was not resumed", error))
    else:
        for text in launch.plan.replaced_texts:
            app.call_from_thread(app.notify, text, severity="warning", markup=False)
        app.post_message(messages.Launched(run))


def _show_settings(app: SharedApp, run: RunDirectory) -> None:
    """Show every setting of ``run`` that is not the default."""
    from so_tui.spec import spec_tree
    from so_tui.ui.dialogs import Notice
    from so_tui.ui.form import flat, text_of

    settings = flat(spec_tree(read_spec(run), full=False))
    lines = [f"{path} = {text_of(value)}" for path, value in settings]
    title = f"{run.name}: {plural(len(lines), 'setting')} that are not the default"
    app.push_screen(Notice(title, ["\n".join(lines)], bad=False))


def _copy_path(app: SharedApp, run: RunDirectory) -> None:
    """Copy the path of the run directory to the clipboard."""
    app.copy_to_clipboard(quoted(str(run.path)))
    app.notify(f"Copied {run.path}", markup=False)


def _chat(app: SharedApp, run: RunDirectory) -> None:
    """Open a conversation with the last checkpoint of ``run``, and with its base model if it has
    one.
    """
    from so_tui.spec.generation import LoadModel

    compare = read_spec(run).model.weights == "pretrained"
    app.open_chat(LoadModel(run=str(run.path), compare=compare))


def _state(run: RunDirectory) -> RunState:
    """Return the state of ``run``. Raises InputError, as when the folder was deleted.

    No scheduler is asked here, which can take seconds: the lists of runs do that in their thread,
    and record how jobs ended.
    """
    recorded = read_state(run)
    return recorded if recorded.state == "queued" else state_with_truth(run)


# A run's note and tags, and taking its metrics, its chart or its model elsewhere, from the list of
# runs.


_MOST_ATTEMPTS, _LOG_LINES = 5, 40
WROTE_S = 15.0
"""How long is shown where a file was written: long enough to note it."""
METRICS, PICTURE = (".csv", ".parquet"), ".svg"


Tell = Callable[[RunDirectory, str, Path | None], None]
"""Takes how far the export of a run is, empty once it has ended, and then where it was written."""


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


def _ask_for_note(app: SharedApp, run: RunDirectory) -> None:
    """Ask for a note and tags, and keep them with the run."""
    from so_tui.ui.dialogs import AskText

    def read(text: str) -> None:
        try:
            write_notes(run, _parsed_note(text))
        except Refused as error:  # another user's run
            raise reject("not-kept", "note", "", str(error), "It is only read.") from None

    dialog = AskText(
        f"Note on {run.name}",
        "Words that begin with # are tags: too short #paper",
        Input(_note_text(read_notes(run)), compact=True),
        yes="Keep",
        read=read,
        may_be_empty=True,
    )
    app.push_screen(dialog, lambda _: app.list_runs())


def _show_earlier_logs(app: SharedApp, run: RunDirectory) -> None:
    """Show the last lines of each earlier attempt's log, the newest attempt first."""
    from so_tui.ui.dialogs import Notice

    def read() -> None:
        found = []
        for attempt in run.attempts()[-2::-1][:_MOST_ATTEMPTS]:
            lines = [line for log in log_readers(run, attempt) for line in log.tail(_LOG_LINES)]
            found.append("\n".join((f"attempt {attempt}", *(lines or ["no log"]))))
        if found:
            more = so_tui_command("logs", run.name, "--attempt", "N")
            found.append(f"`{more}` prints all of one.")
        else:
            found = [f"{run.name} has one attempt; the dashboard shows its log."]
        app.call_from_thread(
            app.push_screen, Notice(f"{run.name}: logs of earlier attempts", found, bad=False)
        )

    in_thread(app, read, "read earlier logs", group="request")


def new_path(text: str) -> Path:
    """Return the path that was typed; no file may have it. Raises InputError."""
    if fault := path_fault(text):
        raise reject("invalid-path", "file", text, fault, "Give another name.")
    path = Path(text).expanduser().absolute()
    if path.suffix in (*METRICS, PICTURE) and path.exists():
        raise reject("file-exists", "file", text, "exists already", "Choose another name.")
    return path


def ask_to_export(screen: Page, row: RunRow, curves: Sequence[Named], tell: Tell) -> None:
    """Ask where to, and export: what it is follows from the name."""
    run = row.run
    try:  # the list is some seconds old
        saved = read_state(run).saved_step
    except InputError:
        saved = row.state.saved_step
    choices = [
        (f"{run.name}-model", "the model, a folder for from_pretrained"),
        (f"{run.name}.csv", "every step"),
        (f"{run.name}.parquet", "every step (with pyarrow)"),
        (f"{run.name}.svg", "the chart as shown"),
    ]
    export = partial(_export, screen, run, curves, tell)
    ask_where_to_export(screen, run.name, choices[saved is None :], new_path, export)


def ask_where_to_export(
    screen: Page,
    subject: str,
    choices: Sequence[tuple[str, str]],
    read: Callable[[str], Path],
    export: Callable[[Path], str],
) -> None:
    """Ask for the file or folder that ``subject`` is exported to, one of ``choices`` or another,
    and call ``export``, which returns what was written, in a thread.
    """
    from so_tui.ui.dialogs import AskText, show_dialog

    app = screen.app

    def write(path: Path) -> None:
        with reporting(app, subject, "exported", path):
            app.call_from_thread(
                app.notify, f"Wrote {path}: {export(path)}", markup=False, timeout=WROTE_S
            )

    dialog = AskText(
        f"Export {subject} to",
        "Up, down or a click choose what. Another name or path can be given; its ending says what "
        "is written.",
        Input(choices[0][0], compact=True),
        yes="Export",
        read=read,
        choices=choices,
    )

    def named(path: Path) -> None:
        in_thread(screen, partial(write, path), "export", group="export")

    show_dialog(app, dialog, named)


def _export(
    screen: Page, run: RunDirectory, curves: Sequence[Named], tell: Tell, path: Path
) -> str:
    """Export a run's metrics, its chart or its model, as the name says."""
    from so_tui.launch.checks import writable
    from so_tui.launch.helper_jobs import export_model
    from so_tui.runs.export import export_metrics
    from so_tui.runs.results import read_all

    def show(progress: str, written: Path | None = None) -> None:
        screen.call_later(tell, run, progress, written)

    written = None
    show(f"exporting to {path.name} …")
    try:
        if path.suffix in METRICS:
            count = export_metrics(
                read_all(run), path, lambda rows: show(f"{path.name}: {thousands(rows)} rows")
            )
            said = plural(count, "row")
        elif path.suffix == PICTURE:
            said = write_picture(path, "loss", curves)
        else:
            writable(path, "folder")
            for event in export_model(run, path):
                show(f"{path.name}: {brief_message(str(event))}")
            said = f"the model; `{so_tui_command('chat', str(path))}` talks to it"
        written = path
    finally:
        show("", written)
    return said


_ACTIONS: dict[str, Callable[[SharedApp, RunDirectory], None]] = {
    "stop": _ask_to_stop,
    "checkpoint": partial(_request, "checkpoint", "Saving a checkpoint after this step"),
    "resume": _ask_to_resume,
    "delete": _ask_to_delete,
    "note": _ask_for_note,
    "attempts": _show_earlier_logs,
    "chat": _chat,
    "differences": _show_settings,
    "copy": _copy_path,
}


def act(app: SharedApp, name: str, run: RunDirectory) -> None:
    """Do to ``run`` what a key is for, by the key's id, or say why its files cannot be read."""
    try:
        _ACTIONS[name](app, run)
    except InputError as error:
        app.post_message(failure(f"{run.name} cannot be read", error))
