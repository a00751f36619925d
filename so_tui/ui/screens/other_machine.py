"""Plan for another machine, which a file describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.machine import Machine, load_machine

if TYPE_CHECKING:
    from so_tui.ui.app import SoTuiApp

HINT = "A file that `so-tui inspect --json > FILE` wrote on that machine. Empty: this machine. Runs start on this machine only."


def ask_for_machine(app: SoTuiApp) -> None:
    """Ask for the file that describes a machine, and plan for that machine."""
    from so_tui.ui.screens.dialogs import AskText

    def read(file: str) -> tuple[Machine | None, str]:
        return (load_machine(Path(file).expanduser()) if file else None), file

    def chosen(described: tuple[Machine | None, str] | None) -> None:
        if described is not None:
            app.plan_for(*described)

    app.push_screen(AskText("Plan for another machine", HINT, app.machine_file, yes="Plan", read=read, may_be_empty=True), chosen)
