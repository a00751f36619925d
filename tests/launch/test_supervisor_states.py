"""States that the supervisor writes without ever starting a process."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.launch import prepare, write_launch
from so_tui.launch.supervisor import host, host_check
from so_tui.launch.supervisor.ending import Outcome
from so_tui.launch.supervisor.host_check import Holder, LockTakenError
from so_tui.launch.supervisor.run import Supervisor
from so_tui.machine import Machine
from so_tui.machine.types import Gpu
from so_tui.plan import remedies
from so_tui.plan.plan import OptionalMemory
from so_tui.runs import RunDirectory, create_run, new_attempt, read_state
from so_tui.runs.directory import run_id
from so_tui.runs.liveness import identify
from so_tui.runs.lock import RunLock, _OwnerFiles
from so_tui.runs.metrics import MetricsWriter
from so_tui.runs.reader import LogReader
from so_tui.runs.records import Alert, OutcomeCode, Process, RunState
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import write_state, write_state_even_if_full
from so_tui.settings_file import change_settings
from so_tui.spec import InputError, Problem, RunSpec
from tests.support.records import step_record
from tests.support.waiting import running, wait_until


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the signals of the test process alone, and its children, which a supervisor in this
    process would take for the run's.
    """
    monkeypatch.setattr("so_tui.launch.supervisor.host.Host.install_signals", lambda _: None)
    monkeypatch.setattr("so_tui.launch.supervisor.processes._pids", set)


def attempt(folder: Path, spec: RunSpec, machine: Machine, *, forced: bool = False) -> RunDirectory:
    launch = prepare(spec, machine, force=True, inherited={})
    run = create_run(launch.spec, folder)
    write_launch(run, new_attempt(run), replace(launch, forced=forced))
    return run


@pytest.mark.parametrize("forced", [False, True])
def test_a_run_is_forced_if_its_launch_was(
    forced: bool, tmp_path: Path, two_ranks: RunSpec, machine: Machine
) -> None:
    """A launch may be forced past a check (a compiler, the disk) although its plan fits, and stays
    forced on resume.
    """
    run = attempt(tmp_path, two_ranks, machine, forced=forced)
    assert Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run)))._state.forced == forced


def test_a_machine_that_cannot_be_inspected_fails_the_start(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Machine:
        raise InputError(
            [
                Problem(
                    code="no-cpus",
                    field="machine",
                    value="/",
                    message="has no CPUs",
                    remedy="Mount /sys.",
                )
            ]
        )

    monkeypatch.setattr(host, "inspect_machine", fail)
    run = attempt(tmp_path, two_ranks, machine)
    assert Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run))).watch() == 1
    state = read_state(run)
    assert (state.state, state.code, state.exit_code) == ("failed", OutcomeCode.NOT_STARTED, 1)
    assert "has no CPUs" in state.reason


def test_the_last_lines_of_a_log_are_read_however_much_was_written_at_the_end(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say why; more than a tick reads may be written between the last one and the end."""
    run = attempt(tmp_path, two_ranks, machine)
    looks = iter([True, False])

    def running(_: host.Host) -> bool:
        if lives := next(looks):
            run.log_path(1, machine.hostname).write_text(
                "a state of the process\n" * 200_000 + "RuntimeError: the loss is a teapot\n"
            )
        return lives

    monkeypatch.setattr(host.Host, "start", lambda _: None)
    monkeypatch.setattr(host.Host, "running", running)
    assert Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run))).watch() == 1
    assert read_state(run).reason.endswith("RuntimeError: the loss is a teapot")


def test_a_log_that_never_ends_does_not_keep_a_run_from_ending(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that nobody could end may write faster than its lines are read."""

    class Endless(LogReader):
        def poll(self, **_limits: Any) -> tuple[str, ...]:
            self.behind = True
            return ("a line",)

    monkeypatch.setattr(host, "LogReader", Endless)
    monkeypatch.setattr(host, "_SWEEP_S", 0.2)
    monkeypatch.setattr(host.Host, "start", lambda _: None)
    run = attempt(tmp_path, two_ranks, machine)
    assert Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run))).watch() == 1
    assert read_state(run).state == "failed"


@pytest.mark.parametrize(
    "code", [OutcomeCode.RANK_LOST, OutcomeCode.OUT_OF_GPU_MEMORY, OutcomeCode.KILLED_FOR_MEMORY]
)
def test_the_final_state_does_not_depend_on_the_plans_advice(
    code: OutcomeCode,
    tmp_path: Path,
    two_ranks: RunSpec,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[RunSpec] = []

    def fail(spec: RunSpec, *_optional: OptionalMemory) -> str:
        asked.append(spec)
        raise ZeroDivisionError

    monkeypatch.setattr(remedies, "less_gpu_memory", fail)
    monkeypatch.setattr(remedies, "less_host_memory", fail)
    run = attempt(tmp_path, two_ranks, machine)
    assert (
        Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run)))._finish(
            Outcome(state="failed", code=code, who="rank", rank=0)
        )
        == 1
    )
    assert read_state(run).code == code
    assert len(asked) == (code != OutcomeCode.RANK_LOST)


