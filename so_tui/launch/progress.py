"""What the run is doing, by the trainer's own records: pure functions from records to ``RunState``."""

from __future__ import annotations

import msgspec

from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import EndRecord, RunState, State


def trainers_end(reader: MetricsReader, attempt: int) -> EndRecord | None:
    """How the trainer said that this attempt ended; None while it has not."""
    return reader.end if reader.end and reader.end.attempt == attempt else None


def last_sign(reader: MetricsReader, attempt: int, beaten_at: float) -> float:
    """When an attempt that nobody saw end was last known to live (seconds since the epoch).

    ``beaten_at``: when the supervisor that died wrote the state for the last time.
    """
    records = (reader.end, reader.latest, reader.phase, *reader.checkpoints[-1:])
    return max([beaten_at, *(record.time for record in records if record is not None and record.attempt == attempt)])


def observed(state: RunState, reader: MetricsReader, attempt: int) -> RunState:
    """``state`` with what the records of this attempt add: phase, step, loss, checkpoints."""
    start, phase, latest = reader.start, reader.phase, reader.latest
    if start is not None and start.attempt == attempt:
        state = msgspec.structs.replace(state, total_steps=start.total_steps)
    if latest is not None:
        state = msgspec.structs.replace(state, step=latest.step, loss=latest.loss)
    if phase is not None and phase.attempt == attempt:
        # A step after the last announced phase: loading or saving is over, whether or not that was announced.
        trains = latest is not None and latest.attempt == attempt and latest.time > phase.time
        now: State = "training" if trains else phase.phase
        state = msgspec.structs.replace(state, state=now, detail="" if trains else phase.detail)
    if reader.checkpoints:
        saved = reader.checkpoints[-1]
        state = msgspec.structs.replace(state, saved_step=saved.step, saved_at=saved.time)
    if (end := trainers_end(reader, attempt)) is not None and end.state != "failed":
        # Not every step is logged, and an attempt that was stopped before its first one is back at its checkpoint.
        state = msgspec.structs.replace(state, step=end.step)
    return state
