"""Parts of a rank that need no training: binding, clocks, memory, failures, and what is sent."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from so_tui.machine import inspect_machine
from so_tui.plan.planner import make_plan
from so_tui.runs import MetricsWriter, RunDirectory, create_run, new_attempt
from so_tui.runs.records import (
    EndRecord,
    MetricRecord,
    PhaseRecord,
    RankBindingReport,
    StepRecord,
    WarningRecord,
    decode_metric,
)
from so_tui.runs.samples import read_network_rate
from so_tui.spec import InputError, TrainSpec
from so_tui_trainer import failures, metrics, session
from so_tui_trainer.checkpoint import _all_ranks
from so_tui_trainer.data import sources
from so_tui_trainer.data.batches import StepCounts
from so_tui_trainer.failures import Explanation, Failure, NonFiniteError
from so_tui_trainer.loop import _log_line, learning_rate
from so_tui_trainer.metrics import (
    Metrics,
    Step,
    StepClock,
    StepPart,
    _HostMemory,
    _rank_memory_bytes,
)
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.recorder import Recorder
from superoffload.errors import NonFiniteGradientError, OffloadError, WorkerLostError
from superoffload.transfers import OffloadStats
from tests.support.launching import of_kind, records, tiny
from tests.support.python_path import printed
from tests.support.records import step_record
from tests.support.waiting import LIMIT_S, wait_until

BIND = """
import sys, threading, msgspec
from so_tui.plan.plan import RankBinding
from so_tui_trainer.binding import bind
threading.Thread(target=threading.Event().wait, daemon=True).start()
report = bind(msgspec.json.decode(sys.stdin.read(), type=RankBinding))
import os, pathlib
masks = {tuple(os.sched_getaffinity(int(task.name))) for task in pathlib.Path("/proc/self/task").iterdir()}
assert report.problem or masks == {report.cpus}, masks
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
def test_a_rank_leaves_with_exit_handlers_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (3, ["last words", "exit handler"])


@pytest.mark.slow
@pytest.mark.parametrize("possible", [True, False])
def test_binding_moves_every_thread_or_reports_a_problem(possible: bool) -> None:
    here = tuple(sorted(os.sched_getaffinity(0)))
    cpus = here[:1] if possible else (4000,)
    planned = make_plan(tiny(offload__mode="zerooffload"), inspect_machine()).binding[0]
    wanted = replace(planned, cpus=cpus, main_cpus=cpus)
    said = printed("-c", BIND, given=msgspec.json.encode(wanted).decode())
    report = msgspec.json.decode(said, type=RankBindingReport)
    assert report.found_cpus == here
    assert report.cpus == (cpus if possible else here)
    assert ("4000" in report.problem) != possible
    assert not possible or report.memory_policy.startswith(wanted.memory_policy.mode)


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


def test_the_first_step_that_was_not_finite_is_named(single_rank: Ranks) -> None:
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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "gpu-out-of-memory",
            r"train\.micro_batch 4 -> 2 with train\.gradient_accumulation 2 needs \d+ MiB less",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "disk-full", "/data/x"),
        (RuntimeError("Connection closed by peer [127.0.0.1]"), "rank-lost", ""),
        (
            NonFiniteGradientError(["weight"], step=8, sub_group=0, poisoned=False),
            "not-finite",
            "",
        ),
        (WorkerLostError("ended by SIGKILL", code="worker-ended"), "adam-worker-lost", ""),
        (
            WorkerLostError("no progress", code="worker-stuck"),
            "adam-timeout",
            r"offload\.cpu_adam_cores_fraction",
        ),
        (OffloadError("Lower offload.ratio.", code="host-memory"), "host-memory", "^Lower o"),
        (ZeroDivisionError("by zero"), "unexpected", "^ZeroDivisionError: by zero"),
    ],
)
def test_failures_have_codes_and_suggestions(error: Exception, code: str, said: str) -> None:
    spec = tiny(train__micro_batch="4", offload__mode="superoffload")
    found = failures.explain(error, spec, 0, 7)
    assert found.code == code
    assert re.search(said, f"{found.reason} {found.suggestion}")


def test_failures_of_host_memory_and_of_input_are_explained() -> None:
    with pytest.raises(RuntimeError) as too_large:
        torch.empty(2**50, dtype=torch.uint8)
    assert failures.explain(too_large.value, tiny(), 0, 7).code == "host-out-of-memory"
    with pytest.raises(InputError) as wrong:
        tiny(train__steps="-1")
    failure = failures.explain(wrong.value, tiny(), 0, 7)
    assert "train.steps = -1" in failure.reason
    assert failure.suggestion == wrong.value.problems[0].remedy


