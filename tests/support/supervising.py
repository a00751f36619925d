"""Start a supervisor by hand, as ``start`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from so_tui.launch.launch import write_launch
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory, create_run, new_attempt


def prepared_run(launch: Launch, folder: Path) -> RunDirectory:
    """Make a run with an attempt that nobody has started."""
    run = create_run(launch.spec, folder)
    write_launch(run, new_attempt(run), launch)
    return run


def supervise_to_end(
    run: RunDirectory, attempt: int = 1, environ: Mapping[str, str] = os.environ
) -> int:
    """Start the attempt under a supervisor, and return the exit code of its end."""
    command = [sys.executable, "-m", "so_tui", "supervise", str(run.path)]
    command += ["--attempt", str(attempt)]
    return subprocess.run(command, timeout=60, check=False, env=environ).returncode
