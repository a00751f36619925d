"""A screen whose terminal vanishes without SIGHUP ends instead of reading nothing for ever."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.support.waiting import LIMIT_S

IGNORING_HANGUP = (
    "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from so_tui.cli import "
    "main; sys.exit(main())"
)


def test_a_screen_that_lost_its_terminal_ends(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", IGNORING_HANGUP]
    screen = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    painted, deadline = 0, time.monotonic() + LIMIT_S
    while painted < 2_000 and time.monotonic() < deadline:
        if select.select([controller], [], [], 0.5)[0]:
            painted += len(os.read(controller, 65536))
    os.close(controller)
    try:
        assert screen.wait(timeout=LIMIT_S) >= 0
    finally:
        screen.kill()
