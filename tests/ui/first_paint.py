"""Run in a pty: prints the process time at the first paint of an application, and which modules of
so-tui it has imported by then.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def empty() -> float | None:
    """Return that of a Textual application with as many tabs as so-tui has screens."""
    from textual.app import App, ComposeResult
    from textual.widgets import Footer, TabbedContent, TabPane

    class Empty(App[float]):
        def compose(self) -> ComposeResult:
            with TabbedContent():
                for title in ("Presets", "Configure", "Dashboard", "Runs", "Machine"):
                    yield TabPane(title)
            yield Footer()

        def on_mount(self) -> None:
            self.call_after_refresh(lambda: self.exit(time.process_time()))

    return Empty().run()


def real(runs_dir: str) -> float:
    """Return that of so-tui itself, as the command line opens it."""
    from so_tui.ui import app

    class FirstPaint(app.SoTuiApp):
        CSS_PATH = str(Path(app.__file__).with_name("app.tcss"))
        painted_s = 0.0

        def _after_first_paint(self) -> None:
            self.painted_s = time.process_time()
            self.imported = [name for name in sys.modules if name.startswith("so_tui.")]
            self.exit()

    shown = FirstPaint(runs_dir=Path(runs_dir))
    shown.run()
    print("imported", *shown.imported)
    return shown.painted_s


if __name__ == "__main__":
    print(f"first paint {empty() if sys.argv[1] == 'empty' else real(sys.argv[2])}")
