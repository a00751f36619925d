"""How an attempt ended, from evidence alone; and when its processes are made to go."""

from __future__ import annotations

import pytest

from so_tui.launch.closing import EXIT_GRACE_S, KILL_AFTER_S, Closing
from so_tui.launch.verdict import Evidence, Failure, conclude
from so_tui.runs.records import EndRecord, Process

RANK = Process(pid=30, start_time=3, role="rank", rank=2)
LAUNCHER = Process(pid=20, start_time=2, role="launcher")
RUNNER = Process(pid=10, start_time=1, role="runner")


def reason(**evidence: object) -> str:
    end = conclude(Evidence(name="r", **evidence))  # type: ignore[arg-type]
    assert (end.state, end.exit_code) == ("failed", 1)
    assert end.suggestion
    return end.reason


def test_the_trainers_word_counts_whatever_the_exit_codes_say() -> None:
    record = EndRecord(attempt=1, time=0.0, state="finished", step=9)
    assert conclude(Evidence(name="r", end=record, runner_status=1, first_gone=LAUNCHER)).exit_code == 0
    stopped = EndRecord(attempt=1, time=0.0, state="stopped", step=9)
    assert conclude(Evidence(name="r", end=stopped)).exit_code == 4


def test_the_advice_knows_whether_something_was_saved() -> None:
    record = EndRecord(attempt=1, time=0.0, state="failed", step=9, reason="out of luck")
    assert conclude(Evidence(name="r", end=record, saved_step=5)).suggestion == "`so-tui resume r` goes on from step 5"
    assert "starts it over" in conclude(Evidence(name="r", end=record)).suggestion


def test_exit_code_0_without_that_word_is_a_failure() -> None:
    assert "vanished" in reason(runner_status=0, first_gone=LAUNCHER)
    assert "without a word of the trainer" in reason(runner_status=0)


def test_the_dead_are_named() -> None:
    assert reason(first_gone=RUNNER, first_gone_code=-9) == "DeepSpeed's runner was ended by SIGKILL"
    assert reason(first_gone=RANK, first_gone_code=-11) == "rank 2 was ended by SIGSEGV"
    assert reason(first_gone=RANK, log=("[launch.py] ['python'] exits with return code = -7",)) == "rank 2 was ended by SIGBUS"
    assert reason(first_gone=LAUNCHER, runner_status=-15).startswith("DeepSpeed's launcher (pid 20) vanished")
    assert reason(first_gone=RANK, first_gone_code=3) == "rank 2 ended with exit code 3"
    assert reason(first_gone=RANK, first_gone_code=143) == "rank 2 was ended by SIGTERM"  # a rank obeys it and leaves by itself


def test_a_launcher_that_reported_a_rank_is_not_the_culprit() -> None:
    assert reason(first_gone=LAUNCHER, log=("exits with return code = -9",)) == "a rank was ended by SIGKILL"


def test_what_ranks_wrote_down_comes_first() -> None:
    failure = Failure(rank=3, reason="the gradient of step 7 is not finite", suggestion="lower the learning rate")
    assert reason(failures=(failure,), first_gone=RANK, first_gone_code=1) == "rank 3: the gradient of step 7 is not finite"


def test_what_the_bereaved_report_does_not_hide_the_dead() -> None:
    """Rank 2 is killed; rank 0 sees its connection close, and says so as its own failure and as the last word of the trainer."""
    failure = Failure(rank=0, reason="another rank was lost", suggestion="look at the log")
    record = EndRecord(attempt=1, time=0.0, state="failed", step=9, reason=failure.reason, suggestion=failure.suggestion)
    dead = {"first_gone": RANK, "first_gone_code": -9, "unprompted": True}
    assert reason(failures=(failure,), end=record, **dead) == "rank 2 was ended by SIGKILL"
    assert "resume" in conclude(Evidence(name="r", failures=(failure,), **dead)).suggestion  # type: ignore[arg-type]
    assert "want of memory" in reason(failures=(failure,), oom_kills=1, **dead)
    assert reason(failures=(failure,), end=record, **{**dead, "first_gone_code": 143}) == "rank 2 was ended by SIGTERM"


def test_a_disk_that_took_no_word_of_the_trainer_is_named() -> None:
    full = {"disk_full": True, "first_gone": RANK, "first_gone_code": 1, "saved_step": 30}
    assert "the disk of the run's folder is full" in reason(**full)
    assert "goes on from step 30" in conclude(Evidence(name="r", **full)).suggestion  # type: ignore[arg-type]
    failure = Failure(rank=0, reason="the loss is not finite")
    assert "not finite" in reason(failures=(failure,), **full)


