"""Watch the memory of GPUs from outside of the processes that use it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from contextlib import suppress


class DeviceMemory:
    """Context manager that records the peak memory of the fullest GPU, read from nvidia-smi once a
    second.
    """

    def __enter__(self) -> DeviceMemory:
        self.peak_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which("nvidia-smi") and not self._end.wait(1):
            with suppress(
                OSError, subprocess.SubprocessError, ValueError
            ):  # It may be busy; the next answer will do.
                text = subprocess.run(
                    query, capture_output=True, text=True, check=True, timeout=10
                ).stdout
                self.peak_bytes = max(self.peak_bytes, *(int(line) << 20 for line in text.split()))
