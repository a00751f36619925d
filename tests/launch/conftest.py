"""A run of two ranks of the fake trainer, started by the real supervisor and the real ``deepspeed`` launcher on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from so_tui.launch import start
from so_tui.machine import Machine, inspect_machine
from so_tui.runs import RunDirectory, alive, read_state
from so_tui.runs.records import FINAL_STATES, Process, RunState
from so_tui.spec import RunSpec, find_preset
from tests.support.python_path import python_path

FAKE_TRAINER = Path(__file__).parent / "fake_trainer"
Until = Callable[[RunState], bool]


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This machine as a CPU-only one: the fake trainer uses no GPU, and the tests own none."""
    return msgspec.structs.replace(inspect_machine(), gpus=())


@pytest.fixture(scope="session")
def two_ranks() -> RunSpec:
    return msgspec.structs.replace(find_preset("tiny").spec, gpus=2)


class Runs:
    """Starts runs in a folder of the test's own, and leaves nothing alive behind."""

    def __init__(self, folder: Path, spec: RunSpec, machine: Machine, ahead: RunDirectory | None = None) -> None:
        """``ahead``: the run that ``start`` gives first, started already."""
        self.folder = folder
        self.spec = spec
        self._machine = machine
        self._ahead = ahead
        self._started: list[RunDirectory] = [ahead] if ahead else []

    def start(self) -> RunDirectory:
        if self._ahead:
            ahead, self._ahead = self._ahead, None
            return ahead
        run = start(self.spec, self._machine, runs_dir=self.folder, force=True)
        self._started.append(run)
        return run

    def adopt(self, run: RunDirectory) -> None:
        """Have a run that was started otherwise cleaned up too."""
        self._started.append(run)

    def training(self) -> tuple[RunDirectory, RunState]:
        """A run that has done its first steps, with all its processes known."""
        run = self.start()
        return run, wait_for(run, lambda state: state.step >= 2 and {"runner", "launcher", "rank"} <= roles(state))

    def clean_up(self) -> None:
        for run in self._started:
            with contextlib.suppress(Exception):
                state = read_state(run)
                for process in (*((state.supervisor,) if state.supervisor else ()), *state.processes):
                    if alive(process):
                        os.kill(process.pid, signal.SIGKILL)


class Ahead:
    """Starts the run of a test while the one before still waits: to launch is to import for seconds, to test mostly to wait.

    Such tests are marked ``trains``, with the manners of their fake trainer (tests/launch/fake_trainer), and need no other environment.
    """

    def __init__(self, folder: Path, spec: RunSpec, machine: Machine) -> None:
        self._folder, self._spec, self._machine = folder, spec, machine
        self._started: dict[str, tuple[Runs, RunDirectory]] = {}

    def run_for(self, test: pytest.Item, tests: Sequence[pytest.Item]) -> RunDirectory | None:
        """The run of this test, if it is marked; and that of the one after it is started."""
        place = tests.index(test)
        for item in tests[place : place + 2]:
            marked = item.get_closest_marker("trains")
            if marked and item.nodeid not in self._started:
                runs = Runs(self._folder / str(len(self._started)), self._spec, self._machine)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("PYTHONPATH", python_path(FAKE_TRAINER))
                    patch.setenv("FAKE_TRAINER", " ".join(marked.args))
                    self._started[item.nodeid] = runs, runs.start()
        _, mine = self._started.get(test.nodeid, (None, None))
        return mine

    def clean_up(self) -> None:
        for runs, _ in self._started.values():
            runs.clean_up()


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, two_ranks: RunSpec, machine: Machine) -> Iterator[Ahead]:
    started = Ahead(tmp_path_factory.mktemp("ahead"), two_ranks, machine)
    yield started
    started.clean_up()


@pytest.fixture
def runs(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_ranks: RunSpec,
    machine: Machine,
    ahead: Ahead,
) -> Iterator[Runs]:
    of_module = [item for item in request.session.items if item.path == request.path]
    mine = ahead.run_for(request.node, of_module)
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_TRAINER))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if marked := request.node.get_closest_marker("trains"):
        monkeypatch.setenv("FAKE_TRAINER", " ".join(marked.args))  # for its later attempts
    started = Runs(mine.path.parent if mine else tmp_path / "runs", two_ranks, machine, mine)
    yield started
    started.clean_up()


def roles(state: RunState) -> set[str]:
    return {process.role for process in state.processes}


def process_of(state: RunState, role: str, rank: int | None = None) -> Process:
    return next(process for process in state.processes if process.role == role and (rank is None or process.rank == rank))


def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def wait_for(run: RunDirectory, until: Until, *, timeout_s: float = 60.0, of_attempt: int = 1) -> RunState:
    """The first state that satisfies ``until``; fails when this attempt (or a later one) ends before, or in too long."""
    deadline = time.monotonic() + timeout_s
    while not until(state := read_state(run)):
        assert state.state not in FINAL_STATES or state.attempt < of_attempt, _story(run, state)
        assert time.monotonic() < deadline, _story(run, state)
        time.sleep(0.1)
    return state


def _story(run: RunDirectory, state: RunState) -> str:
    logs = [path.read_text(errors="replace")[-3000:] for path in sorted(run.attempts_dir.glob("*/*.log"))]
    return "\n".join([repr(state), *logs])


def ended(state: RunState) -> bool:
    return state.state in FINAL_STATES
