"""Runs of the fake trainer, started by the real supervisor and ``deepspeed`` launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import start
from so_tui.machine import Machine
from so_tui.runs import RunDirectory, alive, read_state
from so_tui.runs.liveness import read_stat
from so_tui.runs.records import FINAL_STATES, Process, RunState
from so_tui.spec import RunSpec
from tests.support.waiting import wait_until

FAKE_TRAINER = Path(__file__).parents[1] / "launch" / "fake_trainer"
Until = Callable[[RunState], bool]


class Runs:
    """Starts runs in a test's own folder, and leaves no process behind."""

    def __init__(self, folder: Path, spec: RunSpec, machine: Machine) -> None:
        self.folder = folder
        self.spec = spec
        self._machine = machine
        self._started: list[RunDirectory] = []

    def start(self) -> RunDirectory:
        run = start(prepare(self.spec, self._machine, force=True), runs_dir=self.folder)
        self._started.append(run)
        return run

    def adopt(self, run: RunDirectory) -> None:
        self._started.append(run)

    def training(self) -> tuple[RunDirectory, RunState]:
        """Start a run and return it after its first steps, when all its processes are known."""
        run, everyone = self.start(), {"runner", "launcher", "rank"}
        return run, wait_for(run, lambda state: state.step >= 2 and everyone <= roles(state))

    def clean_up(self) -> None:
        for run in self._started:
            clean_up(run)


def clean_up(run: RunDirectory) -> None:
    with contextlib.suppress(Exception):
        state = read_state(run)
        processes = [*filter(None, [state.supervisor]), *state.processes]
        for process in filter(alive, processes):
            kill(process)
        wait_for_end_of(*processes)


def roles(state: RunState) -> set[str]:
    return {process.role for process in state.processes}


def process_of(state: RunState, role: str, rank: int | None = None) -> Process:
    mine = (process for process in state.processes if process.role == role)
    return next(process for process in mine if rank in (None, process.rank))


def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def wait_for(
    run: RunDirectory, until: Until, *, timeout_s: float = 60.0, of_attempt: int = 1
) -> RunState:
    """Return the first state that satisfies ``until``; fail if an attempt ends, or too late.

    Before training, time counts only while the processes compute nothing.
    """
    deadline, seen = time.monotonic() + timeout_s, None
    while not until(state := read_state(run)):
        over = ended(state) and state.attempt >= of_attempt
        assert not over, _state_and_logs(run, state)
        if state.state in ("starting", "loading") and (computed := _cpu_ticks(state)) != seen:
            seen, deadline = computed, time.monotonic() + timeout_s
        assert time.monotonic() < deadline, _state_and_logs(run, state)
        time.sleep(0.1)
    return state


def _cpu_ticks(state: RunState) -> dict[int, int]:
    stats = ((process.pid, read_stat(process.pid)) for process in state.processes)
    return {pid: stat.cpu_ticks for pid, stat in stats if stat is not None}


def wait_for_end_of(*processes: Process, timeout_s: float = 30.0) -> None:
    wait_until(lambda: not any(map(alive, processes)), timeout_s)


def _state_and_logs(run: RunDirectory, state: RunState) -> str:
    logs = (path.read_text(errors="replace") for path in sorted(run.attempts_dir.glob("*/*.log")))
    return "\n".join([repr(state), *(log[-3000:] for log in logs)])


def ended(state: RunState) -> bool:
    return state.state in FINAL_STATES
