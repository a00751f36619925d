"""``validate``: measure this machine and training on it, beside what plans predict, as a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from so_tui.commands.common import ProgressLine, note, print_json, print_rich
from so_tui.validation.report import Report

BAR_CELLS = 24


def validate(arguments: argparse.Namespace) -> int:
    """Measure as much as fits into the minutes, continuing an earlier report, and say where the report is.

    Returns:
        0; 1 if a measurement failed; 4 if the user stopped it, in which case the same command continues.
    """
    from so_tui.folders import validation_dir
    from so_tui.machine import inspect_machine
    from so_tui.validation import report as reports
    from so_tui.validation.sharing import shared
    from so_tui.validation.validate import SHARED, validate

    machine = inspect_machine()
    folder: Path = arguments.out or validation_dir()
    gpus = min(arguments.gpus, len(machine.gpus)) if arguments.gpus else len(machine.gpus)
    line, told = ProgressLine(shown=not arguments.quiet), ""

    def tell(text: str, share: float) -> None:
        nonlocal told
        line.show(f"{bar(share)} {text}")
        if line.hidden and text.partition(":")[0] != told:
            told = text.partition(":")[0]
            note(arguments, f"{100 * share:3.0f} % {text}", stderr=arguments.json)

    try:
        found = validate(
            machine,
            folder,
            seconds=60 * arguments.minutes,
            gpus=gpus,
            share=arguments.share,
            tell=tell,
        )
    except KeyboardInterrupt:
        line.clear()
        note(
            arguments,
            f"stopped; the same command continues. So far: {folder / 'report.md'}",
            stderr=True,
        )
        return 4
    line.clear()
    if arguments.json:
        print_json(shared(found) if arguments.share else found)
    else:
        print_rich(summary(found))
        print_rich(f"report: {folder / 'report.md'}")
        if arguments.share:
            print_rich(
                f"to share, without names of host, user and folders: {folder / SHARED / 'report.md'}"
            )
    return 1 if any(outcome.state in reports.FAILURES for outcome in found.outcomes) else 0


def summary(report: Report) -> str:
    """Return what was measured, in a sentence."""
    states = [outcome.state for outcome in report.outcomes]
    text = f"{states.count('measured')} of {len(states)} parts measured"
    left_out = "left out for lack of time: the same command continues"
    for state, said in (
        ("failed", "failed"),
        ("timed-out", "took too long"),
        ("left-out", left_out),
    ):
        text += f", {states.count(state)} {said}" if state in states else ""
    return text


def bar(share: float) -> str:
    """Return a bar of characters that every terminal has."""
    full = round(BAR_CELLS * min(1.0, max(0.0, share)))
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {100 * share:3.0f} %"
