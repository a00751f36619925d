from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from so_tui.launch.checks import quick_checks
from so_tui.launch.supervisor import host_check
from so_tui.machine.types import Gpu
from so_tui.runs import read_state
from so_tui.runs.records import OutcomeCode
from tests.support.plans import launch_with, plan_of, quad_gh200, spec_of
from tests.support.problems import refused
from tests.support.supervising import prepared_run, supervise_to_end

ME = host_check._Holder(run="/runs/mine", pid=os.getpid())


def test_a_lock_is_held_once_and_says_by_whom(tmp_path: Path) -> None:
    lock = host_check.take(tmp_path, "gpu-1", ME)
    with pytest.raises(host_check.LockTakenError, match=f"run mine \\(pid {os.getpid()}\\)"):
        host_check.take(tmp_path, "gpu-1", host_check._Holder(run="/runs/other", pid=1))
    lock.release()
    host_check.take(tmp_path, "gpu-1", ME).release()


def test_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "lock_folder", lambda: tmp_path)
    first, second = quad_gh200().gpus[:2]
    (held,) = host_check.take_gpus([second], "/runs/mine")
    with pytest.raises(host_check.LockTakenError, match="GPU 1 is used by run mine"):
        host_check.take_gpus([first, second], "/runs/mine")
    for lock in (held, *host_check.take_gpus([first], "/runs/mine")):
        lock.release()


def test_a_child_with_the_descriptor_keeps_the_lock(tmp_path: Path) -> None:
    lock = host_check.take(tmp_path, "gpu-1", ME)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.descriptor]
    ) as child:
        lock.release()
        with pytest.raises(host_check.LockTakenError):
            host_check.take(tmp_path, "gpu-1", ME)
        child.kill()
    host_check.take(tmp_path, "gpu-1", ME).release()


def test_a_lock_whose_file_a_cleaner_removed_is_taken_again(tmp_path: Path) -> None:
    lock = host_check.take(tmp_path, "gpu-1", ME)
    os.utime(lock.path, (0, 0))
    lock.refresh()
    assert lock.path.stat().st_mtime > 1e9
    lock.path.unlink()
    lock.refresh()
    with pytest.raises(host_check.LockTakenError):
        host_check.take(tmp_path, "gpu-1", ME)
    lock.release()
    host_check.take(tmp_path, "gpu-1", ME).release()


def test_lock_follows_a_replaced_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner removes the file between open and flock, and another process makes it anew."""
    flock = fcntl.flock
    replaced: list[int] = []

    def late(descriptor: int, operation: int) -> None:
        if not replaced:
            (tmp_path / "gpu-1.lock").unlink()
            (tmp_path / "gpu-1.lock").touch()
            replaced.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = host_check.take(tmp_path, "gpu-1", ME)
    assert os.fstat(lock.descriptor).st_ino == lock.path.stat().st_ino
    with pytest.raises(host_check.LockTakenError):
        host_check.take(tmp_path, "gpu-1", ME)
    lock.release()


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = host_check.lock_folder()
    assert folder == Path(f"/tmp/so-tui-{os.getuid()}"), (
        "the same in a shell that has no XDG_RUNTIME_DIR"
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def taken(gpu: Gpu) -> host_check.Lock:
    (lock,) = host_check.take_gpus([gpu], "/runs/busy-one")
    return lock


@pytest.mark.slow
def test_supervisor_holds_gpus_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before the start may be too early: what counts is who has the lock when the
    processes are started.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    machine, plan = quad_gh200(hostname=socket.gethostname()), plan_of(spec_of(), gpus=True)
    run = prepared_run(launch_with(plan, machine), tmp_path / "runs")
    lock = taken(machine.gpus[0])
    code = supervise_to_end(run)
    lock.release()
    state = read_state(run)
    assert (code, state.state, state.code) == (1, "failed", OutcomeCode.GPU_IN_USE)
    assert f"GPU 0 is used by run busy-one (pid {os.getpid()})" in state.reason


def test_gpu_in_use_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    launch = launch_with(plan_of(spec_of(), gpus=True), quad_gh200(), forced=True)
    quick_checks(launch)
    lock = taken(launch.machine.gpus[1])
    with refused("gpu-in-use"):
        quick_checks(launch)
    lock.release()
