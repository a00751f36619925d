"""Whether the terminal of the screen is still there."""

from __future__ import annotations

import select
from typing import TextIO


def terminal_lost(terminal: TextIO | None) -> bool:
    """Return whether nobody holds the other end of a terminal any more: its window was closed, or its connection lost."""
    if terminal is None or terminal.closed:
        return True
    watch = select.poll()
    watch.register(terminal.fileno(), 0)  # POLLHUP and POLLERR are always reported
    return bool(watch.poll(0))
