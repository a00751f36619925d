"""Real runs whose checkpoints are written while they train: two ranks, and a disk that is slow."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.shim import Shim, build
from so_tui.runs import create_run, state
from so_tui.runs.directory import checkpoint_folders, run_id
from so_tui.runs.records import BindingRecord, CheckpointRecord, EndRecord, PhaseRecord, StepRecord
from so_tui_trainer import checkpoint_folder
from tests.support.launching import Kind, log, of_kind, records, start, tiny
from tests.support.python_path import python_path
from tests.support.shared_run import SUPEROFFLOAD

pytestmark = pytest.mark.slow

SLOW_DISK = """
import os, time
write = os.pwrite
os.pwrite = lambda *arguments: time.sleep(float(os.environ["SLOW_S"])) or write(*arguments)
"""
"""Only states are written by this function: three arrays a sub-group."""
SETTINGS = SUPEROFFLOAD | {
    "gpus": "2",
    "train__steps": "16",
    "train__deterministic": "true",
    "train__micro_batch": "1",
    "data__sequence_length": "64",
    "checkpoint__every_steps": "3",
}


class Run:
    """A run on a slow disk, and the processes of its newest attempt."""

    def __init__(self, folder: Path, slow_s: float, **settings: str) -> None:
        (folder / "slow").mkdir(parents=True)
        (folder / "slow" / "sitecustomize.py").write_text(SLOW_DISK)
        self._environment = {"PYTHONPATH": python_path(folder / "slow"), "SLOW_S": str(slow_s)}
        self._spec = tiny(**SETTINGS | settings)
        self.directory = create_run(self._spec, folder / "runs")
        self.attempt = 0

    def start(self, **environment: str) -> None:
        self.attempt += 1
        self._process = start(self.directory, self._spec, self._environment | environment)

    def wait_for(self, moment: Callable[[], bool]) -> None:
        end = time.monotonic() + 200
        while not moment():
            assert self._process.poll() is None, log(self.directory, self.attempt)
            assert time.monotonic() < end, log(self.directory, self.attempt)
            time.sleep(0.02)

    def finish(self) -> EndRecord:
        """Wait for the end of the attempt and return what it says."""
        self._process.wait(timeout=200)
        last = records(self.directory)[-1]
        assert isinstance(last, EndRecord), log(self.directory, self.attempt)
        return last

    def kill(self) -> None:
        ranks = [rank.pid for binding in self.of(BindingRecord) for rank in binding.ranks]
        for pid in {*ranks, self._process.pid}:
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [each for each in of_kind(self.directory, kind) if each.attempt == self.attempt]

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written while this attempt trains."""
        phases = self.of(PhaseRecord)
        return bool(phases) and phases[-1].detail.startswith("writing the checkpoint")

    @property
    def saved(self) -> list[CheckpointRecord]:
        return self.of(CheckpointRecord)

    @property
    def valid(self) -> list[int]:
        """The steps of the checkpoints, all of which must be whole."""
        paths = checkpoint_folders(self.directory.checkpoints_dir)
        return [checkpoint_folder._verify(path).step for path in paths]

    @property
    def losses(self) -> dict[int, float]:
        return {record.step: record.loss for record in self.of(StepRecord)}


def states(path: Path) -> list[bytes]:
    files = sorted(checkpoint_folder.optimizer_folder(path).glob("*.states"))
    return [file.read_bytes() for file in files]


def test_a_run_trains_while_saving_and_resumes_exactly(tmp_path: Path) -> None:
    run = Run(tmp_path, 0.1, checkpoint__keep="9")
    run.start()
    assert run.finish().state == "finished"
    first, *others = run.saved
    assert (first.step, first.due_step) == (3, None)
    assert first.paused_s is not None
    assert first.paused_s < first.seconds / 2
    assert [record.step for record in (first, *others)] == run.valid
    assert run.valid[-1] == 16
    waited = next(record for record in others if record.due_step is not None)
    assert waited.due_step in range(6, waited.step, 3)
    # Once more from the first of them.
    uninterrupted, expected = run.losses, states(Path(others[-1].path))
    for record in others:
        shutil.rmtree(record.path)
    run.start()
    assert run.finish().state == "finished"
    assert run.losses == {step: loss for step, loss in uninterrupted.items() if step > 3}
    assert states(Path(run.saved[-1].path)) == expected


def test_a_broken_save_leaves_the_checkpoint_before(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = build(tmp_path_factory.getbasetemp())
    if library is None:
        pytest.skip("the disk is filled by a library that needs a C compiler")
    run = Run(tmp_path, 0.2, gpus="1", train__steps="10000", checkpoint__keep="1")
    run.start()
    run.wait_for(lambda: bool(run.saved) and run.is_writing())
    run.kill()
    newest = checkpoint_folder.newest(run.directory.checkpoints_dir, run_id(run.directory))
    assert newest is not None
    assert not newest.damaged
    assert newest.manifest.step >= run.saved[-1].step
    killed_after = newest.manifest.step

    run.start()
    run.wait_for(run.is_writing)
    state.request(run.directory, "stop")
    end = run.finish()
    state.clear(run.directory, "stop")
    assert end.state == "stopped"
    assert run.losses.keys() >= {killed_after + 1}
    assert [record.step for record in run.saved][-1] == end.step
    assert len(run.saved) >= 2  # the one that was being written, and the last
    assert run.valid == [end.step]

    shim = Shim(library, tmp_path / "control")
    run.start(**shim.environment())
    run.wait_for(run.is_writing)
    shim.fill("/checkpoints/")
    failed = run.finish()
    assert (failed.state, failed.code) == ("failed", "disk-full")
    assert failed.step > end.step
    before = run.saved[-1].step if run.saved else end.step
    assert run.valid == [before]
    assert not list(run.directory.checkpoints_dir.glob("*.partial"))
