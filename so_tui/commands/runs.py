"""``runs``, ``stop``, ``logs`` and ``export``: list, end, read and export existing runs."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from so_tui.commands.common import (
    ProgressLine,
    plain_table,
    print_json,
    print_note,
    print_rich,
    run_meant,
)
from so_tui.runs import RunDirectory, find_run, list_runs, read_spec, readable_spec
from so_tui.runs.directory import asked_run, saved_on_disk
from so_tui.runs.export import export_metrics
from so_tui.runs.listing import RunNotes, changed_tags, read_notes, write_notes
from so_tui.runs.liveness import sighting, suspended
from so_tui.runs.lock import ended_state, evidence
from so_tui.runs.records import FINAL_STATES, RunState, State
from so_tui.runs.results import (
    RESULTS,
    RunResults,
    differing,
    ordered,
    read_all,
    reading_time,
    recent_results,
    result_of_order,
    result_text,
    results_of,
)
from so_tui.runs.state import read_state
from so_tui.spec import InputError, RunSpec
from so_tui.spec.check import path_fault
from so_tui.spec.errors import reject, shown
from so_tui.trust.streams import console
from so_tui.trust.text import brief_line, brief_message, printable_line
from so_tui.ui.form import settings_of
from so_tui.units import duration, plural, thousands

if TYPE_CHECKING:
    from rich.table import Table


# ``compare``: runs side by side, with the settings that differ and what came of them.


class ComparedRun(Struct, frozen=True, kw_only=True):
    """A run of ``compare --json``."""

    name: str
    path: str
    state: str
    step: int
    settings: dict[str, str]
    """Those in which the runs differ, by key, as they are typed."""
    results: RunResults
    notes: RunNotes


class ComparedRuns(Struct, frozen=True):
    """What ``compare --json`` prints."""

    runs: tuple[ComparedRun, ...]


def compare(arguments: Namespace) -> int:
    """Print the comparison. Of a single run, only the results are shown.

    Raises:
        InputError: There is no such run, or its settings cannot be read.
    """
    found = tuple(dict.fromkeys(find_run(name, arguments.runs_dir) for name in arguments.runs))
    specs = {run: read_spec(run) for run in found}
    settings = {run: settings_of(spec) for run, spec in specs.items()}
    keys = differing(tuple(settings.values()))
    reading = reading_time(_COMPARED_S)
    compared = ComparedRuns(
        tuple(
            _compared(run, spec, {key: settings[run].get(key, "") for key in keys}, reading())
            for run, spec in specs.items()
        )
    )
    if arguments.json:
        print_json(compared)
    else:
        _print(compared)
    _say_what_was_not_read(run.results for run in compared.runs)
    return 0


def _compared(
    run: RunDirectory, spec: RunSpec, settings: dict[str, str], left_s: float
) -> ComparedRun:
    state = read_state(run)
    return ComparedRun(
        name=run.name,
        path=str(run.path),
        state=state.state,
        step=state.step,
        settings=settings,
        results=results_of(read_all(run, left_s), spec, state.total_steps),
        notes=read_notes(run),
    )


def _print(compared: ComparedRuns) -> None:
    """Print a row for each setting that differs and for each result, a column for each run."""
    from rich.text import Text

    table = plain_table("", *(printable_line(run.name) for run in compared.runs))
    table.add_row("state", *(f"{run.state} at step {thousands(run.step)}" for run in compared.runs))
    for key, name in RESULTS.items():
        cells = [_marked(run.results, key) for run in compared.runs]
        if any(cells):
            table.add_row(name, *cells)
    for key in compared.runs[0].settings:
        table.add_row(
            Text(key, style="bold"), *(Text(brief_line(run.settings[key])) for run in compared.runs)
        )
    notes = [run.notes for run in compared.runs]
    tags, texts = [" ".join(note.tags) for note in notes], [brief_line(note.note) for note in notes]
    for name, cells in (("tags", tags), ("note", texts)):
        if any(cells):
            table.add_row(name, *map(Text, cells))
    print_rich(table)


# ``export-metrics``: a run's steps as a table for other programs.


def export_run_metrics(arguments: Namespace) -> int:
    """Write the file.

    Raises:
        InputError: There is no such run, or the file cannot be written so.
    """
    run = find_run(arguments.run, arguments.runs_dir)
    target = arguments.to or f"{run.name}.csv"
    if fault := path_fault(target):
        raise reject("invalid-path", "--to", shown(target), fault, "Give another name.")
    line = ProgressLine()
    line.show("reading the run")
    path = Path(target).expanduser()
    count = export_metrics(
        read_all(run),
        path,
        lambda rows: line.show(f"{thousands(rows)} rows"),
        force=arguments.force,
    )
    line.clear()
    print(printable_line(f"wrote {path}: {plural(count, 'row')}"))
    return 0


# ``note``: a user's own words about a run.


def edit_note(arguments: Namespace) -> int:
    """Change what is asked for, then print note and tags.

    Raises:
        Refused: It is another user's run, which is only read.
        InputError: There is no such run, or the note or a tag cannot be kept.
    """
    run = find_run(arguments.run, arguments.runs_dir)
    notes = read_notes(run)
    if arguments.text is not None or arguments.tag or arguments.untag:
        changed = changed_tags(notes, arguments.tag, arguments.untag)
        notes = changed if arguments.text is None else replace(changed, note=arguments.text)
        write_notes(run, notes)
    parts = filter(None, (notes.note, " ".join(f"#{tag}" for tag in notes.tags)))
    lines = "\n".join(map(printable_line, parts))
    if arguments.json:
        print_json(notes)
    elif lines:
        print(lines)
    else:
        print_note("no note and no tags")
    return 0


class ListedRun(Struct, frozen=True, kw_only=True):
    """A run of ``runs --json``."""

    name: str
    path: str
    state: State
    step: int
    total_steps: int
    started: float | None
    """Unix seconds."""
    attempts: int
    reason: str
    results: RunResults = RunResults()
    notes: RunNotes = RunNotes()


class Runs(Struct, frozen=True):
    """What ``runs --json`` prints."""

    runs: tuple[ListedRun, ...]
    """Newest first."""
    unread: int = 0
    """Older runs, which are missing because reading all would have taken too long."""


_RUN_S = 2.0
"""How long the metrics of a listed run may take. Mostly the end of its last segment suffices."""
_COMPARED_S = 20.0
"""How long the metrics of a compared run may take. All of them are read."""
_CUT = "*"
_ROOM_FOR_START = 110
"""Width of a terminal in which the table has start times."""


class _Row(NamedTuple):
    """A run of the list."""

    run: RunDirectory
    state: RunState
    results: RunResults


def runs(arguments: Namespace) -> int:
    """Print every known run, in the order that is asked for."""
    from so_tui.launch.executors import ensure_supervised
    from so_tui.launch.supervisor.processes import own_environs

    rows = []
    environs, reading = cache(own_environs), reading_time(_RUN_S)
    found = list_runs(arguments.runs_dir)
    unread = len(found)
    for run in found:
        if not reading():
            break
        unread -= 1
        ensure_supervised(run, environs)
        if arguments.tag is None or arguments.tag in read_notes(run).tags:
            state = _state(run)
            rows.append(_Row(run, state, _results(run, state, reading())))
    sort = arguments.sort or "started"
    rows = ordered(rows, sort, _text_of, lambda row: row.state.step, lambda row: row.results)
    if arguments.json:
        listed = (
            ListedRun(
                name=run.name,
                path=str(run.path),
                state=state.state,
                step=state.step,
                total_steps=state.total_steps,
                started=state.started,
                attempts=state.attempt,
                reason=state.reason,
                results=results,
                notes=read_notes(run),
            )
            for run, state, results in rows
        )
        print_json(Runs(tuple(listed), unread))
    elif not rows and arguments.tag is not None:
        print(printable_line(f"no run has the tag {arguments.tag}"))
    elif not rows:
        print("no runs yet: `so-tui run tiny` trains the embedded model in a minute")
    else:
        # Why a run ended, or what a queued one waits for.
        states = [(row.run.name, row.state) for row in rows]
        whys = [(name, of.detail if of.state == "queued" else of.reason) for name, of in states]
        told = (f"\n{brief_message(f'{name}: {why}')}" for name, why in whys if why)
        print_rich(_table(rows, sort), *told)
    _say_what_was_not_read((row.results for row in rows), unread)
    return 0


def _say_what_was_not_read(results: Iterable[RunResults], unread: int = 0) -> None:
    """Say on stderr how many runs were not read whole, and how many older ones not at all."""
    cut = sum(not each.whole for each in results)
    if cut:
        print(
            f"so-tui: {plural(cut, 'run')} marked {_CUT} would have taken too long to read whole: "
            "results are of what was read",
            file=sys.stderr,
        )
    if unread:
        print(
            f"so-tui: {plural(unread, 'older run')} would have taken too long to read and are not "
            "listed. Name a folder of fewer with --runs-dir",
            file=sys.stderr,
        )


def _text_of(row: _Row, key: str) -> str:
    match key:
        case "host":
            return row.state.host
        case "name":
            return row.run.name
        case "state":
            return row.state.state
    spec = readable_spec(row.run)
    return spec.label if spec is not None else ""


def _results(run: RunDirectory, state: RunState, limit_s: float) -> RunResults:
    try:
        return recent_results(run, readable_spec(run), state.total_steps, limit_s)
    except OSError:
        return RunResults()  # deleted meanwhile, or unreadable


def _marked(results: RunResults, key: str) -> str:
    """Return a result as it is shown; the loss has a mark if the run was not read whole."""
    return result_text(results, key) + (_CUT if key == "loss" and not results.whole else "")


def _table(rows: list[_Row], sort: str) -> Table:
    """Lay out the runs with what they are sorted by. If the width is not enough, names are wrapped,
    and then the other cells end in an ellipsis.
    """

    def results(key: str) -> list[str]:
        return [_marked(row.results, key) for row in rows]

    states = [row.state for row in rows]
    columns = {
        "name": [printable_line(row.run.name) for row in rows],
        "state": [state.shown for state in states],
        "step": [f"{thousands(state.step)}/{thousands(state.total_steps)}" for state in states],
        "mean loss": results("loss"),
    }
    if any(results("evaluation_loss")):
        columns["evaluation loss"] = results("evaluation_loss")
    by = result_of_order(sort)
    if sort in ("model", "host"):
        columns[sort] = [printable_line(_text_of(row, sort)) for row in rows]
    elif by not in (None, "loss", "evaluation_loss"):
        columns[RESULTS[by]] = results(by)
    if console().width >= _ROOM_FOR_START:
        columns["started"] = [
            f"{datetime.fromtimestamp(state.started):%Y-%m-%d %H:%M}" if state.started else ""
            for state in states
        ]
    table = plain_table(
        *columns, right=columns.keys() - ("name", "state", "model", "host", "started")
    )
    for column in table.columns:
        if column.header != "name":
            column.no_wrap, column.overflow = True, "ellipsis"
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _state(run: RunDirectory) -> RunState:
    """Return the run's state; for a damaged run a lost state with the problem as its reason."""
    from so_tui.launch.lifecycle import current_state

    try:
        return current_state(run)
    except InputError as error:
        return RunState(name=run.name, state="lost", reason=str(error.problems[0].message))


