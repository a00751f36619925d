"""How an attempt ended that nobody supervised at its end, from what its processes left: readers compute it, and nothing is started.

Problem codes:
    unreadable-records: The records, which say how it ended, cannot be read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from msgspec.structs import replace

from so_tui.runs.codec import decode_metric
from so_tui.runs.directory import RunDirectory
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import CheckpointRecord, EndRecord, MetricRecord, RunState
from so_tui.runs.segments import segments
from so_tui.spec.errors import InputError, Problem
from so_tui.trust.reading import UnfitFileError, open_regular

EXIT_CODES: dict[str, int] = {"finished": 0, "failed": 1, "stopped": 4, "lost": 1}
"""Exit code for each final state."""

_END_BYTES = 1 << 16
_CODES: dict[str, OutcomeCode] = {
    "finished": OutcomeCode.FINISHED,
    "stopped": OutcomeCode.STOPPED,
    "failed": OutcomeCode.UNEXPECTED,
}


def concluded(run: RunDirectory, state: RunState) -> RunState:
    """Return the final state of an attempt whose processes are gone: as its end record says, without one ``lost``. Raises InputError."""
    records = _last_records(run, state.attempt)
    saved = next((record for record in records if isinstance(record, CheckpointRecord)), None)
    if saved is not None:
        state = replace(state, saved_step=saved.step, saved_at=saved.time)
    if (
        end := next((record for record in records if isinstance(record, EndRecord)), None)
    ) is not None:
        return replace(
            state,
            state=end.state,
            step=end.step,
            code=end.code or _CODES[end.state],
            reason=end.reason,
            suggestion=end.suggestion,
            ended=end.time,
            exit_code=EXIT_CODES[end.state],
        )
    return replace(
        state,
        state="lost",
        code=OutcomeCode.UNOBSERVED,
        reason=state.reason
        or f"every process of the run on {state.host} has ended, and the trainer recorded no result",
        suggestion=state.suggestion
        or "Read the end of its log; `so-tui resume` continues from the last checkpoint.",
        ended=_last_alive(run, records),
        exit_code=EXIT_CODES["lost"],
    )


def _last_alive(run: RunDirectory, records: Sequence[MetricRecord]) -> float | None:
    """Return when the run was last known to be alive: the later of its last state and its last record."""
    times = [record.time for record in records]
    with contextlib.suppress(OSError):
        times.append(run.state_path.stat().st_mtime)
    return max(times, default=None)


def _last_records(run: RunDirectory, attempt: int) -> tuple[MetricRecord, ...]:
    """Return the records of an attempt at the end of the newest segment, the last one first. Raises InputError."""
    try:
        newest = next(reversed(segments(run.metrics_dir).values()), None)
        if newest is None:
            return ()
        with open_regular(newest) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
            lines = file.read(_END_BYTES).split(b"\n")
    except UnfitFileError:  # a pipe or a device is no segment
        return ()
    except OSError as error:
        message, remedy = (
            f"its records cannot be read: {error.strerror or error}",
            "Check the folder's rights, and that it is mounted.",
        )
        problem = Problem(
            code="unreadable-records",
            field="run",
            value=str(run.metrics_dir),
            message=message,
            remedy=remedy,
        )
        raise InputError([problem]) from error
    records = (decode_metric(line) for line in reversed(lines))
    return tuple(record for record in records if record is not None and record.attempt == attempt)
