"""Starting without a run's processes: what is started, and what an interrupted start leaves
behind.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from so_tui.launch.launch import Executor, prepare, prepare_resume, read_launch
from so_tui.launch.lifecycle import resume, start
from so_tui.machine import Machine
from so_tui.plan import planner
from so_tui.runs import RunDirectory, read_spec, read_state, state, write_state
from so_tui.runs.liveness import identify
from so_tui.runs.records import RunState
from so_tui.spec import Refused, RunSpec
from tests.support.problems import refused, rejected


class Interrupted(Executor):
    """An executor during whose start the user interrupts, before or (``too_late``) after the
    supervisor has written its first state.
    """

    def __init__(self, *, too_late: bool) -> None:
        self._too_late = too_late

    def start(self, run: RunDirectory, attempt: int) -> Any:
        self._run = run
        return self

    def poll(self) -> int | None:
        if self._too_late:
            supervisor = identify(os.getpid(), "supervisor")
            write_state(
                self._run,
                RunState(
                    name=self._run.name,
                    state="starting",
                    started=0.0,
                    attempt=1,
                    supervisor=supervisor,
                ),
            )
        raise KeyboardInterrupt


class Recording(Executor):
    """An executor that reads what was written, and answers as a supervisor that took over."""

    def start(self, run: RunDirectory, attempt: int) -> Any:
        self.run = run
        self.launch = read_launch(self.run, attempt)
        supervisor = identify(os.getpid(), "supervisor")
        write_state(
            self.run,
            RunState(name=self.run.name, state="stopped", attempt=attempt, supervisor=supervisor),
        )
        return self

    def poll(self) -> int | None:
        return None


class Unreadable(Executor):
    """An executor whose supervisor takes over while the file system answers nobody here."""

    def start(self, run: RunDirectory, attempt: int) -> Any:
        Recording().start(run, attempt)
        self.written = run.state_path.read_bytes()
        run.state_path.write_bytes(self.written[:10])
        return self

    def poll(self) -> int | None:
        return None


def test_what_was_prepared_is_what_starts(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = prepare(two_ranks, machine, force=True)
    executor = Recording()
    with monkeypatch.context() as patch:
        patch.setattr(planner, "make_plan", lambda *_, **__: pytest.fail("planned again"))
        run = start(launch, runs_dir=tmp_path, executor=executor)
    assert executor.launch == launch
    again = prepare_resume(run, machine, values={"train.learning_rate": "1e-4"}, force=True)
    with monkeypatch.context() as patch:
        patch.setattr(planner, "make_plan", lambda *_, **__: pytest.fail("planned again"))
        assert resume(run, again, executor=executor) == 2
    assert executor.launch == again
    assert read_spec(run) == again.spec


def test_resume_needs_a_checkpoint(tmp_path: Path, two_ranks: RunSpec, machine: Machine) -> None:
    run = start(prepare(two_ranks, machine, force=True), runs_dir=tmp_path, executor=Recording())
    write_state(run, msgspec.structs.replace(read_state(run), saved_step=11))
    with refused("checkpoint-missing"):
        prepare_resume(run, machine, force=True)
    again = prepare_resume(run, machine, force=True, start_over=True)
    assert again.start_over
    assert resume(run, again, executor=Recording()) == 2
    assert read_launch(run, 2) == again
    (run.checkpoints_dir / "step-000009").mkdir(parents=True)
    assert not prepare_resume(run, machine, force=True).start_over


def test_resume_onto_a_full_disk_leaves_no_attempt(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(prepare(two_ranks, machine, force=True), runs_dir=tmp_path, executor=Recording())
    write_state(run, msgspec.structs.replace(read_state(run), state="stopped"))
    again = msgspec.structs.replace(prepare_resume(run, machine, force=True), forced=False)
    with monkeypatch.context() as patch:
        patch.setattr("so_tui.launch.checks._refuse_missing_compiler", lambda *_: None)
        patch.setattr(
            "so_tui.launch.checks.shutil.disk_usage",
            lambda _: SimpleNamespace(total=2**40, free=4096),
        )
        with pytest.raises(Refused) as caught:
            resume(run, again, executor=Recording())
    assert "disk-too-small" in caught.value.codes
    assert run.attempts() == (1,)


def test_interrupted_start_is_undone(tmp_path: Path, two_ranks: RunSpec, machine: Machine) -> None:
    launch = prepare(two_ranks, machine, force=True)
    for too_late, left in ((False, 0), (True, 1)):
        with pytest.raises(KeyboardInterrupt):
            start(launch, runs_dir=tmp_path, executor=Interrupted(too_late=too_late))
        assert len(list(tmp_path.glob("*/spec.json"))) == left
    run = RunDirectory(next(tmp_path.glob("*/spec.json")).parent)
    assert read_state(run).supervisor is not None
    assert state.pending(run) == {"stop"}


def test_unreadable_start_is_kept(tmp_path: Path, two_ranks: RunSpec, machine: Machine) -> None:
    executor = Unreadable()
    with rejected("unreadable-state"):
        start(prepare(two_ranks, machine, force=True), runs_dir=tmp_path, executor=executor)
    run = RunDirectory(next(tmp_path.glob("*/spec.json")).parent)
    run.state_path.write_bytes(executor.written)
    assert read_state(run).supervisor is not None
