"""Who may start an attempt, and what a supervisor records without any process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.checks import quick_checks
from so_tui.launch.launch import read_launch, write_launch
from so_tui.launch.supervisor import host, host_check
from so_tui.launch.supervisor import run as run_module
from so_tui.launch.supervisor.ending import Outcome
from so_tui.launch.supervisor.host_check import LockTakenError, _Holder
from so_tui.launch.supervisor.processes import Loss
from so_tui.launch.supervisor.run import Supervisor, supervise
from so_tui.machine import Machine
from so_tui.machine.types import Gpu
from so_tui.plan import remedies
from so_tui.runs import RunDirectory, read_state
from so_tui.runs.directory import launch_digest, run_id, write_manifest, write_run_json
from so_tui.runs.liveness import identify
from so_tui.runs.lock import RunLock, run_lock
from so_tui.runs.reader import LogReader
from so_tui.runs.records import Alert, OutcomeCode, Process, RunState
from so_tui.runs.samples import SampleWriter
from so_tui.runs.state import overwrite_state, write_state, write_state_even_if_full
from so_tui.settings_file import change_settings
from so_tui.spec.errors import reject
from so_tui.trust.files import Distrust, NotOwnError
from tests.support.launching import prepared_run
from tests.support.plans import launch_with, plan_of, quad_gh200, spec_of
from tests.support.problems import raising, refused, rejected
from tests.support.records import append_records, step_record
from tests.support.waiting import running, wait_until

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_CPUS = reject("no-cpus", "machine", "/", "has no CPUs", "Mount /sys.")
RANK_LOST = Outcome(code=OutcomeCode.RANK_LOST, who="rank", rank=0)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the test process's signals, and its children, which are not the run's."""
    monkeypatch.setattr("so_tui.launch.supervisor.host.Host.install_signals", lambda _: None)
    monkeypatch.setattr("psutil.pids", list)


def supervisor_of(run: RunDirectory, found: RunState | None = None) -> Supervisor:
    digest = digest_of(run)
    launch = read_launch(run, 1, digest)
    return Supervisor(run, 1, found or read_state(run), launch, digest, RunLock(run), host.ALONE)


def digest_of(run: RunDirectory) -> str:
    return launch_digest(run, run.launch_path(1).read_bytes())


def training(run: RunDirectory, **values: Any) -> RunState:
    return replace(read_state(run), state="training", attempt=1, **values)


def followed_by(
    monkeypatch: pytest.MonkeyPatch, *looks: bool, at_each: Callable[[bool], object] = bool
) -> None:
    """Have an attempt seem to have been started, and to run at so many looks."""
    seen = iter(looks)

    def runs(_: host.Host) -> bool:
        lives = next(seen)
        at_each(lives)
        return lives

    monkeypatch.setattr(host.Host, "start", lambda _: None)
    monkeypatch.setattr(host.Host, "running", runs)


def test_uninspectable_machine_fails(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "inspect_machine", raising(NO_CPUS))
    assert supervisor_of(run).watch() == 1
    state = read_state(run)
    assert (state.state, state.code, state.exit_code) == ("failed", OutcomeCode.NOT_STARTED, 1)
    assert "has no CPUs" in state.reason


def test_nothing_starts_on_a_host_without_the_planned_cores(run: RunDirectory) -> None:
    launch = read_launch(run, 1)
    cores = (max(launch.machine.online_cpus) + 1,)
    elsewhere = replace(launch.plan.binding[0], cpus=cores, main_cpus=cores, adam_cpus=cores)
    write_launch(run, 1, replace(launch, plan=replace(launch.plan, binding=(elsewhere,))))
    assert supervisor_of(run).watch() == 1
    assert (read_state(run).state, read_state(run).code) == ("failed", OutcomeCode.HOST_DIFFERS)
    assert not run.command_path(1).exists()


def test_gpu_in_use_is_refused_early_and_by_the_supervisor(tmp_path: Path) -> None:
    """What counts is who has the lock when the processes are started."""
    machine = quad_gh200(hostname=socket.gethostname())
    launch = launch_with(plan_of(spec_of(), gpus=True), machine, forced=True)
    quick_checks(launch)
    run = prepared_run(launch, tmp_path / "runs")
    (lock,) = host_check.take_gpus(machine.gpus[:1], "/runs/busy-one")
    with refused("gpu-in-use"):
        quick_checks(launch)
    assert supervisor_of(run).watch() == 1
    lock.release()
    state = read_state(run)
    assert (state.state, state.code) == ("failed", OutcomeCode.GPU_IN_USE)
    assert f"GPU 0 is used by run busy-one (pid {os.getpid()})" in state.reason


