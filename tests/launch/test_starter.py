"""Who may start an attempt, and that it starts once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.launch.launch import prepare, read_launch
from so_tui.launch.supervisor.run import supervise
from so_tui.machine import Machine
from so_tui.runs import RunDirectory, read_state, write_state
from so_tui.runs.liveness import identify
from so_tui.runs.records import RunState
from so_tui.spec import InputError, RunSpec
from so_tui.trust.files import Distrust, NotOwnError
from tests.support.problems import refused
from tests.support.supervising import prepared_run


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Give the test process its umask back, which ``supervise`` sets for the process of a
    supervisor.
    """
    before = os.umask(0o022)
    yield
    os.umask(before)


def code_of(run: RunDirectory, attempt: int) -> str:
    """Return the code for which a supervisor is refused."""
    before = read_state(run)
    with pytest.raises(InputError) as caught:
        supervise(run, attempt)
    assert read_state(run) == before, "a refused supervisor writes nothing"
    assert not run.command_path(1).exists()
    assert caught.value.exit_code == 2
    return caught.value.problems[0].code


def started(run: RunDirectory, **values: object) -> None:
    write_state(
        run,
        RunState(
            name=run.name,
            **({"state": "training", "attempt": 1, "host": socket.gethostname()} | values),  # type: ignore[arg-type]
        ),
    )


@pytest.mark.parametrize("attempt", [-1, 0, 2, 999_999])
def test_an_attempt_that_was_never_made_is_refused(run: RunDirectory, attempt: int) -> None:
    assert code_of(run, attempt) == "no-such-attempt"


def test_an_attempt_is_started_once(run: RunDirectory) -> None:
    started(run, attempt=2)
    assert code_of(run, 1) == "attempt-already-started"


def test_supervisor_attaches_only_here_to_the_living(run: RunDirectory) -> None:
    started(run, host="elsewhere")
    assert code_of(run, 1) == "not-this-host"
    started(run, processes=(identify(os.getpid(), "rank"),))
    assert code_of(run, 1) == "no-living-process"


@pytest.mark.parametrize(
    "name", ["", "attempts", "attempts/001", "attempts/001/launch.json", "state.json"]
)
def test_a_run_that_others_can_write_is_refused(run: RunDirectory, name: str) -> None:
    path = run.path / name
    path.chmod(path.stat().st_mode | 0o020)
    with refused("others-can-write") as caught:
        supervise(run, 1)
    assert f"chmod -R go-w {run.path}" in str(caught.value)


def test_files_are_checked_again_when_they_are_opened(run: RunDirectory) -> None:
    """The folder above a run may be another user's, who exchanges files after the first check."""
    run.launch_path(1).chmod(0o666)
    with pytest.raises(NotOwnError) as caught:
        read_launch(run, 1)
    assert caught.value.distrust == Distrust.OTHERS_CAN_WRITE


@pytest.mark.parametrize("umask", [0o002, 0o000])
def test_no_umask_makes_a_run_that_others_can_write(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, umask: int
) -> None:
    before = os.umask(umask)
    try:
        made = prepared_run(prepare(two_ranks, machine, force=True), tmp_path / "runs")
    finally:
        os.umask(before)
    assert not [path for path in (made.path, *made.path.rglob("*")) if path.stat().st_mode & 0o022]
