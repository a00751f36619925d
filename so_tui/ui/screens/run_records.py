"""A run's note and tags, and taking its metrics, its chart or its model elsewhere, from the list of runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from so_tui.runs import RunDirectory, log_readers, read_state
from so_tui.runs.notes import RunNotes, read_notes, write_notes
from so_tui.spec import InputError, Problem, SoTuiError
from so_tui.spec.files import path_fault
from so_tui.trust.printable import brief_message, so_tui_command
from so_tui.ui.chart_svg import chart_svg
from so_tui.ui.messages import Failed
from so_tui.ui.series import Line
from so_tui.ui.text import plural
from so_tui.units import thousands

if TYPE_CHECKING:
    from so_tui.ui.page import Page
    from so_tui.ui.runlist import RunRow
    from so_tui.ui.shared_app import SharedApp

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


def note_text(notes: RunNotes) -> str:
    """Return a note with its tags as one line for typing."""
    return " ".join((*notes.note.split(), *(f"#{tag}" for tag in notes.tags)))


def parsed_note(text: str) -> RunNotes:
    """Return what was typed: words that begin with ``#`` are tags."""
    words = text.split()
    tags = dict.fromkeys(word.removeprefix("#") for word in words if word.startswith("#"))
    return RunNotes(
        note=" ".join(word for word in words if not word.startswith("#")), tags=tuple(tags)
    )


def ask_for_note(app: SharedApp, run: RunDirectory) -> None:
    """Ask for a note and tags, and keep them with the run."""
    from so_tui.ui.dialogs.basic import AskText

    def read(text: str) -> RunNotes:
        notes = parsed_note(text)
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
        note_text(read_notes(run)),
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
    from so_tui.ui.dialogs.basic import Notice

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
    from so_tui.ui.dialogs.basic import AskText

    def named(path: Path | None) -> None:
        if path is not None:
            work = partial(_export, screen, run, path, tuple(lines), tuple(names))
            screen.run_worker(work, thread=True, group="export", name="export", exit_on_error=False)

    hint = "Up, down or a click choose what. Another name or path can be given; its ending says what is written."
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
    from so_tui.runs.metrics_export import export_metrics
    from so_tui.runs.results import read_all

    def show(rows: int) -> None:
        screen.post_message(Exporting(f"{path.name}: {thousands(rows)} rows"))

    count = export_metrics(read_all(run), path, show)
    return plural(count, "row")


def _export_model(screen: Page, run: RunDirectory, path: Path) -> str:
    from so_tui.launch import writable
    from so_tui.launch.exporting import export_model

    writable(path, "folder")
    for event in export_model(run, path):
        screen.post_message(Exporting(f"{path.name}: {brief_message(str(event))}"))
    return f"the model; `{so_tui_command('chat', str(path))}` talks to it"