def stop(arguments: Namespace) -> int:
    """Ask a run to stop, wait for its checkpoint, and print what was saved. Return 1 if it ended
    otherwise.

    Raises:
        Refused: It is another user's run.
        InputError: Its processes cannot be seen from here, and it did not end in time (code
            ``run-may-be-live``).
    """
    from so_tui.launch.lifecycle import current_state
    from so_tui.launch.lifecycle import stop as stop_run

    run = run_meant(arguments, "stop")
    state = current_state(run)
    if state.state in FINAL_STATES:
        print(printable_line(f"{run.name} has already ended: {state.state}"))
        return 0
    with asked_run(run):
        pass  # Another user's run is refused before anything is said of stopping it.
    saved = ""
    if arguments.assume_dead:
        state = stop_run(run, assume_dead=True)
    else:
        seen = sighting(run, state)
        if not seen.by_processes:
            print_note(f"{run.name} {evidence(state, seen)}")
        if state.state != "queued":
            print_note(f"asked {run.name} to stop; waiting for its checkpoint")
        line, known = ProgressLine(), None

        def say(state: RunState, left_s: float) -> None:
            """Say how long it may take, and name a process that stands still once."""
            nonlocal known
            before, known = known, suspended(state)
            if known is not None and known != before:
                line.clear()
                who = f"its {known.role} (pid {known.pid}) is suspended and does nothing"
                print(f"so-tui: {who}: `kill -CONT {known.pid}` lets it go on", file=sys.stderr)
            doing = f"{state.state} at step {thousands(state.step)}"
            line.show(f"{doing}; waiting for its end, at most {duration(left_s)} more")

        state = stop_run(run, grace_s=arguments.grace, waiting=say)
        line.clear()
        step = state.saved_step
        if state.state not in FINAL_STATES:
            if not sighting(run, state).by_processes:
                ended_state(run)  # refuses it, and says what was seen
            # Nobody may have recorded what was saved since.
            step = saved_on_disk(run, readable_spec(run), state)
        saved = ", nothing was saved" if step is None else f", step {thousands(step)} is saved"
    ended = f"{state.state} at step {thousands(state.step)}{saved}"
    print(printable_line(f"{run.name}: {ended}{'. ' + state.reason if state.reason else ''}"))
    return 0 if arguments.assume_dead or state.state in ("stopped", "finished") else 1


