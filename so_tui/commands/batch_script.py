"""Runs whose batch script the user gives: changed in an editor before it is submitted, or read from a file.

What was changed is never lost: if the submission fails, the script is kept, and submitted again or named.

Problem codes:
    nothing-to-edit: The run starts on this machine, without a batch script.
    unused-option: Nothing is submitted.
    script-unreadable: The file of the script is missing, no text, or larger than any script.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from so_tui.commands.common import usable_terminal
from so_tui.launch import Launch, start
from so_tui.launch.executors import executor_of
from so_tui.launch.executors.slurm.editing import Draft, edited, kept
from so_tui.launch.executors.slurm.executor import SlurmExecutor
from so_tui.launch.executors.slurm.script import for_run
from so_tui.runs import RunDirectory
from so_tui.spec import InputError, Problem, RunSpec, SoTuiError
from so_tui.trust.printable import quoted
from so_tui.trust.reading import read_bounded

_MOST_BYTES = 1 << 20


class ScriptChoice:
    """The user's batch script: from a file, from an editor, or from both."""

    def __init__(self, *, given: str, edits: bool) -> None:
        """Begin with the script ``given``; with the generated one if it is empty. If ``edits``, the user changes it in an editor."""
        self.script = given
        self._edits = edits
        self._generated = ""

    def __call__(self, generated: str) -> str:
        """Return the script to submit instead of a generated one."""
        begun = for_run(self.script, generated) if self.script else generated
        self.script = edited(begun) if self._edits else begun
        self._generated = generated
        return self.script

    @property
    def is_changed(self) -> bool:
        """Whether the user would lose something with it."""
        return self._edits and self.script not in ("", self._generated)


def refuse_script(spec: RunSpec, option: str, *, dry_run: bool) -> None:
    """Raise InputError if an option of batch scripts is given and none will be submitted."""
    if dry_run:
        message, remedy = (
            "has no effect with --dry-run, which prints the script that so-tui would submit",
            "Leave one of them out.",
        )
        raise InputError(
            [Problem(code="unused-option", field=option, value="", message=message, remedy=remedy)]
        )
    if executor_of(spec).here:
        message, remedy = (
            "needs a batch script, and this run starts on this machine",
            "Name a partition with --partition.",
        )
        raise InputError(
            [
                Problem(
                    code="nothing-to-edit",
                    field=option,
                    value=spec.name,
                    message=message,
                    remedy=remedy,
                )
            ]
        )


def read_script(path: Path) -> str:
    """Return a script that was kept or written by hand. Raises InputError."""
    try:
        return read_bounded(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        message, remedy = f"cannot be read: {error}", "Name a batch script that --edit kept."
        raise InputError(
            [
                Problem(
                    code="script-unreadable",
                    field="--script",
                    value=str(path),
                    message=message,
                    remedy=remedy,
                )
            ]
        ) from error


def start_with_script(
    launch: Launch, choice: ScriptChoice, arguments: argparse.Namespace
) -> RunDirectory:
    """Start a run with the user's script, again and again while it is refused and the user wants to change it.

    Raises:
        SoTuiError: As ``start``, once the user gives up. A changed script is in a file, and stderr names it.
    """
    draft: Draft | None = None
    while True:
        try:
            run = start(launch, runs_dir=arguments.runs_dir, executor=SlurmExecutor(edit=choice))
        except BaseException as error:
            if not choice.is_changed:
                raise
            draft = kept(choice.script, launch.spec.name, draft)
            again = isinstance(error, SoTuiError) and usable_terminal() and _wants_again(error)
            if not again:
                file = quoted(str(draft.path))
                print(
                    f"so-tui: your script is kept. To submit it: the same command with --script {file}",
                    file=sys.stderr,
                )
                raise
        else:
            if draft is not None:
                draft.discard()
            return run


def _wants_again(error: SoTuiError) -> bool:
    print(f"so-tui: {error}", file=sys.stderr)
    try:
        answer = input("Change the script and submit it again? [Y/n] ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower() in ("", "y", "yes")
