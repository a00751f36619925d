"""Submit runs of ``tiny`` and wait for what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import current_state, start
from so_tui.launch.places import machine_of
from so_tui.launch.slurm.executor import Submission, read_submission
from so_tui.runs import RunDirectory
from so_tui.runs.records import FINAL_STATES, RunState, StepRecord
from tests.support.launching import of_kind, tiny


def submit(folder: Path, **changes: str) -> RunDirectory:
    spec = tiny(**{"slurm__partition": "main", "slurm__site": "generic", **changes})
    return start(prepare(spec, machine_of(spec.slurm)), runs_dir=folder)


def submission_of(run: RunDirectory, attempt: int = 1) -> Submission:
    submission = read_submission(run, attempt)
    assert submission is not None
    return submission


def wait_for(
    run: RunDirectory, ready: Callable[[RunState], bool], timeout_s: float = 400
) -> RunState:
    deadline = time.monotonic() + timeout_s
    while not ready(state := current_state(run)):
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    return state


def ended(state: RunState) -> bool:
    return state.state in FINAL_STATES


def ended_again(state: RunState) -> bool:
    return ended(state) and state.attempt == 2


def trains(state: RunState) -> bool:
    return state.state == "training" and state.step >= 2


def has_saved(state: RunState) -> bool:
    return (state.saved_step or 0) >= 2


def losses(run: RunDirectory, steps: int) -> list[float]:
    """Return the losses that count, of all steps."""
    found = {record.step: record.loss for record in of_kind(run, StepRecord)}
    assert sorted(found) == list(range(1, steps + 1))
    return [found[step] for step in sorted(found)]
