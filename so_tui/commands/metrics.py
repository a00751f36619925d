"""``export-metrics``: a run's steps as a table for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from so_tui.commands.common import ProgressLine
from so_tui.runs import find_run
from so_tui.runs.metrics_export import export_metrics
from so_tui.runs.results import read_all
from so_tui.spec import InputError, Problem
from so_tui.spec.files import path_fault
from so_tui.spec.wording import shown
from so_tui.trust.printable import printable_line
from so_tui.units import plural, thousands


def export(arguments: argparse.Namespace) -> int:
    """Write the file.

    Raises:
        InputError: There is no such run, or the file cannot be written so.
    """
    run = find_run(arguments.run, arguments.runs_dir)
    target = arguments.to or f"{run.name}.csv"
    if fault := path_fault(target):
        raise InputError(
            [
                Problem(
                    code="invalid-path",
                    field="--to",
                    value=shown(target),
                    message=fault,
                    remedy="Give another name.",
                )
            ]
        )
    line = ProgressLine(shown=not arguments.quiet)
    line.show("reading the run")
    path = Path(target).expanduser()
    count = export_metrics(read_all(run), path, lambda rows: line.show(f"{thousands(rows)} rows"))
    line.clear()
    print(printable_line(f"wrote {path}: {plural(count, 'row')}"))
    return 0
