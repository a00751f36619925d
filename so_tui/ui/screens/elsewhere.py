"""Planning for another machine than this one, which a file describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.machine import load_machine

if TYPE_CHECKING:
    from so_tui.ui.app import SoTuiApp

HINT = "The file that `so-tui inspect --json > FILE` wrote there. Empty: this machine. Nothing can be started on another one from here."


def ask_for_machine(app: SoTuiApp) -> None:
    """Ask for the file of a machine, and plan for that one."""
    from so_tui.ui.screens.dialogs import AskText

    def read(file: str) -> None:
        if file:
            load_machine(Path(file).expanduser())

    def chosen(file: str | None) -> None:
        if file is not None:
            app.plan_for(load_machine(Path(file).expanduser()) if file else None, file)

    app.push_screen(AskText("Plan for another machine", HINT, app.machine_file, yes="Plan", check=read, may_be_empty=True), chosen)
