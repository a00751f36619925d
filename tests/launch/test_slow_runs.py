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
from collections.abc import Callable, Iterator, Sequence
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
from so_tui.runs import RunDirectory, RunReader, read_state
from so_tui.runs.records import Cause, Process, Sample, StepRecord
from so_tui.spec import RunSpec
from tests.support.fake_runs import FAKE_TRAINER, Runs, wait_for
from tests.support.launching import tiny
from tests.support.python_path import checkout_path, python_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="takes a core for Adam beside a main core"
    ),
]

SECONDS = 2.5
"""How long each cause lasts at least."""
LEAST_STEPS = 3
BY_OTHERS = frozenset(("foreign-load", "copies", "adam"))
"""What processes of others can slow down: they take the cores' time, and the memory's."""
SLOW_LOADER = """
import queue, threading, time
from pathlib import Path

put, delay = queue.Queue.put, Path({delay!r})


def slow_put(self, *arguments, **named):
    if threading.current_thread().name == "prefetcher" and delay.exists():
        time.sleep(float(delay.read_text()))
    put(self, *arguments, **named)


queue.Queue.put = slow_put
"""
"""Python imports it in every process of the run. Data that is mapped and cached cannot be made slow
from outside.
"""


class Watched:
    """The run, what it measures, and which causes that gives."""

    def __init__(self, runs: Runs, machine: Machine, folder: Path) -> None:
        self.run = runs.start()
        self.delay = folder / "delay"
        self._machine = machine
        self._reader = RunReader(self.run)
        self._steps: list[StepRecord] = []
        self._samples: list[Sample] = []
        state = wait_for(
            self.run,
            lambda state: (
                state.step >= 5 and any(process.role == "adam" for process in state.processes)
            ),
        )
        self.processes = state.processes
        self._binding = prepare(runs.spec, machine, force=True).plan.binding
        self.planned = self._halved(self.measure())

    def _halved(self, usual: _Measured) -> _Planned:
        step = StepTime(
            forward_s=(usual.step_s - usual.data_s) / 2,
            backward_s=0.0,
            exposed_optimizer_s=0.0,
            data_s=usual.data_s,
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
        return _Planned(step=step, rates=rates, binding=self._binding)

    def measure(self) -> _Measured:
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
        placed = replace(self._samples[-1], placement=_read_placements(self.processes))
        # The first step, and the first sample, began before.
        return _measured_of(
            self._steps[steps + 1 :],
            [*self._samples[samples + 1 :], placed],
            self._machine,
            self._binding,
        )

    def wait_for_a_step(self, happened: Callable[[StepRecord], bool], *, timeout_s: float) -> None:
        """Wait for a step of which something is true."""
        deadline = time.monotonic() + timeout_s
        while not (self._steps and happened(self._steps[-1])):
            assert time.monotonic() < deadline, read_state(self.run)
            time.sleep(0.1)
            self._poll()

    def causes(self) -> tuple[Cause, ...]:
        """Return what makes the run slow from now on."""
        return _ranked_causes(self.measure(), self.planned)

    def _poll(self) -> None:
        update = self._reader.poll()
        self._steps += update.steps
        self._samples += [sample for samples in update.samples.values() for sample in samples]


@pytest.fixture(scope="module")
def supervised(
    tmp_path_factory: pytest.TempPathFactory, two_ranks: RunSpec, machine: Machine
) -> Iterator[RunDirectory]:
    """A run of the fake trainer, whose records say that it has trained for minutes, longer a step
    than planned.
    """
    folder = tmp_path_factory.mktemp("supervised")
    launch = prepare(two_ranks, machine, force=True)
    step = StepTime(forward_s=0.01, backward_s=0.02, exposed_optimizer_s=0.0, data_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(FAKE_TRAINER))
        patch.setenv("FAKE_TRAINER", "long-ago")
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        run = start(
            replace(launch, plan=replace(launch.plan, step=step, step_s=step.total_s)),
            runs_dir=folder / "runs",
        )
    yield run
    Runs(folder / "runs", two_ranks, machine, run).clean_up()


@pytest.fixture(scope="module")
def watched(
    tmp_path_factory: pytest.TempPathFactory, machine: Machine, supervised: RunDirectory
) -> Iterator[Watched]:
    """The real run. The other one starts first, and is looked at last."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "sitecustomize.py").write_text(SLOW_LOADER.format(delay=str(folder / "delay")))
    spec = tiny(
        gpus="1",
        train__steps="100000",
        checkpoint__at_end="false",
        checkpoint__every_steps="0",
        offload__mode="superoffload",
    )
    runs = Runs(folder / "runs", spec, machine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", checkout_path(folder))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        try:
            yield Watched(runs, machine, folder)
        finally:
            runs.clean_up()


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


def adam_of(watched: Watched) -> Process:
    return next(process for process in watched.processes if process.role == "adam")


def test_an_undisturbed_run_is_where_it_was_planned(watched: Watched) -> None:
    assert not {"binding", "memory-node", "clocks", "copies", "data"} & {
        cause.code for cause in watched.causes()
    }


def test_wrong_binding(watched: Watched) -> None:
    with bound_to(adam_of(watched), watched.planned.binding[0].main_cpus):
        assert watched.causes()[0].code == "binding"


def test_a_slow_loader(watched: Watched) -> None:
    planned = watched.planned.step
    delay_s = max(0.3, 10 * (planned.total_s - planned.data_s))
    watched.delay.write_text(str(delay_s))
    try:
        # Batches that were prepared before come first.
        watched.wait_for_a_step(lambda step: step.data_s > delay_s / 2, timeout_s=60 + 10 * delay_s)
        causes = watched.causes()
    finally:
        watched.delay.unlink()
    # Where other processes use its cores, that is named first, with what follows from it.
    by_others = BY_OTHERS if "foreign-load" in {cause.code for cause in causes} else frozenset()
    own = [cause for cause in causes if cause.code not in by_others]
    assert [cause.code for cause in own[:1]] == ["data"]
    assert own[0].measured > delay_s / 2


def test_niced_workers_beside_busy_loops(watched: Watched) -> None:
    os.setpriority(
        os.PRIO_PROCESS, adam_of(watched).pid, 19
    )  # for good: only root may take it back
    with busy(watched.planned.binding[0].adam_cpus):
        first = watched.causes()[0]
    assert first.code == "foreign-load"
    assert first.measured > 0.3
    assert first.nice >= 19


def test_a_supervisor_compares_its_run_with_the_plan(supervised: RunDirectory) -> None:
    slowdown = wait_for(supervised, lambda state: state.slowdown is not None).slowdown
    assert slowdown is not None
    assert slowdown.step_s == pytest.approx(0.1)
    assert slowdown.planned_s == pytest.approx(0.03)
    samples = [
        sample
        for found in RunReader(supervised).poll(limit_s=10.0).samples.values()
        for sample in found
    ]
    assert {place.rank for sample in samples for place in sample.placement} == {0, 1}
