"""Signal handling of a rank that also works while its main thread waits in a collective."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable


def install_handlers(on_warning: Callable[[], None], on_terminate: Callable[[], None]) -> None:
    """Handle SIGUSR1 and SIGTERM in a thread.

    Python runs signal handlers only in the main thread, between two of its instructions, so they would wait for a collective. The wake-up
    descriptor, which its C code writes to, can be read by any thread.

    Args:
        on_warning: Called on SIGUSR1, a scheduler's warning.
        on_terminate: Called on SIGTERM; then the process exits with 143.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while (received := os.read(reading, 1)[0]) != signal.SIGTERM:
            if received == signal.SIGUSR1:
                _call(on_warning)
        _call(on_terminate)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _call(action: Callable[[], None]) -> None:
    """Call a handler. Its error is shown and ends nothing: without the thread that calls it, SIGTERM would not end the process."""
    try:
        action()
    except Exception:  # noqa: BLE001 -- whatever it is, later signals must be obeyed
        traceback.print_exc()
        sys.stderr.flush()