def test_the_last_lines_of_a_log_are_read_however_many(
    run: RunDirectory, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say why; more than a tick reads may be written between the last one and the end."""
    log, last = run.log_path(1, machine.hostname), "RuntimeError: the loss is a teapot"
    lines = "a state of the process\n" * 200_000 + f"{last}\n"
    monkeypatch.setattr(host, "_SWEEP_S", 60.0)  # enough on a busy machine
    followed_by(monkeypatch, True, False, at_each=lambda lives: lives and log.write_text(lines))
    assert supervisor_of(run).watch() == 1
    assert read_state(run).reason.endswith(last)


def test_endless_log_ends_no_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody could end may write faster than its lines are read."""

    class Endless(LogReader):
        def poll(self, **_limits: Any) -> tuple[str, ...]:
            self.behind = True
            return ("a line",)

    monkeypatch.setattr(host, "LogReader", Endless)
    monkeypatch.setattr(host, "_SWEEP_S", 0.2)
    followed_by(monkeypatch, False)
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
    asked: list[object] = []
    monkeypatch.setattr(remedies, "memory_advice", raising(ZeroDivisionError(), asked))
    assert supervisor_of(run)._finish(replace(RANK_LOST, code=code)) == 1
    assert read_state(run).code == code
    assert len(asked) == (code != OutcomeCode.RANK_LOST)


def test_takeover_tells_what_is_new(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    change_settings({"alerts.loss_above": 5.0, "alerts.on": ["loss", "not-finite"]})
    followed_by(monkeypatch, True, False)
    losses = enumerate((9.0, 2.0, float("nan"), 2.0, 2.0, 8.0), start=1)
    append_records(run, *(step_record(step, loss=loss) for step, loss in losses))
    before = [("loss", 1), ("not-finite", 3)]
    told = tuple(Alert(kind=kind, attempt=1, time=1.0, step=step) for kind, step in before)
    assert supervisor_of(run, training(run, step=4, alerts=told)).watch() == 1
    alerts = [(alert.kind, alert.step) for alert in read_state(run).alerts]
    assert alerts == [*before, ("loss", 6)]


@pytest.mark.parametrize("error", [FULL, LockTakenError("GPU 0", _Holder(run="/another", pid=1))])
def test_a_supervisor_without_the_locks_watches_what_lives(
    error: Exception, run: RunDirectory, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_check, "take_gpus", raising(error))
    gpu = Gpu(index=0, name="a GPU", pci_bus_id="0000:01:00.0")
    monkeypatch.setattr(host, "chosen_gpus", lambda *_: [gpu])
    marks = {"SO_TUI_RUN": str(run.path), "SO_TUI_ATTEMPT": "1", "SO_TUI_RUN_ID": run_id(run)}
    with subprocess.Popen(["/bin/sh", "-c", "sleep 2"], env=os.environ | marks) as process:
        monkeypatch.setattr("psutil.pids", lambda: [process.pid])
        supervisor_of(run, training(run, host=machine.hostname)).watch()
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
    seen: list[bool] = []
    monkeypatch.setattr(host, "TICK_S", 0.0)
    followed_by(monkeypatch, True, True, False, at_each=seen.append)
    monkeypatch.setattr(*what, raising(OSError(errno.ESTALE, os.strerror(errno.ESTALE)), asked))
    assert supervisor_of(run).watch() == 1
    assert (read_state(run).state, len(seen)) == ("failed", 3)
    assert asked


def test_a_supervisor_takes_over_on_a_full_disk(
    run: RunDirectory, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Process(pid=1 << 21, start_time=1)
    write_state(run, training(run, host=machine.hostname, supervisor=gone))
    seen: list[RunState] = []
    followed_by(monkeypatch, True, False, at_each=lambda _: seen.append(read_state(run)))
    for module in ("launch.supervisor.run", "runs.state"):
        monkeypatch.setattr(f"so_tui.{module}.write_state", raising(FULL))
    assert supervisor_of(run).watch() == 1
    assert seen[0].supervisor == identify(os.getpid(), "supervisor")
    assert read_state(run).code == OutcomeCode.DISK_FULL


def test_a_full_disk_is_told_at_once_and_until_there_is_space(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of later steps are lost. Only the first report is written over the old state:
    readers might see a part of it.
    """
    monkeypatch.setattr(host, "TICK_S", 0.0)
    seen: list[tuple[bool, int]] = []

    def look(lives: bool) -> None:
        state = read_state(run)
        seen.append((state.disk_full, state.heartbeat))
        if len(seen) == 2:
            monkeypatch.setattr("so_tui.runs.state.write_run_json", raising(FULL))
        elif len(seen) == 5:
            monkeypatch.setattr("so_tui.runs.state.write_run_json", write_run_json)

    followed_by(monkeypatch, *[True] * 7, False, at_each=look)
    supervisor_of(run).watch()
    told, beats = zip(*seen, strict=True)
    assert told[:5] == (False, False, True, True, True)
    assert told[-1] is False
    assert beats[2] == beats[3] == beats[4] < beats[5]


def test_no_state_is_written_over_another_for_which_the_disk_has_no_room(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_state(run)
    monkeypatch.setattr("so_tui.runs.state.write_run_json", raising(FULL))
    with pytest.raises(OSError, match="space"):
        overwrite_state(run, replace(before, detail="x" * 100_000))
    assert read_state(run) == before
    overwrite_state(run, replace(before, detail="x"))
    assert read_state(run).detail == "x"


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Give the test process its umask back, which ``supervise`` sets."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def assert_refused(code: str, run: RunDirectory, attempt: int = 1) -> None:
    """A supervisor is refused, and writes nothing."""
    before = read_state(run)
    with rejected(code) as caught:
        supervise(run, attempt, digest_of(run))
    assert caught.value.exit_code == 2
    assert read_state(run) == before
    assert not run.command_path(1).exists()


def test_an_attempt_is_started_once(run: RunDirectory) -> None:
    """If it was made. A later supervisor attaches only here, and only to the living."""
    for attempt in (-1, 0, 2, 999_999):
        assert_refused("no-such-attempt", run, attempt)
    here = RunState(name=run.name, state="training", attempt=1, host=socket.gethostname())
    me = identify(os.getpid(), "rank")
    assert me is not None
    for state, code in (
        (replace(here, attempt=2), "attempt-already-started"),
        (replace(here, host="elsewhere"), "not-this-host"),
        (replace(here, processes=(me,)), "no-living-process"),
    ):
        write_state(run, state)
        assert_refused(code, run)


@pytest.mark.parametrize(
    "name", ["", "attempts", "attempts/001", "attempts/001/launch.json", "state.json"]
)
def test_a_run_that_others_can_write_is_refused(run: RunDirectory, name: str) -> None:
    path = run.path / name
    path.chmod(path.stat().st_mode | 0o002)
    with refused("others-can-write") as caught:
        supervise(run, 1, digest_of(run))
    assert f"chmod -R go-w {run.path}" in str(caught.value)


def test_only_the_launch_that_was_prepared_is_started(run: RunDirectory) -> None:
    """Nor without knowing which: a supervisor that attaches starts nothing."""
    launch, prepared = read_launch(run, 1), digest_of(run)
    for digest in ("", "0" * 64):
        with rejected("launch-exchanged"):
            supervise(run, 1, digest)
    write_launch(run, 1, replace(launch, checks_s=1.0))
    with rejected("launch-exchanged"):
        supervise(run, 1, prepared)
    run.manifest_path.unlink()
    write_manifest(run)
    with rejected("launch-exchanged"):
        read_launch(run, 1, write_launch(run, 1, launch)[:-1])
    assert digest_of(run) != prepared, "the same launch of another run"
    assert read_state(run).state == "created"


def test_files_are_checked_again_when_they_are_opened(run: RunDirectory) -> None:
    """The folder above a run may be another user's, who exchanges files after the first check."""
    run.launch_path(1).chmod(0o666)
    with pytest.raises(NotOwnError) as caught:
        read_launch(run, 1)
    assert caught.value.distrust == Distrust.OTHERS_CAN_WRITE


@pytest.mark.parametrize("away", [False, True])
def test_run_goes_on_before_its_command_ends(
    away: bool, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that continues a run is submitted in the last seconds of a job, in which the command
    that tells of the recorded end may hang. The command is waited for, although the lock cannot be
    given back: a file server may be away just then, and a job ends with its supervisor.
    """
    continued, told, found = (tmp_path / name for name in ("continued", "told", "found"))
    script = f"cp {run.state_path} {found}; until test -e {continued}; do sleep 0.05; done; "
    script += f"sleep 0.5; mv {continued} {told}"

    def slow(*arguments: Any) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(found.exists, limit_s=1)
        write_state_even_if_full(*arguments)

    monkeypatch.setattr(run_module, "write_state_even_if_full", slow)
    change_settings({"alerts.command": ["/bin/sh", "-c", script], "alerts.command_timeout_s": 50})
    monkeypatch.setattr(host, "inspect_machine", raising(NO_CPUS))
    monkeypatch.setattr(run_module, "become_subreaper", lambda: None)

    def ended() -> None:
        with run_lock(run) as lock:
            continued.write_text(f"{read_state(run).state} {'free' if lock else 'locked'}")

    if not away:
        assert supervise(run, 1, digest_of(run), ended=ended) == 1
        assert told.read_text() == "failed free"
        assert msgspec.json.decode(found.read_bytes(), type=RunState).state == "failed"
        return
    continued.touch()
    monkeypatch.setattr(RunLock, "release", raising(OSError(errno.EIO, "is away")))
    with pytest.raises(OSError, match="is away"):
        supervise(run, 1, digest_of(run))
    assert told.exists()
