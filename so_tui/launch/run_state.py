"""The state of a run at its start, while it trains and at its end: pure functions from records to ``RunState``."""

from __future__ import annotations

import time

from msgspec.structs import replace

from so_tui.launch.outcome import Outcome
from so_tui.launch.outcome_text import OutcomeText
from so_tui.runs.host import HostIdentity
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import ENDING, EndRecord, Process, RunState, State
from so_tui.runs.unobserved import EXIT_CODES


def first_state(
    name: str,
    attempt: int,
    host: HostIdentity,
    supervisor: Process | None,
    before: RunState,
    *,
    forced: bool,
    start_over: bool = False,
    checks_s: float | None = None,
) -> RunState:
    """Return the state of an attempt that is about to start. ``before`` is the state that the previous attempt left."""
    now = time.time()
    return RunState(
        name=name,
        state="starting",
        detail="DeepSpeed's launcher starts the ranks",
        attempt=attempt,
        host=host.name,
        boot_id=host.boot_id,
        pid_namespace=host.pid_namespace,
        step=before.step,
        loss=before.loss,
        total_steps=before.total_steps,
        saved_step=None if start_over else before.saved_step,
        saved_at=None if start_over else before.saved_at,
        started=before.started or now,
        attempt_started=now,
        earlier_s=_took_s(before),
        heartbeat=before.heartbeat + 1,
        forced=forced,
        checks_s=checks_s,
        supervisor=supervisor,
        alerts=before.alerts,
    )


def queued_state(before: RunState) -> RunState:
    """Return the state of a run that waits for a job. ``before`` is the state that the previous attempt left."""
    return replace(
        before,
        state="queued",
        host="",
        supervisor=None,
        processes=(),
        ended=None,
        code="",
        reason="",
        suggestion="",
        detail="",
        exit_code=None,
        earlier_s=_took_s(before),
        heartbeat=before.heartbeat + 1,
    )


def left_queue(queued: RunState, attempt: int | None = None) -> RunState:
    """Return the final state of a run that waits for a job and will not get it; ``attempt`` if it is another than the state's."""
    now, number = time.time(), queued.attempt if attempt is None else attempt
    ended = replace(
        queued,
        state="stopped",
        attempt=number,
        detail="",
        code=OutcomeCode.STOPPED,
        exit_code=EXIT_CODES["stopped"],
    )
    return replace(ended, attempt_started=now, ended=now)  # waiting is no part of its duration


def _took_s(before: RunState) -> float:
    """Return the duration of the attempts until a state, which one that waits for a job keeps as that of the earlier ones."""
    return before.earlier_s if before.took_s is None else before.took_s


def final_state(state: RunState, outcome: Outcome, text: OutcomeText, ended: float) -> RunState:
    """Return the state after the end of an attempt; ``ended`` in seconds since the epoch."""
    return replace(
        state,
        state=outcome.state,
        ending=False,
        detail="",
        code=str(outcome.code),
        reason=text.reason,
        suggestion=text.suggestion,
        ended=ended,
        heartbeat=state.heartbeat + 1,
        exit_code=outcome.run_exit_code,
        processes=(),
    )


def superseded(mine: RunState, found: RunState) -> bool:
    """Return whether another supervisor has taken the run over, from what is recorded now.

    It can happen to a supervisor that was suspended, or cut off from the file system, for so long that the run counted as lost.
    """
    return found.attempt > mine.attempt or (
        found.attempt == mine.attempt and found.supervisor != mine.supervisor
    )


def end_record(reader: MetricsReader, attempt: int) -> EndRecord | None:
    """Return the trainer's end record of this attempt, or None."""
    return reader.end if reader.end and reader.end.attempt == attempt else None


def last_alive(reader: MetricsReader, attempt: int, heartbeat_at: float) -> float:
    """Return when an attempt with an unobserved end was last known to be alive, in seconds since the epoch.

    ``heartbeat_at`` is when the supervisor that died last wrote the state.
    """
    records = (reader.end, reader.latest, reader.phase, *reader.checkpoints[-1:])
    return max(
        [
            heartbeat_at,
            *(
                record.time
                for record in records
                if record is not None and record.attempt == attempt
            ),
        ]
    )


def observed(state: RunState, reader: MetricsReader, attempt: int) -> RunState:
    """Return ``state`` with what the records of this attempt add: phase, step, loss, checkpoints."""
    start, phase, latest = reader.start, reader.phase, reader.latest
    if start is not None and start.attempt == attempt:
        state = replace(state, total_steps=start.total_steps)
    if latest is not None:
        state = replace(state, step=latest.step, loss=latest.loss)
    if phase is not None and phase.attempt == attempt:
        # A step after the last announced phase shows that loading or saving is over, even if that was not announced.
        trains = latest is not None and latest.attempt == attempt and reader.step_after_phase
        now: State = "training" if trains else phase.phase
        over = trains and phase.phase != "training"
        state = replace(
            state,
            state=now,
            detail="" if over else phase.detail,
            ending=phase.stage == ENDING and not trains,
        )
    if reader.checkpoints:
        saved = reader.checkpoints[-1]
        state = replace(state, saved_step=saved.step, saved_at=saved.time)
    elif reader.resumes and reader.resumes[-1].attempt == attempt and reader.resumes[-1].step == 0:
        # Started over: what was saved before no longer counts. After any other resume its record is in a segment that is not read yet.
        state = replace(state, saved_step=None, saved_at=None)
    if (end := end_record(reader, attempt)) is not None:
        # Not every step is logged, and an attempt that was stopped before its first step is back at its checkpoint.
        state = replace(state, ending=True, step=state.step if end.state == "failed" else end.step)
    return state
