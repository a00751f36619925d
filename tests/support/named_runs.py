"""Runs whose names a test chooses."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from so_tui.runs import RunDirectory, create_run, read_state, write_state
from so_tui.runs.directory import write_manifest
from so_tui.spec import RunSpec


def named_run(spec: RunSpec, runs_dir: Path | None, name: str) -> RunDirectory:
    """Create a run and rename it, for ``create_run`` ends each name with random letters."""
    made = create_run(spec, runs_dir).path
    run = RunDirectory(made.rename(made.with_name(name)))
    write_state(run, replace(read_state(run), name=name))
    write_manifest(run)
    return run
