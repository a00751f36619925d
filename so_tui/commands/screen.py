"""``so-tui`` without a command: the screen."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.commands.common import usable_terminal
from so_tui.runs import RunDirectory

if TYPE_CHECKING:
    from so_tui.launch import Launch

NO_TERMINAL = """\
so-tui: the screen needs a terminal (stdin or stdout is not one, or TERM is dumb). These commands need none:
  so-tui inspect              what this machine has        so-tui run PRESET --plain   train, printing progress lines
  so-tui plan [PRESET]        what fits here, how fast     so-tui watch RUN --plain    follow a run
  so-tui presets              what can be trained          so-tui runs                 every run
`so-tui --help` lists them all."""


def open_screen(arguments: argparse.Namespace) -> int:
    """Open the screen with the presets."""
    if not usable_terminal():
        print(NO_TERMINAL, file=sys.stderr)
        return 2
    show_screen(arguments.runs_dir, machine_file=arguments.machine or "")
    return 0


def show_launch(runs_dir: Path | None, launch: Launch) -> RunDirectory | None:
    """Run the Textual application on a launch, from its checks on, until the user leaves it.

    Returns:
        The run; None if the user left while it was checked.

    Raises:
        InputError: As for ``preflight`` and ``start``; Refused, too.
    """
    from so_tui.settings.file import load_settings
    from so_tui.ui.app import SoTuiApp

    logging.disable(logging.INFO)
    app = SoTuiApp(runs_dir=runs_dir, launch=launch, settings=load_settings())
    app.run()
    if app.refused is not None:
        raise app.refused
    return app.launched


def show_screen(
    runs_dir: Path | None, open_run: RunDirectory | None = None, *, machine_file: str = ""
) -> None:
    """Run the Textual application until the user leaves it. ``machine_file`` names or describes another machine to plan for."""
    from so_tui.machine.described import machine_of
    from so_tui.settings.file import load_settings
    from so_tui.ui.app import SoTuiApp

    machine = machine_of(machine_file) if machine_file else None
    logging.disable(logging.INFO)  # --verbose would write over the screen
    SoTuiApp(
        machine=machine,
        machine_file=machine_file,
        runs_dir=runs_dir,
        open_run=open_run,
        settings=load_settings(),
    ).run()
