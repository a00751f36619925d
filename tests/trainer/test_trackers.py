"""Trackers beside a run: event files, and trackers that fail or hang with a warning only."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
    trackers_of,
)
from tests.support.launching import of_kind, records, tiny
from tests.support.records import step_record

step = partial(step_record, mfu=None, gradient_norm=None)
"""Of a GPU without a known peak, where nothing was clipped."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protocol buffer message, by number."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
            yield key >> 3, value
            continue
        size, at = {1: (8, at), 5: (4, at)}.get(key & 7) or varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def events(folder: Path) -> list[tuple[int, dict[str, float], bool]]:
    """Return the events of the one file: its step, scalars by tag, and whether a session starts,
    which takes back what is not older.
    """
    (path,) = folder.glob("events.out.tfevents.*")
    data, at, found = path.read_bytes(), 0, []

    def checked(size: int) -> bytes:
        nonlocal at
        content, (expected,) = data[at : at + size], struct.unpack_from("<I", data, at + size)
        rotated = (expected - 0xA282EAD8) & 0xFFFFFFFF
        assert (rotated << 15 | rotated >> 17) & 0xFFFFFFFF == _crc32c(content)
        at += size + 4
        return content

    while at < len(data):
        message = dict(fields(checked(struct.unpack("<Q", checked(8))[0])))
        values = [dict(fields(value)) for _, value in fields(message.get(5, b""))]
        scalars = {value[1].decode(): struct.unpack("<f", value[2])[0] for value in values}
        found.append((message.get(2, 0), scalars, message.get(7) == b"\x08\x01"))
    return found


def test_event_files_are_those_of_tensorboard(tmp_path: Path) -> None:
    assert _crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    file = _EventFile(tmp_path)
    file.scalars({"train/loss": 2.5, "train/learning_rate": 1e-5}, 300, 1.7e9)
    file.close()
    # The length of the first event (time and "brain.Event:2") and its checksum: how every event
    # file begins.
    (path,) = tmp_path.iterdir()
    assert path.read_bytes()[:12] == bytes.fromhex("1800000000000000a37f4b22")
    (_, _, _), (number, scalars, _) = events(tmp_path)
    assert number == 300
    assert scalars == {"train/loss": 2.5, "train/learning_rate": pytest.approx(1e-5)}


def test_a_resume_takes_back_later_steps_of_tensorboard(tmp_path: Path) -> None:
    resumed = ResumedRecord(attempt=1, time=0.0, step=5)
    evaluation = EvaluationRecord(attempt=1, time=0.0, step=6, loss=1.5, tokens=9)
    _log_to_tensorboard(tmp_path, iter((resumed, step(6), evaluation)))
    _, session, (_, trained, _), (_, evaluated, _) = events(tmp_path)
    assert session[::2] == (6, True)
    assert trained["train/loss"] == 2.0
    assert evaluated == {
        "evaluation/loss": 1.5,
        "evaluation/tokens": 9.0,
        "evaluation/seconds": 0.0,
    }


def test_figures_are_what_is_known_of_a_step() -> None:
    found = _figures(step(3))
    assert found["train/loss"] == 2.0
    unknown = {"train/step", "train/time", "train/attempt", "train/mfu", "train/gradient_norm"}
    assert not unknown & found.keys()


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


def test_a_tracker_gets_every_record_in_order(tmp_path: Path) -> None:
    tracker = Fickle()
    recorder, found = recorded(RunDirectory(tmp_path), tracker, 20)
    assert tracker.got == found[:-1]
    assert not recorder.hanging


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert trackers_of(run, tiny()) == {}
    asked = tiny(tracking__wandb="true", tracking__tensorboard="true")
    assert list(trackers_of(run, asked)) == ["Weights & Biases", "TensorBoard"]


@pytest.mark.slow
def test_a_run_with_a_broken_wandb_trains_to_its_end(finished_run: RunDirectory) -> None:
    found = records(finished_run)
    warnings = of_kind(found, WarningRecord)
    (failed,) = (warning.message for warning in warnings if warning.code == "tracker-failed")
    assert "Weights & Biases ConnectionError: no route to host" in failed
    assert isinstance(found[-1], EndRecord)
    assert found[-1].state == "finished"
    losses = {record.step: record.loss for record in of_kind(found, StepRecord)}
    assert len(losses) == 12
    assert {
        number: scalars["train/loss"]
        for number, scalars, _ in events(finished_run.path / "tensorboard")
        if "train/loss" in scalars
    } == {number: pytest.approx(loss, rel=1e-6) for number, loss in losses.items()}
