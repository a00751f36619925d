"""Causes of slow steps, each made to happen to one real run of the tiny model.

The planned step is half of what the run takes undisturbed, so that there is always something to
explain, however busy this host is: what is compared is which cause is found, not how long a step
takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import start
from so_tui.launch.supervisor.samples import _read_placements
from so_tui.launch.supervisor.slowness import _Measured, _measured_of, _Planned, _ranked_causes
from so_tui.machine import Machine
from so_tui.plan.plan import PlannedRates, StepTime
from so_tui.runs import RunReader, read_state
from so_tui.runs.records import Cause, Process, Sample, StepRecord
from so_tui.spec import RunSpec
from tests.support.fake_runs import FAKE_TRAINER, Runs, process_of, roles, wait_for
from tests.support.launching import tiny
from tests.support.python_path import checkout_path, python_path

pytestmark = pytest.mark.slow
SECONDS, LEAST_STEPS = 2.5, 3
"""How long each cause lasts at least."""


class Watched:
    """The run, what it measures, and which causes that gives."""

    def __init__(self, runs: Runs, machine: Machine) -> None:
        self.run = runs.start()
        self._machine = machine
        self._reader = RunReader(self.run)
        self._steps: list[StepRecord] = []
        self._samples: list[Sample] = []
        state = wait_for(self.run, lambda state: state.step >= 5 and "adam" in roles(state))
        self._processes, self.adam = state.processes, process_of(state, "adam")
        self.binding = prepare(runs.spec, machine, force=True).plan.binding
        self._planned = self._halved(self._measure())

    def causes(self) -> tuple[Cause, ...]:
        """Return what makes the run slow from now on."""
        return _ranked_causes(self._measure(), self._planned)

    def _halved(self, usual: _Measured) -> _Planned:
        half_s = (usual.step_s - usual.data_s) / 2
        step = StepTime(
            forward_s=half_s, backward_s=0.0, exposed_optimizer_s=0.0, data_s=usual.data_s
        )
        assert usual.adam_bytes_per_s is not None
        assert usual.d2h_bytes_per_s is not None
        rates = PlannedRates(
            adam_bytes_per_s=usual.adam_bytes_per_s,
            d2h_bytes_per_s=1.0,
            h2d_bytes_per_s=1.0,
            d2h_bytes=0,
            h2d_bytes=0,
        )
        return _Planned(step=step, rates=rates, binding=self.binding)

    def _measure(self) -> _Measured:
        """Return what the run does from now on for a while. How long a step may take depends on
        the host and on the cause, so that each has two minutes of its own.
        """
        self._poll()
        steps, samples = len(self._steps), len(self._samples)
        until = came = time.monotonic() + SECONDS
        while (
            time.monotonic() < until
            or len(self._steps) < steps + LEAST_STEPS
            or len(self._samples) < samples + 2
        ):
            assert time.monotonic() < came + 120, read_state(self.run)
            time.sleep(0.1)
            known = len(self._steps)
            self._poll()
            if len(self._steps) > known:
                came = time.monotonic()
        placed = replace(self._samples[-1], placement=_read_placements(self._processes))
        # The first step, and the first sample, began before.
        seen = self._steps[steps + 1 :], [*self._samples[samples + 1 :], placed]
        return _measured_of(*seen, self._machine, self.binding)

    def _poll(self) -> None:
        update = self._reader.poll()
        self._steps += update.steps
        self._samples += [sample for samples in update.samples.values() for sample in samples]


@contextmanager
def bound_to(process: Process, cpus: Sequence[int]) -> Iterator[None]:
    """Move all threads of a process for a while."""
    threads = [int(folder.name) for folder in Path(f"/proc/{process.pid}/task").iterdir()]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    for thread in threads:
        os.sched_setaffinity(thread, cpus)
    yield
    for thread, own in before.items():
        os.sched_setaffinity(thread, own)


@contextmanager
def busy(cpus: Sequence[int]) -> Iterator[None]:
    """Keep these cores busy for a while. One process each must do: Adam's worker has a time limit,
    and the loop leaves a niced one a hundredth of its core.
    """
    program = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", program, str(cpu)]) for cpu in cpus]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes a core for Adam")
def test_causes_of_slow_steps_are_found(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = {"train__steps": "100000", "checkpoint__at_end": "false"}
    spec = tiny(gpus="1", offload__mode="superoffload", checkpoint__every_steps="0", **endless)
    runs = Runs(tmp_path / "runs", spec, machine)
    monkeypatch.setenv("PYTHONPATH", checkout_path())
    try:
        watched = Watched(runs, machine)
        usual = {cause.code for cause in watched.causes()}
        assert not {"binding", "memory-node", "clocks", "copies", "data"} & usual
        (binding,) = watched.binding
        with bound_to(watched.adam, binding.main_cpus):
            assert watched.causes()[0].code == "binding"
        os.setpriority(os.PRIO_PROCESS, watched.adam.pid, 19)
        with busy(binding.adam_cpus):
            first = watched.causes()[0]
        assert first.code == "foreign-load"
        assert first.measured > 0.3
        assert first.nice >= 19
    finally:
        runs.clean_up()


def test_a_supervisor_compares_its_run_with_the_plan(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake trainer's records say that it has trained for minutes, longer a step than
    planned.
    """
    step = StepTime(forward_s=0.01, backward_s=0.02, exposed_optimizer_s=0.0, data_s=0.0)
    launch = prepare(two_ranks, machine, force=True)
    launch = replace(launch, plan=replace(launch.plan, step=step, step_s=step.total_s))
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_TRAINER))
    monkeypatch.setenv("FAKE_TRAINER", "long-ago")
    run = start(launch, runs_dir=tmp_path / "runs")
    try:
        slowdown = wait_for(run, lambda state: state.slowdown is not None).slowdown
        assert slowdown is not None
        assert slowdown.step_s == pytest.approx(0.1)
        assert slowdown.planned_s == pytest.approx(0.03)
        found = RunReader(run).poll(limit_s=10.0).samples.values()
        places = [place for samples in found for sample in samples for place in sample.placement]
        assert {place.rank for place in places} == {0, 1}
    finally:
        Runs(tmp_path / "runs", two_ranks, machine, run).clean_up()
