"""Time and memory that commands take for small inputs which would take a careless reader hours or
gigabytes: ``python -m benchmarks.heavy_inputs [PART OF A NAME ...]``.

CPU time counts, which a busy machine does not change much. A command that takes more than 5 GB or
240 s is ended.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.heavy_inputs import INPUTS

_MOST_BYTES = 5_000_000_000
_LONGEST_S = 240.0


def _measured(command: list[str], folder: Path) -> str:
    """Run a command, and return its time, the memory of its processes and what it said."""
    said = folder / "said"
    homes = {f"XDG_{name}_HOME": str(folder / name) for name in ("CACHE", "CONFIG", "STATE")}
    began, most, ending, before = time.monotonic(), 0, "", _cpu_s()
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "so_tui", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **homes, "HF_HOME": str(folder / "hub")},
            start_new_session=True,
        )
        while process.poll() is None:
            most = max(most, _tree_bytes(process.pid))
            if most > _MOST_BYTES or time.monotonic() - began > _LONGEST_S:
                ending = "  ENDED"
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with suppress(psutil.Error):
                        each.send_signal(signal.SIGKILL)
            time.sleep(0.02)
    lines = said.read_text(errors="replace").strip().splitlines() or [""]
    return (
        f"{_cpu_s() - before:6.1f} s {most / 1e9:5.1f} GB  exit {process.returncode}{ending}, "
        f"{len(lines)} lines: {lines[-1][:300]}"
    )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tree_bytes(pid: int) -> int:
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                found = each.memory_info()
                total += found.rss - found.shared
    return total


def main() -> None:
    for name, make in INPUTS.items():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = make(Path(folder))
            print(f"{name:32} {_measured(command, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
