"""How an attempt ended, its state by its records, and when processes are killed."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from so_tui.launch import DEFAULT_GRACE_S, EXIT_GRACE_S, KILL_AFTER_S
from so_tui.launch.supervisor import ending
from so_tui.launch.supervisor.processes import Loss
from so_tui.launch.supervisor.run import _last_alive
from so_tui.runs import RunDirectory
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import (
    CheckpointRecord,
    EndRecord,
    MetricRecord,
    OutcomeCode,
    PhaseRecord,
    Process,
    ResumedRecord,
    RunState,
)
from so_tui.runs.state import Failure
from tests.support.plans import launch_with, plan_of, spec_of
from tests.support.records import append_records, step_record

RANK = Process(pid=30, start_time=3, role="rank", rank=2)
LAUNCHER = Process(pid=20, start_time=2, role="launcher")
RUNNER = Process(pid=10, start_time=1, role="runner")
OUT_OF_MEMORY = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"
)
EXITS = "[launch.py] ['python'] exits with return code ="
NOT_FINITE = Failure(rank=3, code="not-finite", reason="the loss is not finite")
OF_OTHERS = Failure(rank=0, code="rank-lost", reason="another was lost", suggestion="look")
SAID, OLDER = "rank 3: the loss is not finite", Failure(rank=0, reason="bad luck")
KILLED, LEFT = (Loss(RANK, code, unprompted=True) for code in (-9, 143))
C = OutcomeCode


def end_record(state: Any = "failed", **values: Any) -> EndRecord:
    return EndRecord(attempt=1, time=0.0, step=9, state=state, **values)


CLOSED = end_record(code="rank-lost", reason="another was lost")


def test_end_record_counts_whatever_the_exit_codes() -> None:
    finished = ending.conclude(seen(Loss(LAUNCHER), end=end_record("finished"), runner_status=1))
    assert (finished.code, finished.run_exit_code) == (C.FINISHED, 0)
    stopped = ending.conclude(
        ending.Evidence(end=end_record("stopped", reason="stopped on request"))
    )
    assert (stopped.code, stopped.run_exit_code) == (C.STOPPED, 4)
    assert ending.outcome_text(stopped, "r") == ("stopped on request", "")


def seen(loss: Loss | None, *log: str, **others: Any) -> ending.Evidence:
    return ending.Evidence(first_loss=loss, log=log, **others)


@pytest.mark.parametrize(
    ("evidence", "code", "others"),
    [
        # Exit code 0 without an end record is a failure.
        (seen(None, runner_status=0), C.UNEXPECTED, {}),
        (seen(Loss(LAUNCHER), runner_status=0), C.LAUNCHER_LOST, {"who": "launcher", "pid": 20}),
        (seen(Loss(LAUNCHER), runner_status=-15), C.LAUNCHER_LOST, {"signal": None}),
        (seen(Loss(RUNNER, -9)), C.RUNNER_LOST, {"rank": None, "signal": 9}),
        (seen(Loss(RANK, -11)), C.RANK_LOST, {"rank": 2, "signal": 11}),
        (seen(Loss(RANK), f"{EXITS} -7"), C.RANK_LOST, {"rank": 2, "signal": 7}),
        # A rank obeys SIGTERM and leaves by itself.
        (seen(Loss(RANK, 143)), C.RANK_LOST, {"rank": 2, "signal": 15}),
        # A launcher that reported a rank is not the cause.
        (seen(Loss(LAUNCHER), f"{EXITS} -9"), C.RANK_LOST, {"rank": None, "signal": 9}),
        (seen(Loss(RANK, 3)), C.UNEXPECTED, {"reason": "rank 2 ended with exit code 3"}),
        # What a rank reported comes first; a file of an older version has no code.
        (seen(Loss(RANK, 1), failures=(NOT_FINITE,)), C.NON_FINITE, {"rank": 3, "reason": SAID}),
        (seen(None, failures=(OLDER,)), C.UNEXPECTED, {"reason": "rank 0: bad luck"}),
        # Rank 2 is killed. Rank 0 sees its connection close, and reports that as its own failure
        # and in the end record.
        (seen(KILLED, failures=(OF_OTHERS,), end=CLOSED), C.RANK_LOST, {"rank": 2, "reported": ""}),
        (seen(KILLED, failures=(OF_OTHERS,), oom_kills=1), C.KILLED_FOR_MEMORY, {}),
        (seen(LEFT, failures=(OF_OTHERS,), end=CLOSED), C.RANK_LOST, {"signal": 15}),
        # A rank that others ended, or that reported, is not lost.
        (seen(Loss(RANK, -15), failures=(NOT_FINITE,)), C.NON_FINITE, {}),
        (seen(KILLED, failures=(replace(NOT_FINITE, rank=2),)), C.NON_FINITE, {}),
        # A full disk loses the trainer's records.
        (seen(Loss(RANK, 1), disk_full=True), C.DISK_FULL, {}),
        (seen(Loss(RANK, 1), disk_full=True, failures=(NOT_FINITE,)), C.NON_FINITE, {}),
        # The out-of-memory killer is blamed only for a SIGKILL.
        (seen(Loss(RANK, -9), oom_kills=2), C.KILLED_FOR_MEMORY, {"count": 2}),
        (seen(Loss(RANK), f"{EXITS} 1", oom_kills=1), C.UNEXPECTED, {}),
    ],
)
def test_cause_is_concluded(evidence: ending.Evidence, code: str, others: dict[str, Any]) -> None:
    outcome = ending.conclude(evidence)
    assert (outcome.state, outcome.run_exit_code, outcome.code) == ("failed", 1, code)
    found = asdict(outcome) | {"reason": ending.outcome_text(outcome, "r")[0]}
    assert {name: found[name] for name in others} == others


@pytest.mark.parametrize(
    ("line", "code", "detail"),
    [
        (OUT_OF_MEMORY, C.OUT_OF_GPU_MEMORY, "CUDA out of memory. Tried to allocate 2 GiB"),
        ("OSError: [Errno 28] No space left on device: '/x'", C.DISK_FULL, ""),
        ("RuntimeError: Address already in use", C.PORT_IN_USE, ""),
        ("ModuleNotFoundError: No module named 'datasets'", C.MODULE_MISSING, "datasets"),
        ("[rank1]: ValueError: bad shape", C.UNEXPECTED, "ValueError: bad shape"),
    ],
)
def test_failures_of_others_are_recognised(line: str, code: OutcomeCode, detail: str) -> None:
    outcome = ending.conclude(seen(Loss(RANK), "Traceback (most ...):", line, f"{EXITS} 1"))
    assert (outcome.code, outcome.detail) == (code, detail)
    assert detail in ending.outcome_text(outcome, "r")[0]


@pytest.mark.parametrize(
    ("saved", "resuming"),
    [
        (None, "Nothing had been saved: `so-tui resume r{}` starts from the beginning"),
        (40, "`so-tui resume r{}` continues from step 40"),
    ],
)
def test_suggestion_says_how_to_resume(saved: int | None, resuming: str) -> None:
    """With other settings only where those help."""
    advice = "train.micro_batch {8} -> 4 needs 3 GiB less on each GPU (predicted)"
    failed = Failure(rank=1, code="disk-full", reason="it failed", suggestion=advice)
    for evidence, changed in (
        (seen(None, OUT_OF_MEMORY), True),
        (seen(Loss(RANK, -9), oom_kills=1), True),
        (seen(None, end=end_record(code="data-columns-unknown", suggestion=advice)), True),
        (seen(None, failures=(failed,)), False),
        (seen(None, failures=(replace(failed, code="a-code-of-a-newer-version"),)), False),
    ):
        _, suggestion = ending.outcome_text(ending.conclude(evidence), "r", saved, advice)
        assert suggestion == f"{advice}. {resuming.format(' --set KEY=VALUE' * changed)}"
    without = Failure(rank=0, code="error", reason="it failed")
    _, suggestion = ending.outcome_text(
        ending.conclude(seen(None, failures=(without,))), "r", saved
    )
    assert suggestion == resuming.format("")


@pytest.mark.parametrize("code", ["checkpoints-unreadable", "checkpoint-missing"])
def test_nothing_saved_that_can_be_read_promises_no_step(code: str) -> None:
    failed = Failure(rank=0, code=code, reason="it failed", suggestion="start over")
    _, suggestion = ending.outcome_text(ending.conclude(seen(None, failures=(failed,))), "r", 4)
    assert suggestion == "start over"


def test_every_code_of_the_supervisor_has_words() -> None:
    outcome = ending.conclude(ending.Evidence(gone_unseen=True))
    assert (outcome.state, outcome.code) == ("lost", C.UNOBSERVED)
    assert {*OutcomeCode} - {C.FINISHED, C.STOPPED, C.ERROR} <= ending._wordings().keys()
    known: dict[str, Any] = {"detail": "detail", "count": 1, "limit_s": 1.0, "pid": 1}
    for code in OutcomeCode:
        reason, suggestion = ending.outcome_text(
            ending.Outcome(code=code, who="rank", rank=0, **known), "r"
        )
        assert reason
        assert "so-tui resume r" in suggestion


SAVED = CheckpointRecord(attempt=1, time=1.0, step=5, path="step-000005", bytes=1, seconds=0.1)


def reader_of(folder: Path, *records: MetricRecord) -> MetricsReader:
    run = RunDirectory(folder)
    run.metrics_dir.mkdir(parents=True)
    for attempt in sorted({record.attempt for record in records}):
        own = (record for record in records if record.attempt == attempt)
        append_records(run, *own, attempt=attempt)
    reader = MetricsReader(run)
    reader.poll(limit_records=100, limit_s=1.0)
    return reader


def phase(name: Any, time: float = 20.0, **others: Any) -> PhaseRecord:
    return PhaseRecord(attempt=1, time=time, phase=name, **others)


WRITING = "writing the checkpoint of step 8"
STEPS = step_record(9, time=21.0), step_record(10, time=22.0)
ENDS = phase("saving", 24.0, stage="ending", detail="ending processes")


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        # An attempt that was stopped before its first step is where its checkpoint is.
        ([SAVED, end_record("stopped")], {"step": 9, "saved_step": 5}),
        (
            [EndRecord(attempt=1, time=1.0, state="stopped", step=0)],
            {"step": 0, "saved_step": None},
        ),
        # A failure while loading undoes no steps.
        ([EndRecord(attempt=1, time=1.0, state="failed", step=0)], {"step": 7, "shown": "ending"}),
        # A run that ends is not shown as saving.
        ([*STEPS, phase("saving", 23.0)], {"shown": "saving"}),
        (
            [*STEPS, phase("saving", 23.0), SAVED, ENDS],
            {"shown": "ending", "state": "saving", "saved_step": 5},
        ),
        # Also if the clock is set back.
        ([phase("loading", 1e4)], {"state": "loading"}),
        ([phase("loading", 1e4), phase("training"), *STEPS], {"state": "training"}),
        ([phase("training", detail=WRITING), *STEPS], {"state": "training", "detail": WRITING}),
        ([phase("training", detail=WRITING), *STEPS, phase("training", 40.0)], {"detail": ""}),
    ],
)
def test_state_follows_from_records(
    records: list[MetricRecord], wanted: dict[str, object], tmp_path: Path
) -> None:
    before = RunState(name="r", state="training", step=7, attempt=1)
    state = ending.observed(before, reader_of(tmp_path, *records))
    assert {name: getattr(state, name) for name in wanted} == wanted
    finished = ending.Outcome(state="finished", code=C.FINISHED)
    assert ending.final_state(state, finished, 14.0).shown == "finished"


def test_what_was_saved_counts_until_it_starts_over(tmp_path: Path) -> None:
    """Also before it is read: earlier segments are read last."""
    before = RunState(name="r", state="training", attempt=2, saved_step=5, saved_at=1.0)
    resumed = ResumedRecord(attempt=2, time=2.0, step=5)
    newest = step_record(6, attempt=2, time=3.0)
    known = reader_of(tmp_path / "a", step_record(5, time=0.5), SAVED, resumed, newest)
    reader = MetricsReader(RunDirectory(tmp_path / "a"))
    reader.poll(limit_records=100, limit_s=10.0, earlier=False)
    assert not reader.events.checkpoints
    assert ending.observed(before, reader) == ending.observed(before, known)
    over = reader_of(tmp_path / "b", SAVED, replace(resumed, step=0))
    assert ending.observed(before, over).saved_step is None


def test_an_unobserved_end_has_the_time_of_the_last_record(tmp_path: Path) -> None:
    """Not the time of a later supervisor, which may start days after it."""
    end = EndRecord(attempt=2, time=120.0, state="stopped", step=5)
    reader = reader_of(tmp_path, replace(SAVED, time=90.0), end)
    for attempt, heartbeat_at, wanted in ((2, 100.0, 120.0), (2, 130.0, 130.0), (1, 80.0, 90.0)):
        assert _last_alive(reader, attempt, heartbeat_at=heartbeat_at) == wanted


def test_attempts_add_up_over_queues_and_waiting_does_not_count() -> None:
    stopped = RunState(
        name="r", state="stopped", started=100.0, attempt_started=200.0, ended=260.0, earlier_s=40.0
    )
    assert stopped.took_s == 100
    queued = ending.queued_state(stopped)
    assert ending.left_queue(queued, 1).took_s == pytest.approx(100)
    again = ending.first_state("r", 2, queued, launch_with(plan_of(spec_of())))
    assert again.earlier_s == 100


def test_processes_are_terminated_and_killed_in_time() -> None:
    ended = ending.Shutdown(ended_at=100.0, broken=True)
    times = (102.0, 100.0 + EXIT_GRACE_S, 101.0 + EXIT_GRACE_S, 100.0 + EXIT_GRACE_S + KILL_AFTER_S)
    assert list(map(ended.next_signal, times)) == [None, SIGTERM, None, SIGKILL]
    assert ending.Shutdown(broken=True).next_signal(5.0) == SIGTERM
    stop = ending.Shutdown(overdue_at=50.0)
    assert list(map(stop.next_signal, (49.0, 50.0))) == [None, SIGTERM]
    assert stop.stop_overdue(50.0)
    assert not ending.Shutdown(overdue_at=50.0, ended_at=40.0).stop_overdue(60.0)


def test_stop_has_its_time_again_after_a_checkpoint() -> None:
    """But not more than a time that somebody gave."""
    shutdown, usual = ending.Shutdown(), DEFAULT_GRACE_S
    asked, given = (
        ending.StopRequest(by="me", time=1.0),
        ending.StopRequest(by="me", time=2.0, grace_s=30.0),
    )
    for request, saved_step, now, overdue_at in (
        (asked, 20, 10.0, 10.0 + usual),
        (asked, 20, 50.0, 10.0 + usual),
        (asked, 40, 500.0, 500.0 + usual),
        (asked, 40, 700.0, 500.0 + usual),
        (given, 40, 800.0, 830.0),
        (given, 60, 820.0, 830.0),
    ):
        shutdown.stop(request, saved_step, now)
        assert shutdown.overdue_at == overdue_at
