"""What a start leaves behind when it is interrupted, without processes of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from so_tui.launch import start
from so_tui.launch.executors.local import Started
from so_tui.machine import Machine
from so_tui.runs import RunDirectory, control, read_state, write_state
from so_tui.runs.liveness import identify
from so_tui.runs.records import RunState
from so_tui.spec import RunSpec


class Interrupted:
    """A place where the user interrupts while the supervisor starts, which has said by then that it lives, or has not."""

    def __init__(self, *, too_late: bool) -> None:
        self._too_late = too_late

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Started:
        self._run = RunDirectory(argv[argv.index("supervise") + 1])
        return self

    def ended(self) -> int | None:
        if self._too_late:
            supervisor = identify(os.getpid(), "supervisor")
            write_state(self._run, RunState(name=self._run.name, state="starting", started=0.0, attempt=1, supervisor=supervisor))
        raise KeyboardInterrupt


def test_an_interrupted_start_leaves_nothing_or_stops_what_lives_already(tmp_path: Path, two_ranks: RunSpec, machine: Machine) -> None:
    for too_late, left in ((False, 0), (True, 1)):
        with pytest.raises(KeyboardInterrupt):
            start(two_ranks, machine, runs_dir=tmp_path, force=True, place=Interrupted(too_late=too_late))
        assert len(list(tmp_path.glob("*/spec.json"))) == left
    run = RunDirectory(next(tmp_path.glob("*/spec.json")).parent)
    assert read_state(run).supervisor is not None
    assert control.pending(run) == {"stop"}
