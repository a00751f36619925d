"""Parts of a rank that need no training: binding, clocks, failures, the watch over finite
values.
"""

import errno
import os
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from so_tui.machine import inspect_machine
from so_tui.plan.planner import make_plan
from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.records import (
    EndRecord,
    MetricRecord,
    PhaseRecord,
    RankBindingReport,
    StepRecord,
    WarningRecord,
    decode_metric,
)
from so_tui.spec import InputError
from so_tui_trainer import failures
from so_tui_trainer.checkpoint import _all_ranks
from so_tui_trainer.data.batches import StepCounts
from so_tui_trainer.failures import Failure, NonFiniteError
from so_tui_trainer.loop import _log_line
from so_tui_trainer.metrics import Metrics, Step, StepClock, StepPart
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.recorder import Recorder
from superoffload.errors import NonFiniteGradientError, OffloadError, WorkerLostError
from superoffload.meter import OffloadStats
from tests.support.launching import records, tiny
from tests.support.records import step_record

BIND = """
import sys, threading, msgspec
from so_tui.plan.plan import RankBinding
from so_tui_trainer.binding import bind
threading.Thread(target=threading.Event().wait, daemon=True).start()
report = bind(msgspec.json.decode(sys.stdin.read(), type=RankBinding))
import os, pathlib
masks = {tuple(os.sched_getaffinity(int(task.name))) for task in pathlib.Path("/proc/self/task").iterdir()}
assert masks == {report.cpus}, masks
assert "torch" not in sys.modules
print(msgspec.json.encode(report).decode())
"""  # noqa: E501


LEAVE = """
import atexit
from so_tui_trainer.entry import _leave
class Destroyed:
    def __del__(self):
        print("interpreter taken apart")
kept = Destroyed()
atexit.register(print, "exit handler")
print("last words")
_leave(3)
"""


@pytest.mark.slow
def test_a_rank_leaves_with_its_exit_handlers_and_output_but_takes_no_interpreter_apart() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (3, ["last words", "exit handler"])


@pytest.mark.slow
def test_binding_moves_every_thread_and_reports_what_it_found() -> None:
    cpu = min(os.sched_getaffinity(0))
    planned = make_plan(tiny(offload__mode="zerooffload"), inspect_machine()).binding[0]
    wanted = msgspec.structs.replace(planned, cpus=(cpu,), main_cpus=(cpu,))
    done = subprocess.run(
        [sys.executable, "-c", BIND],
        input=msgspec.json.encode(wanted),
        capture_output=True,
        check=True,
    )
    report = msgspec.json.decode(done.stdout, type=RankBindingReport)
    assert report.cpus == (cpu,)
    assert report.found_cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert report.memory_policy.startswith(wanted.memory_policy.mode)


@pytest.mark.slow
def test_a_binding_that_cannot_be_had_is_reported_not_fatal() -> None:
    planned = make_plan(tiny(offload__mode="zerooffload"), inspect_machine()).binding[0]
    wanted = msgspec.structs.replace(planned, cpus=(4000,), main_cpus=(4000,))
    script = BIND.replace("assert masks == {report.cpus}, masks", "")
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=msgspec.json.encode(wanted),
        capture_output=True,
        check=True,
    )
    report = msgspec.json.decode(done.stdout, type=RankBindingReport)
    assert "4000" in report.problem
    assert report.cpus == report.found_cpus


def test_the_parts_of_a_step_add_up_to_it() -> None:
    clock = StepClock(torch.device("cpu"))
    parts: tuple[StepPart, ...] = ("data", "forward", "backward", "forward", "optimizer")
    for part in parts:
        time.sleep(0.002)
        clock.lap(part)
    times = clock.end_step().read()
    assert min(times.data, times.backward, times.optimizer) >= 0.002
    assert times.forward >= 0.004
    assert times.total == pytest.approx(sum(times))
    time.sleep(0.01)
    clock.lap("other")
    assert clock.end_step().read().other > 0.009