def test_a_save_ended_by_the_worker_blames_no_disk(single_rank: Ranks) -> None:
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


def test_a_record_of_another_attempt_is_an_error(tmp_path: Path) -> None:
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
    lines = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("metrics/*.jsonl")))
    found = [record for line in lines.splitlines() if (record := decode_metric(line))]
    assert [record.detail for record in of_kind(found, PhaseRecord)] == ["before", "after"]
    (warning,) = of_kind(found, WarningRecord)
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
def test_the_log_names_gpus_only_where_there_are_any(memory: int | None, unit: str) -> None:
    line = _log_line(step_record(3, gpu_memory_peak_bytes=memory), 10)
    assert re.findall(r"TFLOPS/\w+", line) == [unit]


def _rates(
    schedule: str, total: int = 100, warmup: float = 0.1, decay: float = 0.1, floor: float = 0.0
) -> list[float]:
    train = TrainSpec(
        learning_rate=1.0,
        schedule=schedule,  # type: ignore[arg-type]
        warmup_ratio=warmup,
        decay_ratio=decay,
        min_learning_rate_ratio=floor,
    )
    return [learning_rate(step, total, train) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_rates_rise_over_the_warm_up_and_fall_to_nearly_zero(schedule: str) -> None:
    rates = _rates(schedule)
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(rates) == rates[10] == 1.0
    if schedule in ("cosine", "linear"):
        assert all(after < before for before, after in pairwise(rates[10:]))
        assert 0 < rates[-1] < 0.02


def test_rates_of_each_schedule() -> None:
    assert _rates("cosine", total=101, warmup=0.0)[50] == pytest.approx(0.5, abs=0.02)
    assert set(_rates("constant")[9:]) == {1.0}
    assert _rates("cosine", total=1, warmup=0.05) == [1.0]
    wsd = _rates("wsd", decay=0.2)
    assert set(wsd[9:81]) == {1.0}
    assert wsd[80:] == pytest.approx([1 - step / 20 for step in range(20)])
    short = _rates("wsd", total=10, warmup=0.5, decay=1.0)
    assert short == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_falling_schedules_end_just_above_their_floor(schedule: str) -> None:
    rates = _rates(schedule, total=1000, floor=0.1)
    assert max(rates) == 1.0
    assert 0.1 < rates[-1] < 0.11
    assert min(rates[100:]) == rates[-1]


STUBBORN = """
import signal
import time
from so_tui_trainer.session import _install_handlers

def fail():
    raise OSError("no space left on the device")

_install_handlers(fail, fail)
signal.raise_signal(signal.SIGUSR1)
print("ready", flush=True)
time.sleep(1000)
"""


def failure(rank: int) -> Failure:
    return Failure(rank=rank, code="disk-full", reason="full", suggestion="", step=rank)


def test_a_report_that_is_not_whole_does_not_hide_another_ranks() -> None:
    """The disk was full, or the rank was killed while it wrote."""
    run = create_run(tiny())
    run.attempt_dir(1).mkdir()
    (run.attempt_dir(1) / "failure.rank1.json").touch()
    assert failures.reported(run, 1, 4) is None
    failures.report(failure(2), run, 1)
    assert failures.reported(run, 1, 4) == failure(2)


def test_a_rank_that_cannot_write_its_failure_ends() -> None:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu"
    }  # else DeepSpeed prints that there is no GPU
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            rank.terminate()
            assert rank.wait(LIMIT_S) == 143
            assert rank.stderr is not None
            assert b"no space left" in rank.stderr.read()
        finally:
            rank.kill()


@pytest.mark.parametrize("part", [b'\\"', b"\\\\"])
def test_a_row_that_was_cut_off_in_a_string_is_checked_at_once(part: bytes) -> None:
    row = b"[" * (sources.MOST_NESTED + 1) + b"]" * (sources.MOST_NESTED + 1)
    began = time.process_time()
    assert not sources._is_deep(b'{"text": "' + row + part * 20_000)
    assert time.process_time() - began < 4


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, bool),
        ("host", str),
        (Path("/a"), Path),
        (None, Path | None),
        (Explanation("code", "reason", "suggestion"), Explanation | None),
    ],
)
def test_values_arrive_as_they_were(value: object, kind: object, single_rank: Ranks) -> None:
    assert single_rank.all_gather(value, kind) == [value]
    assert single_rank.broadcast(value, kind) == value


def test_a_value_of_another_type_is_refused(single_rank: Ranks) -> None:
    with pytest.raises(msgspec.ValidationError):
        single_rank.broadcast("text", int)


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_frozen_garbage_keeps_what_was_loaded() -> None:
    loaded, garbage = Knot(), Knot()
    gone = weakref.ref(garbage)
    del garbage
    try:
        session.freeze_garbage()
        assert gone() is None
        assert not any(each is loaded for each in gc.get_objects())
        later = Knot()
        assert any(each is later for each in gc.get_objects())
    finally:
        gc.unfreeze()


