"""Planning for another machine than this one, which a file describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.machine import Machine, load_machine

if TYPE_CHECKING:
    from so_tui.ui.app import SoTuiApp

HINT = "The file that `so-tui inspect --json > FILE` wrote there. Empty: this machine. Nothing can be started on another one from here."


def ask_for_machine(app: SoTuiApp) -> None:
    """Ask for the file of a machine, and plan for that one."""
    from so_tui.ui.screens.dialogs import AskText

    def read(file: str) -> tuple[Machine | None, str]:
        return (load_machine(Path(file).expanduser()) if file else None), file

    def chosen(described: tuple[Machine | None, str] | None) -> None:
        if described is not None:
            app.plan_for(*described)

    app.push_screen(AskText("Plan for another machine", HINT, app.machine_file, yes="Plan", read=read, may_be_empty=True), chosen)
