"""A host that lacks what was planned with is refused; locks of GPUs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.launch import prepare
from so_tui.launch.supervisor import host_check
from so_tui.machine import Machine
from so_tui.spec import find_preset
from tests.support.plans import quad_gh200

QUAD = quad_gh200()
LAUNCH = prepare(replace(find_preset("tiny").spec, gpus=2), QUAD)


def test_a_host_with_what_was_planned_is_accepted() -> None:
    least = replace(QUAD, gpus=QUAD.gpus[:2], numa_nodes=QUAD.numa_nodes[:2])
    host_check.refuse_different_host(LAUNCH, least)


@pytest.mark.parametrize(
    ("host", "codes"),
    [
        (replace(QUAD, gpus=QUAD.gpus[:1]), ("gpu-missing",)),
        (
            replace(QUAD, gpus=(QUAD.gpus[0], replace(QUAD.gpus[1], pci_bus_id="ffff:01:00.0"))),
            ("gpu-missing",),
        ),
        (replace(QUAD, numa_nodes=QUAD.numa_nodes[:1]), ("numa-node-missing",)),
        (replace(QUAD, allowed_cpus=tuple(range(100))), ("cores-not-allowed",)),
        (replace(QUAD, gpus=(), numa_nodes=()), ("gpu-missing", "numa-node-missing")),
    ],
)
def test_missing_gpus_nodes_and_cores_are_refused(host: Machine, codes: tuple[str, ...]) -> None:
    with pytest.raises(host_check.HostDiffersError) as caught:
        host_check.refuse_different_host(LAUNCH, host)
    assert caught.value.codes == codes
    assert (f"1 ({QUAD.gpus[1].pci_bus_id})" in str(caught.value)) == ("gpu-missing" in codes)


ME = host_check._Holder(run="/runs/mine", pid=os.getpid())


def assert_held(folder: Path) -> None:
    """Another cannot take the lock, and is told who has it."""
    with pytest.raises(host_check.LockTakenError, match=f"run mine \\(pid {os.getpid()}\\)"):
        host_check.take(folder, "gpu-1", host_check._Holder(run="/runs/other", pid=1))


def test_a_child_with_the_descriptor_keeps_the_lock(tmp_path: Path) -> None:
    lock = host_check.take(tmp_path, "gpu-1", ME)
    argv = [sys.executable, "-c", "input()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[lock.descriptor]) as child:
        assert_held(tmp_path)
        lock.release()
        assert_held(tmp_path)
        child.kill()
    host_check.take(tmp_path, "gpu-1", ME).release()


def test_a_lock_whose_file_a_cleaner_removed_is_taken_again(tmp_path: Path) -> None:
    lock = host_check.take(tmp_path, "gpu-1", ME)
    os.utime(lock.path, (0, 0))
    lock.refresh()
    assert lock.path.stat().st_mtime > 1e9
    lock.path.unlink()
    lock.refresh()
    assert_held(tmp_path)
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
    assert_held(tmp_path)
    lock.release()


def test_all_gpus_are_locked_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "lock_folder", lambda: tmp_path)
    first, second = QUAD.gpus[:2]
    (held,) = host_check.take_gpus([second], "/runs/mine")
    with pytest.raises(host_check.LockTakenError, match="GPU 1 is used by run mine"):
        host_check.take_gpus([first, second], "/runs/mine")
    for lock in (held, *host_check.take_gpus([first], "/runs/mine")):
        lock.release()
