"""``compare``: runs side by side, with the settings that differ and what came of them."""

from __future__ import annotations

import argparse

from msgspec import Struct

from so_tui.commands.common import print_json, print_rich
from so_tui.runs import RunDirectory, find_run, read_spec
from so_tui.runs.comparison import RESULTS, differing, result_text
from so_tui.runs.notes import RunNotes, read_notes
from so_tui.runs.results import RunResults, read_all, results_of
from so_tui.runs.state import read_state
from so_tui.spec import RunSpec
from so_tui.trust.printable import brief_line, printable_line
from so_tui.ui.form import values_of
from so_tui.units import thousands


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


def compare(arguments: argparse.Namespace) -> int:
    """Print the comparison. Of a single run, only the results are shown.

    Raises:
        InputError: There is no such run, or its settings cannot be read.
    """
    found = tuple(dict.fromkeys(find_run(name, arguments.runs_dir) for name in arguments.runs))
    specs = {run: read_spec(run) for run in found}
    settings = {run: values_of(spec) for run, spec in specs.items()}
    keys = differing(tuple(settings.values()))
    compared = ComparedRuns(
        tuple(
            _compared(run, spec, {key: settings[run].get(key, "") for key in keys})
            for run, spec in specs.items()
        )
    )
    if arguments.json:
        print_json(compared)
    else:
        _print(compared)
    return 0


def _compared(run: RunDirectory, spec: RunSpec, settings: dict[str, str]) -> ComparedRun:
    state = read_state(run)
    return ComparedRun(
        name=run.name,
        path=str(run.path),
        state=state.state,
        step=state.step,
        settings=settings,
        results=results_of(read_all(run), spec, state.total_steps),
        notes=read_notes(run),
    )


def _print(compared: ComparedRuns) -> None:
    """Print a row for each setting that differs and for each result, a column for each run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for run in compared.runs:
        table.add_column(Text(printable_line(run.name)), overflow="fold")
    table.add_row("state", *(f"{run.state} at step {thousands(run.step)}" for run in compared.runs))
    for key, name in RESULTS.items():
        cells = [result_text(run.results, key) for run in compared.runs]
        if any(cells):
            table.add_row(name, *cells)
    for key in compared.runs[0].settings:
        table.add_row(
            Text(key, style="bold"), *(Text(brief_line(run.settings[key])) for run in compared.runs)
        )
    if any(run.notes.tags for run in compared.runs):
        table.add_row("tags", *(Text(" ".join(run.notes.tags)) for run in compared.runs))
    if any(run.notes.note for run in compared.runs):
        table.add_row("note", *(Text(brief_line(run.notes.note)) for run in compared.runs))
    print_rich(table)
