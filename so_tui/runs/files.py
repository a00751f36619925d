"""Write the small files of a run directory."""

from __future__ import annotations

from pathlib import Path

from so_tui.runs.directory import RunDirectory
from so_tui.spec.files import write_atomic
from so_tui.trust.sharing import file_mode_of


def write_run_file(run: RunDirectory, path: Path, content: bytes) -> None:
    """Replace a file of a run atomically. Others can read it only if the run is shared with the group.

    Raises:
        OSError: If writing fails; the old file is unchanged.
    """
    write_atomic(path, content, mode=file_mode_of(run.path))