def test_a_rank_that_was_made_to_go_is_not_the_cause() -> None:
    failure = Failure(rank=0, reason="the loss is not finite", suggestion="lower the learning rate")
    assert reason(failures=(failure,), first_gone=RANK, first_gone_code=-15) == "rank 0: the loss is not finite"
    crashed_at_exit = Failure(rank=2, reason="the GPU ran out of memory", suggestion="smaller")
    assert "ran out" in reason(failures=(crashed_at_exit,), first_gone=RANK, first_gone_code=-11, unprompted=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has", "out of GPU memory"),
        ("OSError: [Errno 28] No space left on device: '/x'", "no space left"),
        ("RuntimeError: Address already in use", "port"),
        ("ModuleNotFoundError: No module named 'datasets'", "datasets is not installed"),
        ("[rank1]: ValueError: bad shape", "ValueError: bad shape"),
    ],
)
def test_reasons_from_the_log(line: str, expected: str) -> None:
    assert expected in reason(log=("Traceback (most recent call last):", line, "[launch.py] exits with return code = 1"), first_gone=RANK)


def test_the_kernels_out_of_memory_killer_is_told_only_of_a_sigkill() -> None:
    assert "want of memory" in reason(oom_kills=1, first_gone=RANK, first_gone_code=-9)
    assert "want of memory" not in reason(oom_kills=1, first_gone=RANK, log=("exits with return code = 1",))


def test_what_ran_out_of_memory_gets_the_plans_advice() -> None:
    killed = Evidence(name="r", oom_kills=1, first_gone=RANK, first_gone_code=-9, less_host_memory="offload.ratio 0.9 -> 0.7")
    assert conclude(killed).suggestion.startswith("offload.ratio 0.9 -> 0.7. ")
    log = ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has",)
    assert conclude(Evidence(name="r", log=log, less_gpu_memory="micro-batch {4} -> 2")).suggestion.startswith("micro-batch {4} -> 2. ")


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (None, "Nothing had been saved: `so-tui resume r --set KEY=VALUE` starts it over"),
        (40, "`so-tui resume r --set KEY=VALUE` goes on from step 40"),
    ],
)
def test_advice_to_change_settings_says_how_to_go_on_with_them(saved: int | None, said: str) -> None:
    advice = "train.micro_batch 8 -> 4 needs 3 GiB less on each GPU (predicted)"
    failure = Failure(rank=1, reason="the GPU ran out of memory", suggestion=advice)
    record = EndRecord(attempt=1, time=0.0, state="failed", step=42, reason=failure.reason, suggestion=advice)
    log = ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has",)
    killed = {"oom_kills": 1, "first_gone": RANK, "first_gone_code": -9, "less_host_memory": advice}
    for evidence in ({"failures": (failure,)}, {"end": record}, {"log": log, "less_gpu_memory": advice}, killed):
        assert conclude(Evidence(name="r", saved_step=saved, **evidence)).suggestion == f"{advice}. {said}"  # type: ignore[arg-type]


def test_other_advice_says_how_to_go_on_once() -> None:
    for advice in ("The log has the details.", "Mend it with `so-tui resume r`"):
        told = conclude(Evidence(name="r", saved_step=40, failures=(Failure(rank=0, reason="bad luck", suggestion=advice),))).suggestion
        assert (told.count("so-tui resume r"), "--set" in told, ".." in told) == (1, False, False)


def test_gone_unseen_is_lost() -> None:
    assert conclude(Evidence(name="r", gone_unseen=True)).state == "lost"


def test_closing_waits_for_the_trainers_processes_after_its_end_record() -> None:
    closing = Closing(ended_at=100.0, broken_at=101.0)
    assert closing.step(102.0) == "wait"
    assert closing.step(100.0 + EXIT_GRACE_S) == "terminate"
    assert closing.step(100.0 + EXIT_GRACE_S + 1) == "wait"
    assert closing.step(100.0 + EXIT_GRACE_S + KILL_AFTER_S) == "kill"


def test_closing_at_once_when_something_broke_and_late_when_a_stop_is_ignored() -> None:
    assert Closing(broken_at=5.0).step(5.0) == "terminate"
    stop = Closing(overdue_at=50.0)
    assert stop.step(49.0) == "wait"
    assert stop.step(50.0) == "terminate"
    assert stop.stop_overdue(50.0)
    assert not Closing(overdue_at=50.0, ended_at=40.0).stop_overdue(60.0)
