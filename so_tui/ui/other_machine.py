"""Plan for another machine: one that is known by name, or one that a file describes."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path

from textual.suggester import Suggester
from textual.widgets import Input

from so_tui.machine import Machine
from so_tui.machine.known import MACHINES, machine_of
from so_tui.ui.shared_app import SharedApp

HINT = (
    "Up, down or a click choose one, as published, not measured; or give a file that `so-tui "
    "inspect --json > FILE` wrote there (right arrow completes). Runs start on this machine only."
)
_MOST_ENTRIES = 2000


class _MachineSuggester(Suggester):
    """Completes names of machines and paths of files."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        named = next((name for name in MACHINES if name.startswith(value)), None) if value else None
        return named or await asyncio.to_thread(_path_that_begins_with, value)


def ask_for_machine(app: SharedApp) -> None:
    """Ask for a machine, and plan for it."""
    from so_tui.ui.dialogs import AskText, show_dialog

    def read(given: str) -> tuple[Machine | None, str]:
        return (machine_of(given) if given else None), given

    dialog = AskText(
        "Plan for another machine",
        HINT,
        Input(app.machine_file, compact=True, suggester=_MachineSuggester()),
        yes="Plan",
        read=read,
        may_be_empty=True,
        choices=[
            ("", "this machine"),
            *(
                (name, f"{machine.title}\n  from {machine.source}")
                for name, machine in MACHINES.items()
            ),
        ],
    )
    show_dialog(app, dialog, lambda described: app.load(*described))


def _path_that_begins_with(text: str) -> str | None:
    """Return the first path in alphabetical order that continues a text with a slash; None if there
    is none that can be shown.
    """
    if "/" not in text:
        return None
    folder, _, begin = text.rpartition("/")
    try:
        entries = islice(Path(folder or "/").expanduser().iterdir(), _MOST_ENTRIES)
        names = sorted(entry.name for entry in entries)
    except (OSError, RuntimeError):  # there is no such folder, or no such user
        return None
    shown = (name for name in names if name.isprintable() and (begin or name[0] != "."))
    return next((f"{folder}/{name}" for name in shown if name.startswith(begin)), None)
