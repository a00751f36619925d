"""What is started, and what an interrupted start leaves behind, without processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.launch.in_job import _fitting_the_disk
from so_tui.launch.launch import Executor, prepare, prepare_resume, read_launch
from so_tui.launch.lifecycle import resume, start
from so_tui.machine import Machine
from so_tui.plan import planner
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory, read_spec, read_state, state, write_state
from so_tui.runs.liveness import identify
from so_tui.runs.records import RunState
from so_tui.spec import Refused, RunSpec
from tests.support.problems import refused, rejected


class Recording(Executor):
    """An executor that reads what was written, and answers as a supervisor that took over."""

    def __init__(self, *, takes_over: bool = True, interrupted: bool = False) -> None:
        self._takes_over, self._interrupted = takes_over, interrupted

    def start(self, run: RunDirectory, attempt: int, digest: str = "") -> Any:
        self.run = RunDirectory(run.path)
        self.launch = read_launch(run, attempt, digest)
        if self._takes_over:
            self.take_over(attempt)
        return self

    def take_over(self, attempt: int) -> None:
        supervisor = identify(os.getpid(), "supervisor")
        found = RunState(
            name=self.run.name, state="stopped", attempt=attempt, supervisor=supervisor
        )
        write_state(self.run, found)

    def poll(self) -> int | None:
        if self._interrupted:
            raise KeyboardInterrupt
        return None


class Unreadable(Recording):
    """The supervisor takes over while the file system answers nobody here."""

    def take_over(self, attempt: int) -> None:
        super().take_over(attempt)
        self.written = self.run.state_path.read_bytes()
        self.run.state_path.write_bytes(self.written[:10])


@pytest.fixture
def launch(two_ranks: RunSpec, machine: Machine) -> Launch:
    return prepare(two_ranks, machine, force=True)


def test_what_was_prepared_is_what_starts(
    tmp_path: Path, launch: Launch, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Recording()

    def unplanned(call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(planner, "make_plan", lambda *_, **__: pytest.fail("planned again"))
            return call()

    run = unplanned(lambda: start(launch, runs_dir=tmp_path, executor=executor))
    assert executor.launch == launch
    again = prepare_resume(run, machine, values={"train.learning_rate": "1e-4"}, force=True)
    assert unplanned(lambda: resume(run, again, executor=executor)) == 2
    assert executor.launch == again
    assert read_spec(run) == again.spec


def test_resume_needs_a_checkpoint(tmp_path: Path, launch: Launch, machine: Machine) -> None:
    run = start(launch, runs_dir=tmp_path, executor=Recording())
    write_state(run, replace(read_state(run), saved_step=11))
    with refused("checkpoint-missing"):
        prepare_resume(run, machine, force=True)
    again = prepare_resume(run, machine, force=True, start_over=True)
    assert again.start_over
    assert resume(run, again, executor=Recording()) == 2
    assert read_launch(run, 2) == again
    (run.checkpoints_dir / "step-000009").mkdir(parents=True)
    assert not prepare_resume(run, machine, force=True).start_over


def test_resume_onto_a_full_disk_leaves_no_attempt(
    tmp_path: Path, launch: Launch, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(launch, runs_dir=tmp_path, executor=Recording())
    again = replace(prepare_resume(run, machine, force=True), forced=False)
    full = SimpleNamespace(total=2**40, free=4096)
    monkeypatch.setattr("so_tui.launch.checks._refuse_missing_compiler", lambda *_: None)
    monkeypatch.setattr("so_tui.launch.checks.shutil.disk_usage", lambda _: full)
    with pytest.raises(Refused) as caught:
        resume(run, again, executor=Recording())
    assert "disk-too-small" in caught.value.codes
    assert run.attempts() == (1,)


@pytest.mark.parametrize("here", [True, False])
def test_the_disk_where_a_run_trains_decides_how_many_are_kept(
    here: bool, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job has its own look once it runs."""
    free = [5 * 10**9 // 2]
    usage = partial(SimpleNamespace, total=2**40)
    monkeypatch.setattr("so_tui.launch.checks.shutil.disk_usage", lambda _: usage(free=free[0]))
    monkeypatch.setattr("so_tui.launch.checks._refuse_missing_compiler", lambda *_: None)
    monkeypatch.setattr(Recording, "here", here)
    large = replace(launch, forced=False, plan=replace(launch.plan, disk_bytes=10**9))
    run = start(large, runs_dir=tmp_path, executor=Recording())
    submitted = read_launch(run, 1)
    assert submitted.spec.checkpoint.keep == (1 if here else 2)
    assert len(submitted.plan.warnings) == len(large.plan.warnings) + here
    there = _fitting_the_disk(run, large)
    assert (there.spec.checkpoint.keep, there.plan.disk_peak_bytes) == (1, 2 * 10**9)
    free[0] = 3 * 10**9 // 2
    with refused("disk-too-small", forceable=True):
        _fitting_the_disk(run, large)


def test_interrupted_start_is_undone(tmp_path: Path, launch: Launch) -> None:
    for too_late in (False, True):
        executor = Recording(takes_over=too_late, interrupted=True)
        with pytest.raises(KeyboardInterrupt):
            start(launch, runs_dir=tmp_path, executor=executor)
        assert len(list(tmp_path.glob("*/spec.json"))) == too_late
    assert read_state(executor.run).supervisor is not None
    assert state.pending(executor.run) == {"stop"}


def test_unreadable_start_is_kept(tmp_path: Path, launch: Launch) -> None:
    executor = Unreadable()
    with rejected("unreadable-state"):
        start(launch, runs_dir=tmp_path, executor=executor)
    executor.run.state_path.write_bytes(executor.written)
    assert read_state(executor.run).supervisor is not None
