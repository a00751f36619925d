"""Only shared memory that surely belonged to an ended process of a run is removed."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.runs import RunDirectory, delete_run
from so_tui.runs.listing import SHARED_MEMORY, remove_leftovers
from so_tui.runs.liveness import identify
from so_tui.runs.records import Process
from tests.support.records import change_state


@pytest.fixture
def ended() -> Process:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identify(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert found is not None
    return found


def touched(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).touch()
    return [folder / name for name in names]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path, ended: Process) -> None:
    pid = ended.pid
    theirs = touched(tmp_path, f"torch_{pid}_123_0", f"so_tui_{pid}_states")
    others = touched(tmp_path, f"torch_{pid}1_1_0", "torch_1_1_0", "psm_abc", f"sem.{pid}_1")
    assert set(remove_leftovers([ended], tmp_path)) == set(theirs)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_deletion_removes_leftovers(run: RunDirectory, ended: Process) -> None:
    (left,) = touched(SHARED_MEMORY, f"torch_{ended.pid}_1_0")
    try:
        host = socket.gethostname()
        change_state(run, state="training", attempt=1, host=host, processes=(ended,))
        delete_run(run)
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_files_of_another_process_with_the_pid_stay(tmp_path: Path, ended: Process) -> None:
    """The pid was reused, or the file is older than the process."""
    touched(tmp_path, f"torch_{os.getpid()}_1_0", f"torch_{ended.pid}_1_0")
    later = replace(ended, start_time=ended.start_time + 3600 * os.sysconf("SC_CLK_TCK"))
    assert remove_leftovers([Process(pid=os.getpid(), start_time=1), later], tmp_path) == ()


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


def test_links_pipes_folders_and_other_users_files_stay(tmp_path: Path, ended: Process) -> None:
    stem = f"torch_{ended.pid}"
    precious, theirs = touched(tmp_path, "precious", f"{stem}_4_0")
    (tmp_path / f"{stem}_1_0").symlink_to(precious)
    os.mkfifo(tmp_path / f"{stem}_2_0")
    (tmp_path / f"{stem}_3_0").mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 61_999, 61_999)
    else:
        theirs.unlink()
    assert remove_leftovers([ended], tmp_path) == ()
