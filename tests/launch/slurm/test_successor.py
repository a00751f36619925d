"""Whether another job continues a run whose job has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.in_job import _goes_on
from so_tui.launch.supervisor.ending import request_stop
from so_tui.runs import RunDirectory, create_run, read_state, write_state
from so_tui.runs.records import OutcomeCode, RunState
from tests.support.launching import tiny


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tiny(slurm__partition="gh"), tmp_path)


def ended(run: RunDirectory, state: str, saved_step: int | None, *, warned: bool = True) -> None:
    request_stop(run, warned=warned)
    write_state(run, replace(read_state(run), state=state, saved_step=saved_step))


@pytest.mark.parametrize(
    ("saved_before", "saved", "continues"),
    [
        (None, 10, True),
        (10, 20, True),
        (10, 10, False),
        (10, None, False),
        (None, None, False),
        (None, 0, False),
    ],
)
def test_a_job_that_saved_nothing_new_has_no_successor(
    saved_before: int | None, saved: int | None, continues: bool, run: RunDirectory
) -> None:
    before = RunState(name=run.name, state="queued", saved_step=saved_before)
    ended(run, "stopped", saved)
    assert _goes_on(run, before, start_over=False, requeue=False) is continues


def test_starting_over_forgets_what_was_discarded(run: RunDirectory) -> None:
    before = RunState(name=run.name, state="queued", saved_step=100)
    ended(run, "stopped", 20)
    assert _goes_on(run, before, start_over=True, requeue=False)


@pytest.mark.parametrize("state", ["finished", "failed", "lost"])
def test_only_a_stopped_run_continues(state: str, run: RunDirectory) -> None:
    ended(run, state, 20)
    before = RunState(name=run.name, state="queued")
    assert not _goes_on(run, before, start_over=False, requeue=True)


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_a_person_stopped_does_not_continue(first: bool, run: RunDirectory) -> None:
    """Whether the person or the warning came first."""
    request_stop(run, warned=not first)
    ended(run, "stopped", 20, warned=first)
    before = RunState(name=run.name, state="queued")
    assert not _goes_on(run, before, start_over=False, requeue=True)


@pytest.mark.parametrize(
    ("code", "saved_step", "by_a_person", "lost"),
    [
        (OutcomeCode.NODE_LOST, 20, False, True),
        (OutcomeCode.NODE_LOST, 10, False, False),
        (OutcomeCode.NODE_LOST, 20, True, False),
        (OutcomeCode.NON_FINITE, 20, False, False),
    ],
)
def test_a_run_that_lost_a_node_continues_if_it_saved_something(
    code: OutcomeCode, saved_step: int, by_a_person: bool, lost: bool, run: RunDirectory
) -> None:
    if by_a_person:
        request_stop(run)
    write_state(run, replace(read_state(run), state="failed", code=code, saved_step=saved_step))
    before = RunState(name=run.name, state="queued", saved_step=10)
    assert _goes_on(run, before, start_over=False, requeue=True) is lost
    assert not _goes_on(run, before, start_over=False, requeue=False)
