"""Leave the application: ask where something would be lost, and say what goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from so_tui.trust.printable import printable_line, so_tui_command
from so_tui.ui.dialogs.basic import QuitQuestion
from so_tui.ui.screens.configure import ConfigureScreen
from so_tui.ui.text import plural

if TYPE_CHECKING:
    from so_tui.ui.shared_app import SharedApp


def ask_to_leave(app: SharedApp) -> None:
    """Leave. Ask first where unsaved edits in Configure would be lost."""
    try:
        bottom = app.get_screen_stack("configure")[:1]
    except KeyError:  # never opened
        bottom = []
    unsaved = bottom[0].unsaved() if bottom and isinstance(bottom[0], ConfigureScreen) else {}
    if not unsaved:
        _leave(app)
    elif not isinstance(app.screen, QuitQuestion):
        lines = [
            f"Configure: {plural(count, 'change')} to preset {preset}, not saved"
            for preset, count in unsaved.items()
        ]
        question = QuitQuestion("Quit and lose unsaved changes?", lines, yes="Quit", no="No, stay")
        app.push_screen(question, lambda yes: _leave(app) if yes else None)


def _leave(app: SharedApp) -> None:
    live = [row.run.name for row in app.runs if row.live]
    lines = []
    if live:
        names, goes_on = (
            printable_line(", ".join(live)),
            "continues" if len(live) == 1 else "continue",
        )
        lines.append(
            f"{names} {goes_on} training. `{so_tui_command('watch', live[0])}` shows it again."
        )
    if app.starting:
        lines.append(f"{app.starting} is still being started. `so-tui watch latest` shows it.")
    app.restore_title()
    app.exit(message="\n".join(lines) or None)
