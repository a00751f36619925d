"""The run directory: the one channel between the trainer, the supervisor and the screen."""

from so_tui.runs.directory import RunDirectory, new_attempt
from so_tui.runs.listing import create_run, default_runs_dir, find_run, list_runs
from so_tui.runs.state import read_spec, read_state, write_spec, write_state
from so_tui.runs.writer import MetricsWriter

__all__ = [
    "MetricsWriter",
    "RunDirectory",
    "create_run",
    "default_runs_dir",
    "find_run",
    "list_runs",
    "new_attempt",
    "read_spec",
    "read_state",
    "write_spec",
    "write_state",
]