def test_a_supervisor_that_takes_over_tells_only_what_its_predecessor_could_not(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_settings({"alerts.loss_above": 5.0, "alerts.on": ["loss", "not-finite"]})
    looks = iter([True, False])
    monkeypatch.setattr(host.Host, "running", lambda _: next(looks))
    run = attempt(tmp_path, two_ranks, machine)
    records = MetricsWriter(run, 1)
    for step, loss in enumerate((9.0, 2.0, float("nan"), 2.0, 2.0, 8.0), start=1):
        records.append(step_record(step, loss=loss))
    records.close()
    told = tuple(
        Alert(kind=kind, attempt=1, time=1.0, step=step)
        for kind, step in (("loss", 1), ("not-finite", 3))
    )
    found = replace(read_state(run), state="training", attempt=1, step=4, alerts=told)
    assert Supervisor(run, 1, found, RunLock(_OwnerFiles(run))).watch() == 1
    assert [(alert.kind, alert.step) for alert in read_state(run).alerts] == [
        ("loss", 1),
        ("not-finite", 3),
        ("loss", 6),
    ]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        LockTakenError("GPU 0", Holder(run="/another", pid=1)),
    ],
)
def test_a_supervisor_that_cannot_take_the_locks_over_still_watches_what_lives(
    error: Exception,
    tmp_path: Path,
    two_ranks: RunSpec,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(host_check, "take_gpus", fail)
    monkeypatch.setattr(
        host, "chosen_gpus", lambda *_: [Gpu(index=0, name="a GPU", pci_bus_id="0000:01:00.0")]
    )
    run = attempt(tmp_path, two_ranks, machine)
    environ = {
        **os.environ,
        "SO_TUI_RUN": str(run.path),
        "SO_TUI_ATTEMPT": "1",
        "SO_TUI_RUN_ID": run_id(run),
    }
    with subprocess.Popen(["/bin/sh", "-c", "sleep 2"], env=environ) as process:
        monkeypatch.setattr("so_tui.launch.supervisor.processes._pids", lambda: {process.pid})
        found = replace(read_state(run), state="training", attempt=1, host=machine.hostname)
        Supervisor(run, 1, found, RunLock(_OwnerFiles(run))).watch()
        assert not running(process.pid)
    assert read_state(run).code not in (OutcomeCode.NOT_STARTED, OutcomeCode.GPU_IN_USE)


@pytest.mark.parametrize(
    "what", [(LogReader, "tail"), (SampleWriter, "__init__")], ids=["log", "samples"]
)
def test_a_file_system_that_is_away_after_the_start_leaves_nothing_unsupervised(
    what: tuple[type, str],
    tmp_path: Path,
    two_ranks: RunSpec,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def away(*_: object) -> None:
        asked.append(what)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    looks = iter([True, True, False])
    monkeypatch.setattr(host, "TICK_S", 0.0)
    monkeypatch.setattr(host.Host, "start", lambda _: None)
    monkeypatch.setattr(host.Host, "running", lambda _: next(looks))
    monkeypatch.setattr(*what, away)
    run = attempt(tmp_path, two_ranks, machine)
    assert Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run))).watch() == 1
    assert read_state(run).state == "failed"
    assert next(looks, None) is None
    assert asked


def test_a_command_that_tells_of_the_end_finds_it_recorded(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = attempt(tmp_path, two_ranks, machine), tmp_path / "found"
    change_settings({"alerts.command": ["/bin/cp", str(run.state_path), str(found)]})

    def slow(*arguments: Any) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(found.exists, limit_s=1)
        write_state_even_if_full(*arguments)

    monkeypatch.setattr("so_tui.launch.supervisor.run.write_state_even_if_full", slow)
    supervisor = Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run)))
    supervisor._finish(Outcome(state="failed", code=OutcomeCode.RANK_LOST, who="rank", rank=0))
    supervisor.finish()
    assert msgspec.json.decode(found.read_bytes(), type=RunState).state == "failed"


def test_a_supervisor_takes_over_on_a_full_disk(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = attempt(tmp_path, two_ranks, machine)
    write_state(
        run,
        replace(
            read_state(run),
            state="training",
            attempt=1,
            host=machine.hostname,
            supervisor=Process(pid=1 << 21, start_time=1),
        ),
    )
    looks, seen = iter([True, False]), []

    def lives(_: host.Host) -> bool:
        seen.append(read_state(run))
        return next(looks)

    monkeypatch.setattr(host.Host, "running", lives)
    monkeypatch.setattr("so_tui.launch.supervisor.run.write_state", full)
    monkeypatch.setattr("so_tui.runs.state.write_state", full)
    assert Supervisor(run, 1, read_state(run), RunLock(_OwnerFiles(run))).watch() == 1
    assert seen[0].supervisor == identify(os.getpid(), "supervisor")
    assert read_state(run).code == OutcomeCode.DISK_FULL
