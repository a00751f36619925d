"""States that the supervisor writes without ever starting a process."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.launch import read_launch, write_launch
from so_tui.launch.supervisor import host, host_check
from so_tui.launch.supervisor.ending import Outcome
from so_tui.launch.supervisor.host_check import LockTakenError, _Holder
from so_tui.launch.supervisor.processes import Loss
from so_tui.launch.supervisor.run import Supervisor
from so_tui.machine import Machine
from so_tui.machine.types import Gpu
from so_tui.plan import remedies
from so_tui.plan.plan import OptionalMemory
from so_tui.runs import RunDirectory, read_state
from so_tui.runs.directory import run_id
from so_tui.runs.liveness import identify
from so_tui.runs.lock import RunLock
from so_tui.runs.metrics import MetricsWriter
from so_tui.runs.reader import LogReader
from so_tui.runs.records import Alert, OutcomeCode, Process, RunState
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import write_state, write_state_even_if_full
from so_tui.settings_file import change_settings
from so_tui.spec import RunSpec
from so_tui.spec.errors import reject
from tests.support.records import step_record
from tests.support.waiting import running, wait_until


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the signals of the test process alone, and its children, which a supervisor in this
    process would take for the run's.
    """
    monkeypatch.setattr("so_tui.launch.supervisor.host.Host.install_signals", lambda _: None)
    monkeypatch.setattr("so_tui.launch.supervisor.processes._pids", set)


def supervisor_of(run: RunDirectory, found: RunState | None = None) -> Supervisor:
    return Supervisor(run, 1, found or read_state(run), RunLock(run))


def followed_by(monkeypatch: pytest.MonkeyPatch, *looks: bool) -> Iterator[bool]:
    """Have an attempt seem to have been started, and to run at so many looks."""
    seen = iter(looks)
    monkeypatch.setattr(host.Host, "start", lambda _: None)
    monkeypatch.setattr(host.Host, "running", lambda _: next(seen))
    return seen


@pytest.mark.parametrize("forced", [False, True])
def test_a_run_is_forced_if_its_launch_was(forced: bool, run: RunDirectory) -> None:
    """A launch may be forced past a check (a compiler, the disk) although its plan fits, and stays
    forced on resume.
    """
    write_launch(run, 1, replace(read_launch(run, 1), forced=forced))
    assert supervisor_of(run)._state.forced == forced


