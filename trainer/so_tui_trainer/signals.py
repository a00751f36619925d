"""What a rank does about signals, also while its main thread waits in a collective."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def install_handlers(warned: Callable[[], None], ended: Callable[[], None]) -> None:
    """On USR1, a scheduler's warning, call ``warned``. On TERM call ``ended`` and leave at once, with 143.

    Both are called in a thread, even when the main thread waits for a rank that will never come: Python runs signal handlers in the main
    thread only, and between two instructions of it; what its C part writes to the wake-up descriptor is seen by any thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while (received := os.read(reading, 1)[0]) != signal.SIGTERM:
            if received == signal.SIGUSR1:
                warned()
        ended()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="signals", daemon=True).start()
