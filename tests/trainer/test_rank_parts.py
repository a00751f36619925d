"""Parts of a rank that need no training: binding, clocks, memory, failures, and what is sent."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import subprocess
import sys
import threading
import time
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
from so_tui.runs.state import Failure, report_failure
from so_tui.runs.state import failures as reported_failures
from so_tui.spec import InputError, TrainSpec, find_preset
from so_tui_trainer import failures, metrics
from so_tui_trainer.checkpoint import _all_ranks
from so_tui_trainer.data import sources
from so_tui_trainer.data.batches import StepCounts
from so_tui_trainer.failures import NonFiniteError
from so_tui_trainer.loop import learning_rate
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.recorder import Recorder
from so_tui_trainer.session import _check_table
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
    done = subprocess.run([sys.executable, "-c", LEAVE], stdout=-1, text=True, check=False)
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


@pytest.fixture
def figures(single_rank: Ranks) -> metrics.Metrics:
    return metrics.Metrics(tiny(), single_rank, Recorder(None, 1), parameters=1000)


def step(number: int, loss: float, forward_s: float = 0.0) -> metrics.Step:
    counts = StepCounts(10, 5, np.array([4, 6]), computed_tokens=16, sequences=1)
    clock = metrics.StepClock(torch.device("cpu"))
    time.sleep(forward_s)
    clock.lap("forward")
    return metrics.Step(number, counts, 1e-3, torch.tensor(loss), clock.end_step())


def test_the_first_step_that_was_not_finite_is_named(figures: metrics.Metrics) -> None:
    with pytest.raises(NonFiniteError, match="gradient norm") as caught:
        figures.log(step(1, 2.0), float("nan"), OffloadStats())
    for number, loss in enumerate((2.0, 1.5, float("nan"), 1.0, float("inf")), start=1):
        figures.watch(step(number, loss))
    with pytest.raises(NonFiniteError) as checked:
        figures.check()
    with pytest.raises(NonFiniteError) as logged:
        figures.log(step(6, 1.0), 1.0, OffloadStats())
    assert [each.value.step for each in (caught, checked, logged)] == [1, 3, 3]


def test_waiting_for_weights_in_forward_is_the_optimizers_time(figures: metrics.Metrics) -> None:
    record = figures.log(step(1, 2.0, 0.02), 1.0, OffloadStats(exposed_in_forward_s=0.015))
    assert record.exposed_optimizer_s == 0.015
    assert record.forward_s + record.exposed_optimizer_s == pytest.approx(record.step_s)


SPOILT = NonFiniteGradientError(["weight"], step=8, sub_group=0, poisoned=False)
STUCK = WorkerLostError("no progress", code="worker-stuck")
MORE_CORES = r"offload\.cpu_adam_cores_fraction"


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
        (SPOILT, "not-finite", ""),
        (WorkerLostError("ended by SIGKILL", code="worker-ended"), "adam-worker-lost", ""),
        (STUCK, "adam-timeout", MORE_CORES),
        (OffloadError("Lower offload.ratio.", code="host-memory"), "host-memory", "^Lower o"),
        (ZeroDivisionError("by zero"), "unexpected", "^ZeroDivisionError: by zero"),
    ],
)
def test_failures_have_codes_and_suggestions(error: Exception, code: str, said: str) -> None:
    spec = tiny(train__micro_batch="4", offload__mode="superoffload")
    found = failures.explain(error, spec, 0, 7, None)
    assert found.code == code
    assert re.search(said, f"{found.reason} {found.suggestion}")


def test_failures_of_host_memory_and_of_input_are_explained() -> None:
    with pytest.raises(RuntimeError) as too_large:
        torch.empty(2**50, dtype=torch.uint8)
    failure = failures.explain(too_large.value, tiny(), 0, 7, None)
    assert failure.code == "host-out-of-memory"
    with pytest.raises(InputError) as wrong:
        tiny(train__steps="-1")
    failure = failures.explain(wrong.value, tiny(), 0, 7, None)
    assert "train.steps = -1" in failure.reason
    assert failure.suggestion == wrong.value.problems[0].remedy


def test_a_save_ended_by_the_worker_blames_no_disk(single_rank: Ranks) -> None:
    with (
        pytest.raises(failures.TrainingError, match=MORE_CORES) as raised,
        _all_ranks(single_rank, "not written"),
    ):
        raise STUCK
    assert (raised.value.code, raised.value.reason) == ("adam-timeout", "not written: no progress")


END = EndRecord(attempt=1, time=0.0, state="finished", step=5)


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
    run = RunDirectory(tmp_path)
    writer = Held(run)
    recorder = Recorder(writer, 1)
    for number in range(1, 6):
        recorder.write(step_record(number))
    assert not records(run)
    writer.free.set()
    recorder.write(END)
    recorder.close()
    *steps, end = records(run)
    assert [record.step for record in of_kind(steps, StepRecord)] == [1, 2, 3, 4, 5]
    assert end == END


def phase(detail: str, attempt: int = 1) -> PhaseRecord:
    return PhaseRecord(attempt=attempt, time=0.0, phase="training", detail=detail)


def test_a_full_disk_costs_records_and_not_the_run(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; the error comes from the system."""
    run = RunDirectory(tmp_path)
    recorder = Recorder(MetricsWriter(run, 1), 1)
    recorder.write(phase("before"))
    recorder.flush()
    written = next(run.metrics_dir.glob("*.jsonl")).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 10, limits[1]))
    try:
        for _ in range(3):
            recorder.write(phase("lost"))
        with pytest.raises(OSError, match="File too large"):
            recorder.write(END)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder.write(phase("after"))
    recorder.close()
    lines = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("metrics/*.jsonl")))
    found = [record for line in lines.splitlines() if (record := decode_metric(line))]
    assert [record.detail for record in of_kind(found, PhaseRecord)] == ["before", "after"]
    (warning,) = of_kind(found, WarningRecord)
    assert warning.code == "records-lost"
    assert warning.message.startswith("3 records could not be written (File too large)")


