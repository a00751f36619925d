"""How an attempt ended, concluded from evidence, and in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from so_tui.launch.supervisor.ending import (
    Evidence,
    Failure,
    Outcome,
    _OutcomeText,
    conclude,
    outcome_text,
)
from so_tui.launch.supervisor.processes import Loss
from so_tui.runs.records import EndRecord, OutcomeCode, Process

RANK = Process(pid=30, start_time=3, role="rank", rank=2)
LAUNCHER = Process(pid=20, start_time=2, role="launcher")
RUNNER = Process(pid=10, start_time=1, role="runner")
OUT_OF_MEMORY = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"
)


def failed(**evidence: Any) -> Outcome:
    """Conclude from evidence of a failure."""
    outcome = conclude(Evidence(**evidence))
    assert (outcome.state, outcome.run_exit_code) == ("failed", 1)
    return outcome


def text_of(outcome: Outcome, saved_step: int | None = None, advice: str = "") -> _OutcomeText:
    return outcome_text(outcome, "r", saved_step, advice)


def end_record(**values: Any) -> EndRecord:
    return EndRecord(attempt=1, time=0.0, step=9, **values)


def test_end_record_counts_whatever_the_exit_codes() -> None:
    finished = conclude(
        Evidence(end=end_record(state="finished"), runner_status=1, first_loss=Loss(LAUNCHER))
    )
    assert (finished.code, finished.run_exit_code) == (OutcomeCode.FINISHED, 0)
    stopped = conclude(Evidence(end=end_record(state="stopped", reason="stopped on request")))
    assert (stopped.code, stopped.run_exit_code) == (OutcomeCode.STOPPED, 4)
    assert text_of(stopped) == ("stopped on request", "")


def test_exit_code_0_without_an_end_record_is_a_failure() -> None:
    lost = failed(runner_status=0, first_loss=Loss(LAUNCHER))
    assert (lost.code, lost.who) == (OutcomeCode.LAUNCHER_LOST, "launcher")
    assert (lost.pid, lost.signal) == (20, None)
    assert failed(runner_status=0).code == OutcomeCode.UNEXPECTED


LOST, WORD = OutcomeCode.RANK_LOST, "exits with return code ="


@pytest.mark.parametrize(
    ("evidence", "code", "rank", "signum"),
    [
        ({"first_loss": Loss(RUNNER, -9)}, OutcomeCode.RUNNER_LOST, None, 9),
        ({"first_loss": Loss(RANK, -11)}, LOST, 2, 11),
        ({"first_loss": Loss(RANK), "log": (f"[launch.py] ['python'] {WORD} -7",)}, LOST, 2, 7),
        (
            {"first_loss": Loss(LAUNCHER), "runner_status": -15},
            OutcomeCode.LAUNCHER_LOST,
            None,
            None,
        ),
        # A rank obeys SIGTERM and leaves by itself.
        ({"first_loss": Loss(RANK, 143)}, LOST, 2, 15),
        # A launcher that reported a rank is not the cause.
        ({"first_loss": Loss(LAUNCHER), "log": (f"{WORD} -9",)}, LOST, None, 9),
        ({"first_loss": Loss(RANK, 3)}, OutcomeCode.UNEXPECTED, 2, None),
    ],
)
def test_the_lost_process_is_named(
    evidence: dict[str, Any], code: OutcomeCode, rank: int | None, signum: int | None
) -> None:
    outcome = failed(**evidence)
    assert (outcome.code, outcome.rank, outcome.signal) == (code, rank, signum)
    if code == OutcomeCode.UNEXPECTED:
        assert outcome.exit_code == 3
        assert text_of(outcome).reason == "rank 2 ended with exit code 3"


def test_what_a_rank_reported_comes_first() -> None:
    failure = msgspec.structs.replace(NOT_FINITE, rank=3, suggestion="lower the learning rate")
    outcome = failed(failures=(failure,), first_loss=Loss(RANK, 1))
    assert (outcome.code, outcome.rank) == (OutcomeCode.NON_FINITE, 3)
    assert outcome.advice == failure.suggestion
    assert text_of(outcome).reason == "rank 3: the loss is not finite"
    older = failed(failures=(Failure(rank=0, reason="bad luck"),))  # without a code
    assert (older.code, text_of(older).reason) == (OutcomeCode.UNEXPECTED, "rank 0: bad luck")


def test_reports_of_other_ranks_do_not_hide_the_lost_one() -> None:
    """Rank 2 is killed. Rank 0 sees its connection close, and reports that as its own failure and
    in the end record.
    """
    failure = Failure(rank=0, code="rank-lost", reason="another was lost", suggestion="look")
    record = end_record(
        state="failed", code="rank-lost", reason=failure.reason, suggestion=failure.suggestion
    )
    dead: dict[str, Any] = {"first_loss": Loss(RANK, -9, unprompted=True)}
    killed = failed(failures=(failure,), end=record, **dead)
    assert (killed.code, killed.rank, killed.signal, killed.reported) == (LOST, 2, 9, "")
    assert failed(failures=(failure,), oom_kills=1, **dead).code == OutcomeCode.KILLED_FOR_MEMORY
    assert (
        failed(failures=(failure,), end=record, first_loss=Loss(RANK, 143, unprompted=True)).signal
        == 15
    )


NOT_FINITE = Failure(rank=0, code="not-finite", reason="the loss is not finite")


def test_a_full_disk_that_lost_the_trainers_records_is_the_cause() -> None:
    full: dict[str, Any] = {"disk_full": True, "first_loss": Loss(RANK, 1)}
    assert failed(**full).code == OutcomeCode.DISK_FULL
    assert failed(failures=(NOT_FINITE,), **full).code == OutcomeCode.NON_FINITE


def test_a_rank_that_was_ended_by_others_is_not_the_cause() -> None:
    ended = failed(failures=(NOT_FINITE,), first_loss=Loss(RANK, -15))
    assert ended.code == OutcomeCode.NON_FINITE
    crashed = Failure(rank=2, code="gpu-out-of-memory", reason="the GPU ran out of memory")
    dead: dict[str, Any] = {"first_loss": Loss(RANK, -11, unprompted=True)}
    assert failed(failures=(crashed,), **dead).code == OutcomeCode.OUT_OF_GPU_MEMORY


@pytest.mark.parametrize(
    ("line", "code", "detail"),
    [
        (
            OUT_OF_MEMORY,
            OutcomeCode.OUT_OF_GPU_MEMORY,
            "CUDA out of memory. Tried to allocate 2 GiB",
        ),
        ("OSError: [Errno 28] No space left on device: '/x'", OutcomeCode.DISK_FULL, ""),
        ("RuntimeError: Address already in use", OutcomeCode.PORT_IN_USE, ""),
        ("ModuleNotFoundError: No module named 'datasets'", OutcomeCode.MODULE_MISSING, "datasets"),
        ("[rank1]: ValueError: bad shape", OutcomeCode.UNEXPECTED, "ValueError: bad shape"),
    ],
)
def test_failures_of_others_are_recognised(line: str, code: OutcomeCode, detail: str) -> None:
    log = ("Traceback (most recent call last):", line, "[launch.py] exits with return code = 1")
    outcome = failed(log=log, first_loss=Loss(RANK))
    assert (outcome.code, outcome.detail) == (code, detail)
    assert detail in text_of(outcome).reason


def test_the_out_of_memory_killer_is_blamed_only_for_a_sigkill() -> None:
    killed = failed(oom_kills=2, first_loss=Loss(RANK, -9))
    assert (killed.code, killed.count) == (OutcomeCode.KILLED_FOR_MEMORY, 2)
    assert (
        failed(oom_kills=1, first_loss=Loss(RANK), log=("exits with return code = 1",)).code
        == OutcomeCode.UNEXPECTED
    )


def test_out_of_memory_gets_the_plans_advice() -> None:
    killed = failed(oom_kills=1, first_loss=Loss(RANK, -9))
    advised = text_of(killed, advice="offload.ratio 0.9 -> 0.7").suggestion
    assert advised.startswith("offload.ratio 0.9 -> 0.7. ")
    advised = text_of(failed(log=(OUT_OF_MEMORY,)), advice="batch {4} -> 2").suggestion
    assert advised.startswith("batch {4} -> 2. ")


@pytest.mark.parametrize(
    ("saved", "resuming"),
    [
        (
            None,
            "Nothing had been saved: `so-tui resume r --set KEY=VALUE` starts from the beginning",
        ),
        (40, "`so-tui resume r --set KEY=VALUE` continues from step 40"),
    ],
)
def test_needed_settings_are_said_with_resume(saved: int | None, resuming: str) -> None:
    advice = "train.micro_batch 8 -> 4 needs 3 GiB less on each GPU (predicted)"
    failure = Failure(
        rank=1, code="gpu-out-of-memory", reason="the GPU ran out of memory", suggestion=advice
    )
    wrong_input = Failure(
        rank=1, code="data-columns-unknown", reason="there is no column `text`", suggestion=advice
    )
    outcomes = [
        failed(failures=(failure,)),
        failed(failures=(wrong_input,)),
        failed(
            end=end_record(
                state="failed", code=failure.code, reason=failure.reason, suggestion=advice
            )
        ),
        failed(log=(OUT_OF_MEMORY,)),
        failed(oom_kills=1, first_loss=Loss(RANK, -9)),
    ]
    for outcome in outcomes:
        text = text_of(outcome, saved, advice)
        assert text.suggestion == f"{advice}. {resuming}"


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("error", ""),
        ("disk-full", "Free some space. "),
        ("path-not-found", "Fix it. "),
        ("a-code-of-a-newer-version", "Fix it. "),
    ],
)
def test_other_failures_are_resumed_with_the_same_settings(code: str, advice: str) -> None:
    failure = Failure(rank=0, code=code, reason="it failed", suggestion=advice.strip())
    resuming = f"{advice}`so-tui resume r` continues from step 5"
    assert text_of(failed(failures=(failure,)), 5).suggestion == resuming
    record = end_record(
        state="failed", code=code, reason="out of luck", suggestion=failure.suggestion
    )
    assert text_of(failed(end=record), 5).suggestion == resuming


def test_an_unobserved_end_is_lost() -> None:
    outcome = conclude(Evidence(gone_unseen=True))
    assert (outcome.state, outcome.code) == ("lost", OutcomeCode.UNOBSERVED)
    assert "so-tui resume r" in text_of(outcome).suggestion


def test_every_code_of_the_supervisor_has_words() -> None:
    known: dict[str, Any] = {"detail": "detail", "count": 1, "limit_s": 1.0, "pid": 1}
    for code in OutcomeCode:
        text = text_of(Outcome(state="failed", code=code, who="rank", rank=0, **known))
        assert text.reason
        assert "so-tui resume r" in text.suggestion
