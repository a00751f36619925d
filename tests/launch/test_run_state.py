"""The state of a run, derived from the trainer's records."""

from pathlib import Path

import msgspec
import pytest

from so_tui.launch.supervisor.ending import (
    Outcome,
    final_state,
    first_state,
    left_queue,
    observed,
    queued_state,
)
from so_tui.launch.supervisor.run import _last_alive
from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import (
    CheckpointRecord,
    EndRecord,
    OutcomeCode,
    PhaseRecord,
    ResumedRecord,
    RunState,
)
from so_tui.runs.records import MetricRecord as Record
from tests.support.plans import launch_with, plan_of, spec_of
from tests.support.records import step_record

SAVED = CheckpointRecord(attempt=1, time=1.0, step=5, path="step-000005", bytes=1, seconds=0.1)


BEFORE = RunState(name="r", state="training", attempt=2, saved_step=5, saved_at=1.0)


def state_after(folder: Path, *records: Record) -> RunState:
    return observed(
        RunState(name="r", state="training", step=7, attempt=records[-1].attempt),
        reader_of(folder, *records),
    )


def reader_of(folder: Path, *records: Record) -> MetricsReader:
    run = RunDirectory(folder)
    run.metrics_dir.mkdir(parents=True)
    for attempt in sorted({record.attempt for record in records}):
        writer = MetricsWriter(run, attempt)
        for record in records:
            if record.attempt == attempt:
                writer.append(record)
        writer.close()
    reader = MetricsReader(run)
    reader.poll(limit_records=100, limit_s=1.0)
    return reader


def test_an_attempt_stopped_before_its_first_step(tmp_path: Path) -> None:
    """It is where its checkpoint is."""
    end = EndRecord(attempt=2, time=2.0, state="stopped", step=5, saved="step-000005")
    state = state_after(tmp_path, SAVED, end)
    assert (state.step, state.saved_step) == (5, 5)


def test_nothing_trained_and_nothing_saved(tmp_path: Path) -> None:
    state = state_after(tmp_path, EndRecord(attempt=1, time=1.0, state="stopped", step=0))
    assert (state.step, state.saved_step) == (0, None)


def test_failure_while_loading_undoes_no_steps(tmp_path: Path) -> None:
    assert state_after(tmp_path, EndRecord(attempt=1, time=1.0, state="failed", step=0)).step == 7


def test_what_ends_is_not_said_to_save(tmp_path: Path) -> None:
    step = step_record(60, time=10.0)
    saving = PhaseRecord(attempt=1, time=11.0, phase="saving", detail="checkpoint of step 60")
    saved = msgspec.structs.replace(SAVED, time=12.0, step=60)
    ending = msgspec.structs.replace(saving, time=13.0, stage="ending", detail="ending processes")
    failed = EndRecord(attempt=1, time=11.0, state="failed", step=60)
    assert state_after(tmp_path / "a", step, saving).shown == "saving"
    ends = state_after(tmp_path / "b", step, saving, saved, ending)
    assert (ends.shown, ends.state, ends.saved_step) == ("ending", "saving", 60)
    assert state_after(tmp_path / "c", step, failed).shown == "ending"
    finished = Outcome(state="finished", code=OutcomeCode.FINISHED)
    assert final_state(ends, finished, 14.0).shown == "finished"


def test_an_unobserved_end_has_the_time_of_the_last_record(tmp_path: Path) -> None:
    """Not the time of a later supervisor, which may start days after it."""
    saved = msgspec.structs.replace(SAVED, time=90.0)
    reader = reader_of(tmp_path, saved, EndRecord(attempt=2, time=120.0, state="stopped", step=5))
    assert _last_alive(reader, 2, heartbeat_at=100.0) == 120.0
    assert _last_alive(reader, 2, heartbeat_at=130.0) == 130.0
    assert _last_alive(reader, 1, heartbeat_at=80.0) == 90.0


@pytest.mark.parametrize("back_s", [0.0, 3600.0])
def test_clock_set_back_does_not_leave_loading(back_s: float, tmp_path: Path) -> None:
    loading = PhaseRecord(attempt=1, time=10_000.0, phase="loading")
    step = step_record(3, attempt=1, time=10_001.0 - back_s)
    saving = PhaseRecord(attempt=1, time=10_002.0 - 2 * back_s, phase="saving")
    assert state_after(tmp_path / "a", loading).state == "loading"
    assert state_after(tmp_path / "b", loading, step).state == "training"
    assert state_after(tmp_path / "c", loading, step, saving).state == "saving"


def test_detail_is_shown_until_it_is_written(tmp_path: Path) -> None:
    writing = PhaseRecord(
        attempt=2, time=20.0, phase="training", detail="writing the checkpoint of step 8"
    )
    steps = [step_record(number, attempt=2, time=20.0 + number) for number in (9, 10)]
    written = PhaseRecord(attempt=2, time=40.0, phase="training")
    state = state_after(tmp_path / "a", writing, *steps)
    assert (state.state, state.detail) == ("training", writing.detail)
    assert state_after(tmp_path / "b", writing, *steps, written).detail == ""
    saving = PhaseRecord(attempt=2, time=20.0, phase="saving", detail="checkpoint of step 8")
    assert (
        state_after(tmp_path / "c", saving, *steps).detail == ""
    )  # over, although that was not announced


def test_what_was_saved_is_not_forgotten_before_it_is_read(tmp_path: Path) -> None:
    """Earlier segments are read last."""
    resumed = ResumedRecord(attempt=2, time=2.0, step=5)
    newest = step_record(6, attempt=2, time=3.0)
    known = reader_of(tmp_path, step_record(5, time=0.5), SAVED, resumed, newest)
    reader = MetricsReader(RunDirectory(tmp_path))
    reader.poll(limit_records=100, limit_s=10.0, earlier=False)
    assert not reader.events.checkpoints
    assert observed(BEFORE, reader) == observed(BEFORE, known)


def test_what_was_saved_no_longer_counts_after_starting_over(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, SAVED, ResumedRecord(attempt=2, time=2.0, step=0))
    assert observed(BEFORE, reader).saved_step is None


def test_attempts_add_up_over_queues_and_waiting_does_not_count() -> None:
    stopped = RunState(
        name="r", state="stopped", started=100.0, attempt_started=200.0, ended=260.0, earlier_s=40.0
    )
    assert stopped.took_s == 100
    queued = queued_state(stopped)
    assert left_queue(queued, 1).took_s == pytest.approx(100)
    again = first_state("r", 2, queued, launch_with(plan_of(spec_of())))
    assert again.earlier_s == 100