def _step(number: int, loss: float) -> Step:
    counts = StepCounts(
        useful_tokens=10,
        trained_tokens=5,
        document_lengths=np.array([4, 6]),
        computed_tokens=16,
        sequences=1,
    )
    clock = StepClock(torch.device("cpu"))
    clock.lap("forward")
    return Step(number, counts, 1e-3, torch.tensor(loss), clock.end_step())


def test_the_first_step_that_was_not_finite_is_named_however_late_it_is_looked_at(
    single_rank: Ranks,
) -> None:
    metrics = Metrics(tiny(), single_rank, Recorder(None, 1), parameters=1000)
    for number, loss in enumerate((2.0, 1.5, float("nan"), 1.0, float("inf")), start=1):
        metrics.watch(_step(number, loss))
    with pytest.raises(NonFiniteError) as checked:
        metrics.check()
    with pytest.raises(NonFiniteError) as logged:
        metrics.log(_step(6, 1.0), 1.0, OffloadStats())
    assert (checked.value.step, logged.value.step) == (3, 3)


def test_a_gradient_that_is_not_finite_ends_the_run(single_rank: Ranks) -> None:
    metrics = Metrics(tiny(), single_rank, Recorder(None, 1), parameters=1000)
    metrics.watch(_step(1, 2.0))
    with pytest.raises(NonFiniteError, match="gradient norm") as caught:
        metrics.log(_step(1, 2.0), float("nan"), OffloadStats())
    assert caught.value.step == 1


def test_waiting_for_weights_in_forward_is_the_optimizers_time(single_rank: Ranks) -> None:
    metrics = Metrics(tiny(), single_rank, Recorder(None, 1), parameters=1000)
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.02)
    clock.lap("forward")
    step = _step(1, 2.0)._replace(laps=clock.end_step())
    record = metrics.log(step, 1.0, OffloadStats(exposed_in_forward_s=0.015))
    assert record.exposed_optimizer_s == 0.015
    assert record.forward_s + record.exposed_optimizer_s == pytest.approx(record.step_s)


def test_failures_have_codes_and_suggestions() -> None:
    spec = tiny(train__micro_batch="4", offload__mode="superoffload")
    out_of_memory = failures.explain(
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), spec, 0, 7
    )
    assert out_of_memory.code == "gpu-out-of-memory"
    assert re.search(
        r"train\.micro_batch 4 -> 2 with train\.gradient_accumulation 2 needs \d+ MiB less",
        out_of_memory.suggestion,
    )
    disk = failures.explain(OSError(errno.ENOSPC, "No space left on device", "/data/x"), spec, 0, 7)
    assert disk.code == "disk-full"
    assert "/data/x" in disk.reason
    assert (
        failures.explain(RuntimeError("Connection closed by peer [127.0.0.1]"), spec, 0, 7).code
        == "rank-lost"
    )
    with pytest.raises(RuntimeError) as too_large:
        torch.empty(2**50, dtype=torch.uint8)
    assert failures.explain(too_large.value, spec, 0, 7).code == "host-out-of-memory"
    with pytest.raises(InputError) as wrong:
        tiny(train__steps="-1")
    failure = failures.explain(wrong.value, spec, 0, 7)
    assert "train.steps = -1" in failure.reason
    assert failure.suggestion == wrong.value.problems[0].remedy
    spoilt = NonFiniteGradientError(
        "The gradient of step 8 is not finite", step=8, sub_group=0, poisoned=False
    )
    assert failures.explain(spoilt, spec, 0, 7).code == "not-finite"
    assert (
        failures.explain(
            WorkerLostError("The Adam worker was ended by SIGKILL", code="worker-ended"), spec, 0, 7
        ).code
        == "adam-worker-lost"
    )
    stuck = failures.explain(
        WorkerLostError("The Adam worker made no progress", code="worker-stuck"), spec, 0, 7
    )
    assert stuck.code == "adam-timeout"
    assert "offload.cpu_adam_cores_fraction" in stuck.suggestion
    no_memory = failures.explain(
        OffloadError("Lower offload.ratio.", code="host-memory"), spec, 0, 7
    )
    assert (no_memory.code, no_memory.reason) == ("host-memory", "Lower offload.ratio.")
    unknown = failures.explain(ZeroDivisionError("division by zero"), spec, 0, 7)
    assert (unknown.code, unknown.reason) == ("unexpected", "ZeroDivisionError: division by zero")


