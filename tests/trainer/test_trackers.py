"""Trackers beside a run: event files, and trackers that fail or hang with a warning only."""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.records import (
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    ResumedRecord,
    StepRecord,
    WarningRecord,
)
from so_tui_trainer import recorder as trackers
from so_tui_trainer.recorder import (
    Recorder,
    _crc32c,
    _EventFile,
    _figures,
    _log_to_tensorboard,
)
from tests.support.launching import of_kind, records
from tests.support.records import step_record

step = partial(step_record, mfu=None, gradient_norm=None)
"""Of a GPU without a known peak, where nothing was clipped."""


def content(folder: Path) -> bytes:
    (path,) = folder.glob("events.out.tfevents.*")
    return path.read_bytes()


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.7e9)


@pytest.mark.usefixtures("_clock")
def test_event_files_are_those_of_tensorboard(tmp_path: Path) -> None:
    """The bytes are what the real TensorBoard reads (tests/system)."""
    assert _crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    file = _EventFile(tmp_path, purge_after=5)
    file.scalars({"loss": 2.5, "rate": 1e-5}, 300, 1.7e9)
    file.close()
    assert content(tmp_path).hex() == (
        "1800000000000000a37f4b220900000040fc54d9411a0d627261696e2e4576656e743a32eced8f9d0f000000"
        "000000006d532b090900000040fc54d94110063a0208011eff125e2800000000000000ff70164a0900000040"
        "fc54d94110ac022a1a0a0b0a046c6f737315000020400a0b0a047261746515acc527378a3ad5cb"
    )


@pytest.mark.usefixtures("_clock")
def test_a_resume_takes_back_later_steps_of_tensorboard(tmp_path: Path) -> None:
    resumed = ResumedRecord(attempt=1, time=0.0, step=5)
    evaluation = EvaluationRecord(attempt=1, time=3.0, step=6, loss=1.5, tokens=9)
    _log_to_tensorboard(tmp_path / "logged", iter((resumed, step(6), evaluation)))
    file = _EventFile(tmp_path / "written", purge_after=5)
    file.scalars(_figures(step(6)), 6, step(6).time)
    evaluated = {"loss": 1.5, "tokens": 9.0, "seconds": 0.0}
    file.scalars({f"evaluation/{name}": value for name, value in evaluated.items()}, 6, 3.0)
    file.close()
    assert content(tmp_path / "logged") == content(tmp_path / "written")


class Fickle:
    """A tracker that fails or hangs at one of its parts, and counts what it got."""

    def __init__(self, fails: str = "", hangs: str = "") -> None:
        self.fails, self.hangs, self.release = fails, hangs, threading.Event()
        self.got: list[MetricRecord] = []

    def _part(self, part: str) -> None:
        if part == self.hangs:
            self.release.wait(60)
        if part == self.fails:
            raise ConnectionError(f"no {part}\nand more")

    def track(self, records: Iterator[MetricRecord]) -> None:
        self._part("start")
        for record in records:
            self._part("write")
            self.got.append(record)
        self._part("close")


def recorded(run: RunDirectory, tracker: Fickle, count: int) -> tuple[Recorder, list[MetricRecord]]:
    recorder = Recorder(MetricsWriter(run, 1), 1)
    recorder.track({"Fickle": tracker.track})
    began = time.monotonic()
    for number in range(1, count + 1):
        recorder.write(step(number))
    assert time.monotonic() - began < 5
    time.sleep(0.1)
    recorder.end_tracking()
    recorder.write(EndRecord(attempt=1, time=0.0, state="finished", step=count))
    recorder.close()
    return recorder, records(run)


@pytest.mark.parametrize("part", ["start", "write", "close"])
def test_a_tracker_that_fails_is_one_warning_and_no_more(tmp_path: Path, part: str) -> None:
    recorder, found = recorded(RunDirectory(tmp_path), Fickle(fails=part), 20)
    assert [warning.message for warning in of_kind(found, WarningRecord)] == [
        f"Fickle ConnectionError: no {part}; nothing more is sent there"
    ]
    assert [record.step for record in of_kind(found, StepRecord)] == list(range(1, 21))
    assert isinstance(found[-1], EndRecord)
    assert not recorder.hanging


@pytest.mark.parametrize("part", ["start", "write", "close"])
def test_a_tracker_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_RECORDS", 10)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    tracker, count, said = Fickle(hangs=part), 50, "has not answered"
    if part == "close":
        count, said = 9, "did not finish"
    recorder, found = recorded(RunDirectory(tmp_path), tracker, count)
    (warning,) = of_kind(found, WarningRecord)
    assert said in warning.message
    assert recorder.hanging
    tracker.release.set()


@pytest.mark.slow
def test_a_run_with_a_broken_wandb_trains_to_its_end(finished_run: RunDirectory) -> None:
    found = records(finished_run)
    warnings = of_kind(found, WarningRecord)
    (failed,) = (warning.message for warning in warnings if warning.code == "tracker-failed")
    assert "Weights & Biases ConnectionError: no route to host" in failed
    assert isinstance(found[-1], EndRecord)
    assert found[-1].state == "finished"
    losses = [record.loss for record in of_kind(found, StepRecord)]
    assert len(losses) == 12
    logged = content(finished_run.path / "tensorboard")
    written = b"".join(re.findall(rb"train/loss\x15(.{4})", logged, re.DOTALL))
    assert struct.unpack("<12f", written) == pytest.approx(losses, rel=1e-6)
