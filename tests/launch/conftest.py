"""Fixtures for runs of two ranks of the fake trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from so_tui.launch.launch import prepare
from so_tui.machine import Machine, inspect_machine
from so_tui.runs import RunDirectory
from so_tui.spec import RunSpec, find_preset
from tests.support.fake_runs import FAKE_TRAINER, Ahead, Runs
from tests.support.python_path import python_path
from tests.support.supervising import prepared_run


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This machine as a CPU-only one: the fake trainer uses no GPU, and the tests own none."""
    return msgspec.structs.replace(inspect_machine(), gpus=())


@pytest.fixture(scope="session")
def two_ranks() -> RunSpec:
    return msgspec.structs.replace(find_preset("tiny").spec, gpus=2)


@pytest.fixture
def run(tmp_path: Path, two_ranks: RunSpec, machine: Machine) -> RunDirectory:
    """A run with a prepared attempt that nobody has started."""
    return prepared_run(prepare(two_ranks, machine, force=True), tmp_path / "runs")


@pytest.fixture(scope="module")
def ahead(
    tmp_path_factory: pytest.TempPathFactory, two_ranks: RunSpec, machine: Machine
) -> Iterator[Ahead]:
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
