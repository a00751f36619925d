"""What a supervisor's process does around the supervision of an attempt."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from so_tui.launch import prepare, supervise, supervision
from so_tui.launch.attempt_files import write_launch
from so_tui.launch.starter import new_token, record_token
from so_tui.launch.supervisor import Supervisor
from so_tui.machine import Machine
from so_tui.runs import create_run, new_attempt
from so_tui.runs.run_lock import RunLock
from so_tui.settings.file import change_settings
from so_tui.spec import InputError, Problem, RunSpec


def test_the_command_that_tells_of_the_end_is_waited_for_although_the_lock_cannot_be_given_back(
    tmp_path: Path, two_ranks: RunSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server may be away just then. A job ends with its supervisor, and the command would end with it."""
    told = tmp_path / "told"
    change_settings({"alerts.command": ["/bin/sh", "-c", f"sleep 1; echo told > {told}"], "alerts.command_timeout_s": 50})
    launch = prepare(two_ranks, machine, force=True)
    run = create_run(launch.spec, tmp_path / "runs")
    write_launch(run, new_attempt(run), launch)
    token = new_token()
    record_token(run, 1, token)

    def fail(*_: object) -> None:
        raise InputError([Problem(code="no-cpus", field="machine", value="/", message="has no CPUs", remedy="Mount /sys.")])

    def away(_: RunLock) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("so_tui.launch.job.inspect_machine", fail)
    monkeypatch.setattr(RunLock, "release", away)
    monkeypatch.setattr(Supervisor, "_install_signals", lambda _: None)
    monkeypatch.setattr(supervision, "become_subreaper", lambda: None)
    umask = os.umask(0o022)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            supervise(run, 1, token)
    finally:
        os.umask(umask)
    assert told.read_text() == "told\n"
