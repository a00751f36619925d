"""The first paint: how much more it costs than that of an empty application, and what it does not import."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

SCRIPT = Path(__file__).with_name("first_paint.py")
BUDGET_S = 0.10
"""Process time above an empty Textual application with as many tabs; process time, so that a busy machine counts little."""


def first_paint_s(*arguments: str) -> float:
    """Process time at the first paint, in a pty of 120x36."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, str(SCRIPT), *arguments]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True):
        os.close(terminal)
        written = b""
        while True:
            try:
                block = os.read(controller, 65536)
            except OSError:  # how the end of a pty shows itself on Linux
                break
            if not block:
                break
            written += block
    os.close(controller)
    found = re.search(rb"first paint ([0-9.]+)", written)
    assert found, written.decode(errors="replace")[-2000:]
    return float(found[1])


def test_first_paint_costs_little_more_than_an_empty_application(runs_dir: Path) -> None:
    # Noise only ever adds: the least of several is what the program costs. More rounds only where the first are over.
    empty: list[float] = []
    ours: list[float] = []
    for _ in range(15):
        empty.append(first_paint_s("empty"))
        ours.append(first_paint_s("real", str(runs_dir)))
        if len(ours) >= 2 and min(ours) - min(empty) <= 0.8 * BUDGET_S:
            break
    assert min(ours) - min(empty) <= BUDGET_S, (empty, ours)


def test_the_first_screen_imports_no_planner_and_no_inspection() -> None:
    code = (
        "import sys; import so_tui.ui.app, so_tui.ui.screens.presets; "
        "heavy = tuple(f'so_tui.{name}' for name in ('spec', 'machine', 'plan', 'runs', 'launch')) + ('psutil',); "
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
