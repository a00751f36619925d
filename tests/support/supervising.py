"""Start a supervisor by hand, as ``start`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from so_tui.runs import RunDirectory


def supervise_to_end(
    run: RunDirectory, attempt: int = 1, environ: Mapping[str, str] = os.environ
) -> int:
    """Start the attempt under a supervisor, and return the exit code of its end."""
    command = [sys.executable, "-m", "so_tui", "supervise", str(run.path)]
    command += ["--attempt", str(attempt)]
    return subprocess.run(command, timeout=60, check=False, env=environ).returncode
