"""Lines in a supervisor's own log, which is its stderr."""

from __future__ import annotations

import contextlib
import sys

from so_tui.trust.printable import brief_message


def log_line(text: str) -> None:
    """Log a line. One that cannot be written, as on a full disk, is left out: the run goes on."""
    with contextlib.suppress(OSError):
        print(brief_message(text), file=sys.stderr, flush=True)
