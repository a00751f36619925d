"""What a supervisor's process does around the supervision of an attempt: who may start it, that it
starts once, and when it leaves.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.launch import prepare, read_launch, supervisor_log
from so_tui.launch.supervisor import run as supervision
from so_tui.launch.supervisor.run import supervise
from so_tui.machine import Machine
from so_tui.runs import RunDirectory, alive, read_state, write_state
from so_tui.runs.liveness import identify
from so_tui.runs.lock import RunLock
from so_tui.runs.records import OutcomeCode, RunState
from so_tui.settings_file import change_settings
from so_tui.spec import RunSpec
from so_tui.spec.errors import reject
from so_tui.trust.files import Distrust, NotOwnError
from tests.support.fake_runs import Runs, ended, kill, process_of, roles, wait_for
from tests.support.problems import refused, rejected
from tests.support.supervising import prepared_run
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Give the test process its umask back, which ``supervise`` sets for the process of a
    supervisor.
    """
    before = os.umask(0o022)
    yield
    os.umask(before)


def assert_refused(code: str, run: RunDirectory, attempt: int = 1) -> None:
    """A supervisor is refused, and writes nothing."""
    before = read_state(run)
    with rejected(code) as caught:
        supervise(run, attempt)
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
    os.umask(umask)
    made = prepared_run(prepare(two_ranks, machine, force=True), tmp_path / "runs")
    assert not [path for path in (made.path, *made.path.rglob("*")) if path.stat().st_mode & 0o022]


def test_the_command_that_tells_of_the_end_is_waited_for(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the lock cannot be given back: a file server may be away just then. A job ends with
    its supervisor, and the command would end with it.
    """
    told = tmp_path / "told"
    script = f"sleep 1; echo told > {told}"
    change_settings({"alerts.command": ["/bin/sh", "-c", script], "alerts.command_timeout_s": 50})

    def fail(*_: object) -> None:
        raise reject("no-cpus", "machine", "/", "has no CPUs", "Mount /sys.")

    def away(_: RunLock) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("so_tui.launch.supervisor.host.inspect_machine", fail)
    monkeypatch.setattr(RunLock, "release", away)
    monkeypatch.setattr("so_tui.launch.supervisor.host.Host.install_signals", lambda _: None)
    monkeypatch.setattr(supervision, "become_subreaper", lambda: None)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        supervise(run, 1)
    assert told.read_text() == "told\n"


@pytest.mark.slow
def test_moved_run_keeps_its_supervisor_until_back(runs: Runs) -> None:
    """Requests are not written through links, which could lead anywhere."""
    run, state = runs.training()
    assert state.supervisor is not None
    moved = run.path.with_name("moved")
    run.path.rename(moved)
    run.path.symlink_to(moved)
    os.kill(state.supervisor.pid, signal.SIGTERM)
    log = supervisor_log(run, 1)
    wait_until(lambda: "link" in log.read_text())
    run.path.unlink()
    moved.rename(run.path)
    assert wait_for(run, ended).state == "stopped"


@pytest.mark.slow
def test_rank_end_is_seen_though_children_are_ignored(runs: Runs) -> None:
    """Such a program's descendants cannot tell how theirs ended, DeepSpeed's launcher among them,
    until one of them changes that.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        run = runs.start()
    finally:
        signal.signal(signal.SIGCHLD, before)
    everyone = {"runner", "launcher", "rank"}
    state = wait_for(run, lambda state: state.step >= 2 and everyone <= roles(state))
    kill(process_of(state, "rank", 1))
    last = wait_for(run, ended)
    assert (last.state, last.code) == ("failed", OutcomeCode.RANK_LOST)
    assert last.reason == "rank 1 was ended by SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize("newer", [True, False], ids=["newer attempt", "other supervisor"])
def test_superseded_supervisor_leaves(newer: bool, runs: Runs) -> None:
    """It was cut off for so long that another attempt began: it ends its own processes and writes
    nothing more.
    """
    run, state = runs.training()
    assert state.supervisor is not None
    other = replace(state.supervisor, pid=1 << 21)
    found = replace(state, attempt=state.attempt + newer, supervisor=other, host="elsewhere")
    deadline = time.monotonic() + 30
    while alive(state.supervisor) and time.monotonic() < deadline:
        write_state(run, found)  # again, because its last write may come just after ours
        time.sleep(0.2)
    try:
        assert not alive(state.supervisor)
        assert any(map(alive, state.processes)) != newer
        assert read_state(run) == found
    finally:
        write_state(run, state)  # so that what is left is found and ended