def logs(arguments: Namespace) -> int:
    """Print the end of a run's log with progress bars collapsed, and with ``--follow`` all lines
    until the run ends.

    Raises:
        InputError: There is no such run (codes of ``listing``) or no such attempt.
    """
    from so_tui.launch.lifecycle import current_state
    from so_tui.runs import log_readers

    run = find_run(arguments.run, arguments.runs_dir)
    if arguments.attempt is not None and arguments.attempt not in run.attempts():
        known = ", ".join(map(str, run.attempts())) or "none yet"
        raise reject(
            "unknown-attempt",
            "--attempt",
            str(arguments.attempt),
            "there is no such attempt",
            f"Attempts of {run.name}: {known}.",
        )
    readers = log_readers(run, arguments.attempt)
    for reader in readers:
        for line in reader.tail(arguments.lines):
            print(line)
    while arguments.follow:
        ended = current_state(run).state in FINAL_STATES
        for reader in readers:
            for line in reader.poll():
                print(line, flush=True)
        if ended:
            break
        time.sleep(0.5)
    return 0


def export(arguments: Namespace) -> int:
    """Write the last checkpoint as a folder that ``AutoModelForCausalLM.from_pretrained`` loads."""
    from so_tui.launch.checks import writable
    from so_tui.launch.helper_jobs import export_model, in_steps

    run = find_run(arguments.run, arguments.runs_dir)
    target = arguments.to or str(run.path / "export")
    writable(Path(target), "--to")
    for event in in_steps(export_model(run, target), 10):
        print_note(str(event))
    print(printable_line(f"wrote {target}"))
    return 0
