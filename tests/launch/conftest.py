"""Fixtures for runs of two ranks of the fake trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.launch import prepare
from so_tui.machine import Machine, inspect_machine
from so_tui.runs import RunDirectory
from so_tui.spec import RunSpec, find_preset
from tests.support.fake_runs import FAKE_TRAINER, Runs
from tests.support.launching import prepared_run
from tests.support.python_path import python_path


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This machine as a CPU-only one: the fake trainer uses no GPU, and the tests own none."""
    return replace(inspect_machine(), gpus=())


@pytest.fixture(scope="session")
def two_ranks() -> RunSpec:
    return replace(find_preset("tiny").spec, gpus=2)


@pytest.fixture
def run(tmp_path: Path, two_ranks: RunSpec, machine: Machine) -> RunDirectory:
    """A run with a prepared attempt that nobody has started."""
    return prepared_run(prepare(two_ranks, machine, force=True), tmp_path / "runs")


@pytest.fixture
def manners() -> str:
    """The fake trainer's behaviour; a test names it with ``parametrize``."""
    return ""


@pytest.fixture
def runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_ranks: RunSpec,
    machine: Machine,
    manners: str,
) -> Iterator[Runs]:
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_TRAINER))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FAKE_TRAINER", manners)
    started = Runs(tmp_path / "runs", two_ranks, machine)
    yield started
    started.clean_up()