def test_the_first_whole_report_of_a_failure_is_the_reason() -> None:
    """A disk was full, or a rank was killed while it wrote."""
    run = create_run(tiny())
    run.attempt_dir(1).mkdir()
    (run.attempt_dir(1) / "failure.rank1.json").touch()
    assert reported_failures(run, 1) == ()
    first = Failure(rank=2, code="disk-full", reason="full", step=3)
    report_failure(run, 1, first)
    time.sleep(0.01)
    later = Failure(rank=0, reason="consequence")
    report_failure(run, 1, later)
    assert reported_failures(run, 1) == (first, later)


def rates(schedule: str, total: int = 100, warmup: float = 0.1, **ratios: float) -> list[float]:
    train = TrainSpec(
        learning_rate=1.0,
        schedule=schedule,  # type: ignore[arg-type]
        warmup_ratio=warmup,
        **{f"{name}_ratio": ratio for name, ratio in ratios.items()},  # type: ignore[arg-type]
    )
    return [learning_rate(step, total, train) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_rates_rise_over_the_warm_up_and_fall_to_their_floor(schedule: str) -> None:
    whole, floored = rates(schedule), rates(schedule, 1000, min_learning_rate=0.1)
    assert whole[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(whole) == whole[10] == max(floored) == 1.0
    if schedule in ("cosine", "linear"):
        assert all(after < before for before, after in pairwise(whole[10:]))
        assert 0 < whole[-1] < 0.02
    if schedule != "constant":
        assert 0.1 < floored[-1] == min(floored[100:]) < 0.11


def test_rates_of_each_schedule() -> None:
    assert rates("cosine", 101, warmup=0.0)[50] == pytest.approx(0.5, abs=0.02)
    assert set(rates("constant")[9:]) == {1.0}
    assert rates("cosine", 1, warmup=0.05) == [1.0]
    wsd = rates("wsd", decay=0.2)
    assert set(wsd[9:81]) == {1.0}
    assert wsd[80:] == pytest.approx([1 - step / 20 for step in range(20)])
    short = rates("wsd", 10, warmup=0.5, decay=1.0)
    assert short == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_table_of_another_architecture_is_refused() -> None:
    spec = find_preset("tiny").spec
    parameters = spec.model.parameter_count
    _check_table(spec, parameters)
    with pytest.raises(InputError, match="table") as caught:
        _check_table(spec, parameters - 1)
    (problem,) = caught.value.problems
    assert "so_tui_trainer.tools.presets" in problem.remedy


STUBBORN = """
import signal
import time
from so_tui_trainer.session import _install_handlers

def fail():
    raise OSError("no space left on the device")

_install_handlers(fail, fail)
signal.raise_signal(signal.SIGUSR1)
print("ready", flush=True)
while True:  # a signal just before a long sleep would wait for its end
    time.sleep(0.1)
"""


def test_a_rank_that_cannot_write_its_failure_ends() -> None:
    # Without the variable, DeepSpeed prints that there is no GPU.
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1) as rank:
        assert rank.stdout is not None
        assert rank.stderr is not None
        try:
            assert rank.stdout.readline() == b"ready\n"
            rank.terminate()
            assert rank.wait(LIMIT_S) == 143
            assert b"no space left" in rank.stderr.read()
        finally:
            rank.kill()


@pytest.mark.parametrize("part", [b'\\"', b"\\\\"])
def test_a_row_that_was_cut_off_in_a_string_is_checked_at_once(part: bytes) -> None:
    row = b"[" * (sources.MOST_NESTED + 1) + b"]" * (sources.MOST_NESTED + 1)
    began = time.process_time()
    assert not sources._is_deep(b'{"text": "' + row + part * 20_000)
    assert time.process_time() - began < 4


def test_costly_measurements_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads, pauses = 0.0, 0, list[float]()

    def read() -> int:
        nonlocal now, reads
        now, reads = now + 5, reads + 1
        return reads

    def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds
        if len(pauses) == 8:
            threading.Event().wait()  # without end, as the thread ends with the process

    monkeypatch.setattr(metrics, "_rank_memory_bytes", read)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    memory = metrics._HostMemory()
    wait_until(lambda: len(pauses) == 8)
    assert pauses == [20.0] * 5 + [500.0] * 3
    assert memory.latest_bytes == 8


def test_it_counts_what_has_been_touched() -> None:
    before = metrics._rank_memory_bytes()
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"\1" * len(memory))
        assert metrics._rank_memory_bytes() - before > 60 << 20