def test_a_save_that_the_adam_worker_breaks_off_does_not_blame_the_disk(single_rank: Ranks) -> None:
    with (
        pytest.raises(failures.TrainingError) as raised,
        _all_ranks(single_rank, "the checkpoint could not be written"),
    ):
        raise WorkerLostError("The Adam worker made no progress", code="worker-stuck")
    assert raised.value.code == "adam-timeout"
    assert "offload.cpu_adam_cores_fraction" in raised.value.suggestion
    assert (
        raised.value.reason
        == "the checkpoint could not be written: The Adam worker made no progress"
    )


class Held(MetricsWriter):
    """Writes nothing until the disk is free."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run, 1)
        self.free = threading.Event()

    def append(self, record: MetricRecord) -> None:
        assert self.free.wait(60)
        super().append(record)


def test_a_disk_that_does_not_answer_holds_up_no_step(tmp_path: Path) -> None:
    """Records wait, in their order; the end waits for all of them."""
    writer = Held(RunDirectory(tmp_path))
    recorder = Recorder(writer, 1)
    for step in range(1, 6):
        recorder.write(step_record(step))
    assert not records(RunDirectory(tmp_path))
    writer.free.set()
    recorder.write(EndRecord(attempt=1, time=0.0, state="finished", step=5))
    recorder.close()
    assert [
        record.step
        for record in records(RunDirectory(tmp_path))
        if isinstance(record, StepRecord | EndRecord)
    ] == [1, 2, 3, 4, 5, 5]


def test_a_record_of_another_attempt_is_an_error_where_records_are_written(tmp_path: Path) -> None:
    recorder = Recorder(MetricsWriter(RunDirectory(tmp_path), 1), 1)
    recorder.write(PhaseRecord(attempt=2, time=0.0, phase="training", detail=""))
    with pytest.raises(ValueError, match="attempt 2"):
        recorder.flush()


def test_a_full_disk_costs_records_and_not_the_run(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; the error comes from the system."""
    recorder = Recorder(MetricsWriter(RunDirectory(tmp_path), 1), 1)
    recorder.write(PhaseRecord(attempt=1, time=0.0, phase="training", detail="before"))
    recorder.flush()
    written = next(RunDirectory(tmp_path).metrics_dir.glob("*.jsonl")).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 10, limits[1]))
    try:
        for _ in range(3):
            recorder.write(PhaseRecord(attempt=1, time=0.0, phase="training", detail="lost"))
        with pytest.raises(OSError, match="File too large"):
            recorder.write(EndRecord(attempt=1, time=0.0, state="finished", step=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder.write(PhaseRecord(attempt=1, time=0.0, phase="training", detail="after"))
    recorder.close()
    lines = b"".join(
        path.read_bytes() for path in sorted(RunDirectory(tmp_path).metrics_dir.glob("*.jsonl"))
    ).splitlines()
    found = [record for line in lines if (record := decode_metric(line)) is not None]
    assert [record.detail for record in found if isinstance(record, PhaseRecord)] == [
        "before",
        "after",
    ]
    (warning,) = (record for record in found if isinstance(record, WarningRecord))
    assert warning.code == "records-lost"
    assert warning.message.startswith("3 records could not be written (File too large)")


def test_the_failure_that_came_first_is_the_reason(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_dir(1).mkdir(parents=True)
    assert failures.reported(run, 1, 2) is None
    failures.report(Failure(rank=1, reason="cause"), run, 1)
    time.sleep(0.01)
    failures.report(Failure(rank=0, reason="consequence"), run, 1)
    found = failures.reported(run, 1, 2)
    assert found is not None
    assert found.reason == "cause"


@pytest.mark.parametrize(("memory", "unit"), [(None, "TFLOPS/rank"), (80 << 30, "TFLOPS/GPU")])
def test_the_log_gives_the_speed_by_gpu_only_where_there_are_gpus(
    memory: int | None, unit: str
) -> None:
    line = _log_line(step_record(3, gpu_memory_peak_bytes=memory), 10)
    assert re.findall(r"TFLOPS/\w+", line) == [unit]