class Reads:
    """Measurements that take as long as the test wants."""

    def __init__(self) -> None:
        self.made = 0
        self.begun = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self) -> int:
        self.begun += 1
        assert self.may_end.wait(60)
        self.made += 1
        return self.made


def host_memory(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[], int], now: list[float]
) -> _HostMemory:
    monkeypatch.setattr("so_tui_trainer.metrics._rank_memory_bytes", read)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("so_tui_trainer.metrics.time", clock)
    return _HostMemory()


def test_a_step_never_waits_for_a_measurement_but_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reads = [0.0], Reads()
    memory = host_memory(monkeypatch, reads, now)
    assert memory.latest_bytes() == 1
    reads.may_end.clear()
    now[0] = 25.0
    assert [memory.latest_bytes() for _ in range(3)] == [1, 1, 1]
    wait_until(lambda: reads.begun == 2)
    reads.may_end.set()
    wait_until(lambda: memory.latest_bytes() == 2)
    assert reads.begun == 2, "one at a time"


@pytest.mark.parametrize(("age_s", "interval_s"), [(60.0, 20.0), (200.0, 500.0)])
def test_costly_measurements_become_rare(
    age_s: float, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reads = [0.0], Reads()

    def slow() -> int:
        now[0] += 5.0
        return reads()

    memory = host_memory(monkeypatch, slow, now)
    memory.latest_bytes()
    now[0] = age_s
    memory.latest_bytes()
    wait_until(lambda: memory.latest_bytes() == 2)
    now[0] = age_s + 5.0 + interval_s - 1
    memory.latest_bytes()
    assert reads.begun == 2
    now[0] += 2
    memory.latest_bytes()
    wait_until(lambda: memory.latest_bytes() == 3)


def test_it_counts_what_has_been_touched() -> None:
    before = _rank_memory_bytes()
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"\1" * len(memory))
        assert _rank_memory_bytes() - before > 60 << 20


def test_ending_threads_do_not_hide_adams_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training process has threads that come and go."""
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            short = [threading.Thread(target=int) for _ in range(30)]
            for thread in short:
                thread.start()
            for thread in short:
                thread.join()

    busy = [threading.Thread(target=come_and_go) for _ in range(3)]
    with subprocess.Popen(["sleep", "1000"]) as worker:
        monkeypatch.setattr(metrics, "pss_bytes", lambda pid: int(pid == worker.pid))
        try:
            for thread in busy:
                thread.start()
            assert [_rank_memory_bytes() for _ in range(300)] == [1] * 300
        finally:
            ended.set()
            for thread in busy:
                thread.join()
            worker.kill()


_RANK = """
import sys
import torch, torch.distributed as dist
from so_tui.runs import RunDirectory
from so_tui_trainer.metrics import record_network_rate
from so_tui_trainer.ranks import Ranks
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
record_network_rate(Ranks(dist.get_rank(), 2, torch.device("cpu"), dist.group.WORLD), RunDirectory(sys.argv[3]), 1, 2)
dist.destroy_process_group()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "whole_bytes"),
    [(0.0, 1e9, 1 << 26), (0.0, 1e7, 1 << 20), (0.0, 1e12, 1 << 28), (1e-3, 1e10, 1 << 28)],
)
def test_the_rate_is_that_of_a_tensor_that_takes_long_enough(
    latency_s: float,
    bytes_per_s: float,
    whole_bytes: int,
    single_rank: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def both_s(_ranks: Ranks, size: int) -> float:
        asked.append(size)
        return latency_s + 2 * size * 11 / 12 / bytes_per_s

    monkeypatch.setattr(metrics, "_both_s", both_s)
    assert metrics._measure_network_rate(single_rank._replace(size=12)) == pytest.approx(
        bytes_per_s, rel=0.05
    )
    assert asked[-1] == whole_bytes


@pytest.mark.slow
def test_two_ranks_measure_and_the_first_one_records_it(tmp_path: Path) -> None:
    run = create_run(tiny(nodes="2", gpus="1"), tmp_path)
    attempt = new_attempt(run)
    meeting = f"file://{tmp_path / 'meeting'}"
    python = [sys.executable, "-W", "error::FutureWarning"]  # of older names of torch's functions
    ranks = [
        subprocess.Popen([*python, "-c", _RANK, meeting, str(rank), str(run.path)])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    rate = read_network_rate(run, attempt)
    assert rate is not None
    assert rate.nodes == 2
    assert 1e6 < rate.bytes_per_s < 1e12
