"""Which shared memory is a run's leftover: only what surely belongs to one of its ended
processes.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from so_tui.runs import RunDirectory, delete_run, write_state
from so_tui.runs.listing import SHARED_MEMORY, remove_leftovers
from so_tui.runs.liveness import identify
from so_tui.runs.records import Process, RunState


@pytest.fixture
def ended() -> Process:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identify(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert found is not None
    return found


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path, ended: Process) -> None:
    theirs = [
        tmp_path / name for name in (f"torch_{ended.pid}_123_0", f"so_tui_{ended.pid}_states")
    ]
    others = [
        tmp_path / name
        for name in (f"torch_{ended.pid}1_1_0", "torch_1_1_0", "psm_abc", f"sem.{ended.pid}_1")
    ]
    for path in (*theirs, *others):
        path.touch()
    assert set(remove_leftovers([ended], tmp_path)) == set(theirs)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_deletion_removes_leftovers(run: RunDirectory, ended: Process) -> None:
    left = SHARED_MEMORY / f"torch_{ended.pid}_1_0"
    left.touch()
    try:
        write_state(
            run,
            RunState(
                name=run.name,
                state="training",
                attempt=1,
                host=socket.gethostname(),
                processes=(ended,),
            ),
        )
        delete_run(run)
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_a_pid_that_lives_again_names_nothing(tmp_path: Path) -> None:
    """The pid was reused: the file may be that of the process that has it now."""
    (tmp_path / f"torch_{os.getpid()}_1_0").touch()
    assert remove_leftovers([Process(pid=os.getpid(), start_time=1)], tmp_path) == ()


def test_a_file_that_is_older_than_the_process_is_not_its(tmp_path: Path, ended: Process) -> None:
    (tmp_path / f"torch_{ended.pid}_1_0").touch()
    later = Process(pid=ended.pid, start_time=ended.start_time + 3600 * os.sysconf("SC_CLK_TCK"))
    assert remove_leftovers([later], tmp_path) == ()


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_what_a_living_process_uses_stays(tmp_path: Path, ended: Process, how: str) -> None:
    path = tmp_path / f"torch_{ended.pid}_1_0"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        if how == "mapped":
            file.close()
        assert remove_leftovers([ended], tmp_path) == ()
        mapped.close()
    assert remove_leftovers([ended], tmp_path) == (path,)


def test_same_inode_elsewhere_is_another_file(tmp_path: Path, ended: Process) -> None:
    """Two new file systems number their first files alike. (Mounts need a name space of one's own,
    which not every container allows.)
    """
    script = f"""
import os, subprocess
from pathlib import Path
from so_tui.runs.listing import remove_leftovers
from so_tui.runs.records import Process
folder = Path({str(tmp_path)!r})
for name in ("shared", "elsewhere"):
    (folder / name).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", folder / name], check=True)
left = folder / "shared" / "torch_{ended.pid}_1_0"
left.touch()
other = (folder / "elsewhere" / "other").open("w")
assert os.fstat(other.fileno()).st_ino == left.stat().st_ino
assert remove_leftovers([Process(pid={ended.pid}, start_time={ended.start_time})], folder / "shared") == (left,)
"""  # noqa: E501
    if subprocess.run(
        ["unshare", "--map-root-user", "--mount", "true"], check=False, capture_output=True
    ).returncode:
        pytest.skip("this container allows no name spaces")
    subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", script], check=True
    )


def test_links_pipes_folders_and_other_users_files_stay(tmp_path: Path, ended: Process) -> None:
    target = tmp_path / "precious"
    target.touch()
    (tmp_path / f"torch_{ended.pid}_1_0").symlink_to(target)
    os.mkfifo(tmp_path / f"torch_{ended.pid}_2_0")
    (tmp_path / f"torch_{ended.pid}_3_0").mkdir()
    if os.geteuid() == 0:
        (tmp_path / f"torch_{ended.pid}_4_0").touch()
        os.chown(tmp_path / f"torch_{ended.pid}_4_0", 61_999, 61_999)
    started = time.monotonic()
    assert remove_leftovers([ended], tmp_path) == ()
    assert time.monotonic() - started < 2
