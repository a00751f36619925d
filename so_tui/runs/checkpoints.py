"""Where a run's checkpoints are, as far as names tell. The trainer verifies their content.

Refusal codes:
    checkpoint-missing: The run saved checkpoints, and none of them is there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import RunState
from so_tui.spec.errors import Refusal
from so_tui.spec.types import RunSpec
from so_tui.trust.printable import quoted
from so_tui.units import thousands

_NAME = re.compile(r"step-\d{6,12}")


def checkpoints_folder(run: RunDirectory, spec: RunSpec) -> Path:
    """Return the folder of a run's checkpoints. A folder that the spec names may serve several runs, each with a folder in it."""
    return (
        Path(spec.checkpoint.folder).expanduser() / run.name
        if spec.checkpoint.folder
        else run.checkpoints_dir
    )


def checkpoint_folders(folder: Path) -> tuple[Path, ...]:
    """Return the folders that have a checkpoint's name, by step; none if the folder is missing or cannot be read."""
    try:
        return listed_checkpoints(folder)
    except OSError:
        return ()


def listed_checkpoints(folder: Path) -> tuple[Path, ...]:
    """Return the folders that have a checkpoint's name, by step; none if the folder is missing. Raises OSError if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(folder / name for name in sorted(names, key=step_of))


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(name.removeprefix("step-"))


def missing_checkpoints(run: RunDirectory, spec: RunSpec, state: RunState) -> Refusal | None:
    """Return why a run cannot be resumed from what it saved: nothing of it is there, such as on a file system that is not mounted."""
    folder = checkpoints_folder(run, spec)
    if state.saved_step is None or checkpoint_folders(folder):
        return None
    command = quoted("so-tui", "resume", run.name, "--start-over")
    there = (
        f"the run saved step {thousands(state.saved_step)} in {folder}, and no checkpoint is there"
    )
    message = f"{there}. Mount its file system, or train from step 0 again: {command}"
    return Refusal("checkpoint-missing", message)
