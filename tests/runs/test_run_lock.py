"""One process is responsible for a run, even where locks fail or exclude no one."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.faults import shim
from so_tui.runs import RunDirectory
from so_tui.runs.liveness import OLD_S, STALE_S, HostIdentity, identify, this_host
from so_tui.runs.lock import _Owner, run_lock
from so_tui.runs.records import Process
from tests.support.problems import raising

TAKE = """
import sys, time
from pathlib import Path
from so_tui.runs import RunDirectory
from so_tui.runs.lock import run_lock
print("ready", flush=True)
sys.stdin.readline()
with run_lock(RunDirectory(Path(sys.argv[1]))) as lock:
    print("taken" if lock else "refused", flush=True)
    sys.stdin.readline()
"""
DEAD = Process(pid=1 << 21, start_time=1, role="supervisor")


def content(host: HostIdentity, process: Process | None) -> bytes:
    assert process is not None
    return msgspec.json.encode(_Owner(host=host, process=process))


DEAD_HERE = content(this_host(), DEAD)
DEAD_ELSEWHERE = content(HostIdentity("elsewhere", "another", 1), DEAD)


def faults_of(folder: Path, how: Any) -> dict[str, str]:
    """Return the environment of processes whose locks are as a word says."""
    library = shim.build(folder)
    if library is None:
        pytest.skip("there is no C compiler")
    faults = shim.Shim(library, folder / "control-of-faults")
    faults.lock(how, "supervisor.lock")
    return faults.environment()


@pytest.fixture
def _unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the file system's locks exclude nobody."""
    monkeypatch.setattr("so_tui.runs.lock._excludes_others", lambda _: False)


unlocked = pytest.mark.usefixtures("_unlocked")


class Taker:
    """A process that takes the lock of a run when it is told so."""

    def __init__(self, run: RunDirectory, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE, str(run.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.answer() == "ready"

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def racing(run: RunDirectory, environment: dict[str, str]) -> Iterator[Taker]:
    """Have three processes take the lock at once; yield the one that has it."""
    takers = [Taker(run, environment) for _ in range(3)]
    try:
        for taker in takers:
            taker.tell()
        answers = [taker.answer() for taker in takers]
        assert sorted(answers) == ["refused", "refused", "taken"]
        yield takers[answers.index("taken")]
    finally:
        for taker in takers:
            taker.end()


@pytest.mark.parametrize("how", ["as they are", "fail", "lock nothing"])
def test_one_of_several_gets_the_lock(run: RunDirectory, tmp_path: Path, how: str) -> None:
    """And its death frees it."""
    environment = faults_of(tmp_path, how)
    with racing(run, environment) as holder:
        holder.end()
        late = Taker(run, environment)
        late.tell()
        assert late.answer() == "taken"
        late.end()


def owned(run: RunDirectory, owner: bytes, age_s: float = 0.0) -> Path:
    path = run.path / "supervisor.owner"
    path.write_bytes(owner)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_one_takes_a_dead_owners_place(run: RunDirectory, tmp_path: Path) -> None:
    environment = faults_of(tmp_path, "lock nothing")
    for _ in range(5):
        owned(run, DEAD_HERE)
        with racing(run, environment):
            continue


@unlocked
@pytest.mark.parametrize(
    ("owner", "age_s", "assume_dead", "free"),
    [
        (DEAD_HERE, 0.0, False, True),
        (content(this_host(), identify(os.getpid())), 10 * OLD_S, False, False),
        (DEAD_ELSEWHERE, OLD_S + 60, False, True),
        (DEAD_ELSEWHERE, OLD_S - 60, False, False),
        (DEAD_ELSEWHERE, STALE_S + 10, True, True),
        (DEAD_ELSEWHERE, STALE_S - 10, True, False),
        (b'{"host":', OLD_S + 60, False, True),
        (b'{"host":', 0.0, False, False),
    ],
)
def test_the_file_of_an_owner_that_is_gone_is_taken_over(
    owner: bytes, age_s: float, assume_dead: bool, free: bool, run: RunDirectory
) -> None:
    path = owned(run, owner, age_s)
    for _ in range(3):
        with run_lock(run, assume_dead=assume_dead) as lock:
            assert (lock is not None) == free
            with run_lock(run) as second:
                assert second is None
            if lock is not None:
                lock.refresh()
    assert path.exists()


@unlocked
def test_a_replaced_holder_leaves_the_new_one_alone(run: RunDirectory) -> None:
    with run_lock(run) as lock:
        assert lock is not None
        lock.refresh()
        replacement = run.path / "supervisor.owner.2"
        replacement.write_bytes(content(this_host(), identify(os.getpid())))
        with pytest.raises(OSError, match="taken over"):
            lock.refresh()
    with run_lock(run) as late:
        assert late is None
    assert not msgspec.json.decode(replacement.read_bytes(), type=_Owner).released


@unlocked
def test_full_disk_frees_the_lock(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most runs whose disk is full end for that reason."""
    full = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patch, run_lock(run) as lock:
        assert lock is not None
        patch.setattr("so_tui.runs.state.write_run_json", full)
    with run_lock(run) as again:
        assert again is not None
    assert not list(run.path.glob(".supervisor.owner.*"))


def test_taken_lock_is_kept_when_the_other_lets_go(run: RunDirectory) -> None:
    """A file server may give up a lost host's lock while another supervises the run."""
    os.utime(run.state_path, (1.0, 1.0))
    ghost = os.open(run.supervisor_lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(ghost, fcntl.LOCK_EX)
    with run_lock(run, assume_dead=True) as taken:
        assert taken is not None
        with run_lock(run, assume_dead=True) as second:
            assert second is None
        os.close(ghost)
        with run_lock(run) as second:
            assert second is None
        taken.refresh()
    with run_lock(run) as again:
        assert again is not None
