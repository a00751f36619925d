"""What a supervisor's process does around the supervision of an attempt."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from so_tui.launch.launch import supervisor_log
from so_tui.launch.supervisor import run as supervision
from so_tui.launch.supervisor.run import supervise
from so_tui.runs import RunDirectory
from so_tui.runs.lock import RunLock
from so_tui.runs.records import OutcomeCode
from so_tui.settings_file import change_settings
from so_tui.spec.errors import reject
from tests.support.fake_runs import Runs, ended, kill, process_of, roles, wait_for
from tests.support.waiting import wait_until


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
    umask = os.umask(0o022)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            supervise(run, 1)
    finally:
        os.umask(umask)
    assert told.read_text() == "told\n"


@pytest.mark.slow
@pytest.mark.trains
def test_moved_run_keeps_its_supervisor_until_back(
    runs: Runs,
) -> None:
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
    state = wait_for(
        run, lambda state: state.step >= 2 and {"runner", "launcher", "rank"} <= roles(state)
    )
    kill(process_of(state, "rank", 1))
    last = wait_for(run, ended)
    assert (last.state, last.code, last.reason) == (
        "failed",
        OutcomeCode.RANK_LOST,
        "rank 1 was ended by SIGKILL",
    )