def test_uninspectable_machine_fails(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Machine:
        raise reject("no-cpus", "machine", "/", "has no CPUs", "Mount /sys.")

    monkeypatch.setattr(host, "inspect_machine", fail)
    assert supervisor_of(run).watch() == 1
    state = read_state(run)
    assert (state.state, state.code, state.exit_code) == ("failed", OutcomeCode.NOT_STARTED, 1)
    assert "has no CPUs" in state.reason


def test_the_last_lines_of_a_log_are_read_however_many(
    run: RunDirectory, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say why; more than a tick reads may be written between the last one and the end."""
    looks = iter([True, False])

    def running(_: host.Host) -> bool:
        if lives := next(looks):
            run.log_path(1, machine.hostname).write_text(
                "a state of the process\n" * 200_000 + "RuntimeError: the loss is a teapot\n"
            )
        return lives

    monkeypatch.setattr(host, "_SWEEP_S", 60.0)  # enough on a busy machine
    monkeypatch.setattr(host.Host, "start", lambda _: None)
    monkeypatch.setattr(host.Host, "running", running)
    assert supervisor_of(run).watch() == 1
    assert read_state(run).reason.endswith("RuntimeError: the loss is a teapot")


def test_endless_log_ends_no_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody could end may write faster than its lines are read."""

    class Endless(LogReader):
        def poll(self, **_limits: Any) -> tuple[str, ...]:
            self.behind = True
            return ("a line",)

    monkeypatch.setattr(host, "LogReader", Endless)
    monkeypatch.setattr(host, "_SWEEP_S", 0.2)
    monkeypatch.setattr(host.Host, "start", lambda _: None)
    assert supervisor_of(run).watch() == 1
    assert read_state(run).state == "failed"


def test_the_first_loss_stays_the_cause_of_later_ones(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Process(pid=11, start_time=1, role="rank", rank=1)
    launcher = Process(pid=10, start_time=1, role="launcher")
    ours = supervisor_of(run)._host
    looks = iter([[rank], [launcher]])
    ours.tree.gone |= {rank: -9, launcher: -15}
    monkeypatch.setattr(ours.tree, "scan", lambda: next(looks))
    ours._scan()
    ours._scan()
    assert ours.first_loss == Loss(rank, -9, unprompted=True)


@pytest.mark.parametrize(
    "code", [OutcomeCode.RANK_LOST, OutcomeCode.OUT_OF_GPU_MEMORY, OutcomeCode.KILLED_FOR_MEMORY]
)
def test_the_final_state_does_not_depend_on_the_plans_advice(
    code: OutcomeCode, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunSpec] = []

    def fail(spec: RunSpec, *_optional: OptionalMemory) -> str:
        asked.append(spec)
        raise ZeroDivisionError

    monkeypatch.setattr(remedies, "memory_advice", fail)
    outcome = Outcome(state="failed", code=code, who="rank", rank=0)
    assert supervisor_of(run)._finish(outcome) == 1
    assert read_state(run).code == code
    assert len(asked) == (code != OutcomeCode.RANK_LOST)


def test_takeover_tells_what_is_new(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    change_settings({"alerts.loss_above": 5.0, "alerts.on": ["loss", "not-finite"]})
    followed_by(monkeypatch, True, False)
    records = MetricsWriter(run, 1)
    for step, loss in enumerate((9.0, 2.0, float("nan"), 2.0, 2.0, 8.0), start=1):
        records.append(step_record(step, loss=loss))
    records.close()
    before = [("loss", 1), ("not-finite", 3)]
    told = tuple(Alert(kind=kind, attempt=1, time=1.0, step=step) for kind, step in before)
    found = replace(read_state(run), state="training", attempt=1, step=4, alerts=told)
    assert supervisor_of(run, found).watch() == 1
    alerts = [(alert.kind, alert.step) for alert in read_state(run).alerts]
    assert alerts == [*before, ("loss", 6)]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        LockTakenError("GPU 0", _Holder(run="/another", pid=1)),
    ],
)
def test_a_supervisor_without_the_locks_watches_what_lives(
    error: Exception, run: RunDirectory, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(host_check, "take_gpus", fail)
    gpu = Gpu(index=0, name="a GPU", pci_bus_id="0000:01:00.0")
    monkeypatch.setattr(host, "chosen_gpus", lambda *_: [gpu])
    marks = {"SO_TUI_RUN": str(run.path), "SO_TUI_ATTEMPT": "1", "SO_TUI_RUN_ID": run_id(run)}
    with subprocess.Popen(["/bin/sh", "-c", "sleep 2"], env=os.environ | marks) as process:
        monkeypatch.setattr("so_tui.launch.supervisor.processes._pids", lambda: {process.pid})
        found = replace(read_state(run), state="training", attempt=1, host=machine.hostname)
        supervisor_of(run, found).watch()
        assert not running(process.pid)
    assert read_state(run).code not in (OutcomeCode.NOT_STARTED, OutcomeCode.GPU_IN_USE)


@pytest.mark.parametrize(
    "what", [(LogReader, "tail"), (SampleWriter, "__init__")], ids=["log", "samples"]
)
def test_a_file_system_that_is_away_ends_no_supervision(
    what: tuple[type, str], run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the start, what runs must not be left alone."""
    asked: list[object] = []

    def away(*_: object) -> None:
        asked.append(what)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(host, "TICK_S", 0.0)
    looks = followed_by(monkeypatch, True, True, False)
    monkeypatch.setattr(*what, away)
    assert supervisor_of(run).watch() == 1
    assert read_state(run).state == "failed"
    assert next(looks, None) is None
    assert asked


def test_a_command_that_tells_of_the_end_finds_it_recorded(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found"
    change_settings({"alerts.command": ["/bin/cp", str(run.state_path), str(found)]})

    def slow(*arguments: Any) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(found.exists, limit_s=1)
        write_state_even_if_full(*arguments)

    monkeypatch.setattr("so_tui.launch.supervisor.run.write_state_even_if_full", slow)
    supervisor = supervisor_of(run)
    supervisor._finish(Outcome(state="failed", code=OutcomeCode.RANK_LOST, who="rank", rank=0))
    supervisor.announcer.finish()
    assert msgspec.json.decode(found.read_bytes(), type=RunState).state == "failed"


def test_a_supervisor_takes_over_on_a_full_disk(
    run: RunDirectory, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gone = Process(pid=1 << 21, start_time=1)
    trains = replace(read_state(run), state="training", attempt=1, host=machine.hostname)
    write_state(run, replace(trains, supervisor=gone))
    looks, seen = iter([True, False]), []

    def lives(_: host.Host) -> bool:
        seen.append(read_state(run))
        return next(looks)

    monkeypatch.setattr(host.Host, "running", lives)
    monkeypatch.setattr("so_tui.launch.supervisor.run.write_state", full)
    monkeypatch.setattr("so_tui.runs.state.write_state", full)
    assert supervisor_of(run).watch() == 1
    assert seen[0].supervisor == identify(os.getpid(), "supervisor")
    assert read_state(run).code == OutcomeCode.DISK_FULL
