"""The run directory: the only channel between the trainer, the supervisor and the screen.

Only rank 0 writes metrics, and only the supervisor writes state and samples and trims the log. All
others read by polling.
"""

from so_tui.runs.directory import RunDirectory, deleted, new_attempt
from so_tui.runs.listing import checked_name, create_run, delete_run, find_run, list_runs
from so_tui.runs.liveness import HeartbeatWatch, alive, state_with_truth
from so_tui.runs.metrics import MetricsWriter
from so_tui.runs.reader import LogLine, LogReader, RunReader, Update, log_readers
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import read_spec, read_state, readable_spec, write_spec, write_state

__all__ = [
    "HeartbeatWatch",
    "LogLine",
    "LogReader",
    "MetricsWriter",
    "RunDirectory",
    "RunReader",
    "SampleWriter",
    "Update",
    "alive",
    "checked_name",
    "create_run",
    "delete_run",
    "deleted",
    "find_run",
    "list_runs",
    "log_readers",
    "new_attempt",
    "read_spec",
    "read_state",
    "readable_spec",
    "state_with_truth",
    "write_spec",
    "write_state",
]