def test_memory_of_a_rank_includes_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "1000"]) as worker:
        monkeypatch.setattr(metrics, "pss_bytes", lambda pid: int(pid == worker.pid))
        try:
            assert metrics._rank_memory_bytes() == 1
        finally:
            worker.kill()


_RANK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from so_tui.runs import RunDirectory
from so_tui_trainer.metrics import record_network_rate
from so_tui_trainer.ranks import Ranks
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
record_network_rate(Ranks(dist.get_rank(), 2, torch.device("cpu"), dist.group.WORLD), RunDirectory(Path(sys.argv[3])), 1, 2)
dist.destroy_process_group()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "whole_bytes"), [(0.0, 1e7, 1 << 20), (1e-3, 1e10, 1 << 28)]
)
def test_the_rate_is_that_of_a_tensor_that_takes_long_enough(
    latency_s: float, bytes_per_s: float, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    twelve = Ranks(0, 12, torch.device("cpu"), None)  # type: ignore[arg-type]

    def both_s(_ranks: Ranks, size: int) -> float:
        asked.append(size)
        return latency_s + 2 * size * 11 / 12 / bytes_per_s

    monkeypatch.setattr(metrics, "_both_s", both_s)
    assert metrics._measure_network_rate(twelve) == pytest.approx(bytes_per_s, rel=0.05)
    assert asked[-1] == whole_bytes


@pytest.mark.slow
def test_two_ranks_measure_and_the_first_one_records_it(tmp_path: Path) -> None:
    run = create_run(tiny(nodes="2", gpus="1"), tmp_path)
    attempt = new_attempt(run)
    # The warnings are of older names of torch's functions.
    python = [sys.executable, "-W", "error::FutureWarning", "-c", _RANK]
    meeting = f"file://{tmp_path / 'meeting'}"
    ranks = [subprocess.Popen([*python, meeting, str(rank), str(run.path)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    rate = read_network_rate(run, attempt)
    assert rate is not None
    assert rate.nodes == 2
    assert 1e6 < rate.bytes_per_s < 1e12
