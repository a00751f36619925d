"""The library of faults does to other processes what its name says, and stops when it is told
so.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import shim
from tests.support.waiting import LIMIT_S


@pytest.fixture
def faults(tmp_path: Path) -> shim.Shim:
    library = shim.build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    return shim.Shim(library, tmp_path / "control")


def told(faults: shim.Shim, code: str, *arguments: object) -> str:
    """Run Python code under the faults, and return what it prints."""
    argv = [
        sys.executable,
        "-I",
        "-c",
        f"import errno, fcntl, os, sys, time\n{code}",
        *map(str, arguments),
    ]
    return subprocess.run(
        argv, env=faults.environment(), capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout.strip()


WRITE = """
with open(sys.argv[1], "ab", buffering=0) as file:
    for _ in range(2):
        try:
            print(file.write(b"0123456789"), end=" ")
        except OSError as error:
            print(errno.errorcode[error.errno])
"""


def test_a_full_disk_takes_half_of_a_write_and_then_nothing_but_what_overwrites(
    faults: shim.Shim, tmp_path: Path
) -> None:
    path = tmp_path / "records" / "000001.jsonl"
    path.parent.mkdir()
    faults.fill("/records/")
    assert told(faults, WRITE, path) == "5 ENOSPC"
    assert (
        told(faults, "print(os.pwrite(os.open(sys.argv[1], os.O_WRONLY), b'abcde', 0))", path)
        == "5"
    )
    assert told(faults, WRITE, tmp_path / "elsewhere") == "10 10"
    faults.fill("")
    assert told(faults, WRITE, path) == "10 10"
    assert path.read_bytes() == b"abcde" + 2 * b"0123456789"


def test_locks_fail_or_lock_nothing(faults: shim.Shim, tmp_path: Path) -> None:
    code = """
def lock():
    try:
        fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "locked"
    except OSError as error:
        return errno.errorcode[error.errno]
first = open(sys.argv[1])
try:
    fcntl.flock(first, fcntl.LOCK_EX)
except OSError:
    pass
print(lock())
"""
    path = tmp_path / "lock"
    path.touch()
    assert told(faults, code, path) == "EAGAIN"
    faults.lock("fail", str(path))
    assert told(faults, code, path) == "ENOLCK"
    assert told(faults, code, tmp_path / "control") == "EAGAIN"
    faults.lock("lock nothing", str(path))
    assert told(faults, code, path) == "locked"


@pytest.mark.parametrize("offset_s", [3600, -3600])
def test_the_clock_jumps_while_a_process_runs_and_its_monotonic_clock_does_not(
    offset_s: int, faults: shim.Shim
) -> None:
    code = """
before = time.time(), time.monotonic()
print("ready", flush=True)
sys.stdin.readline()
print(time.time() - before[0], time.monotonic() - before[1])
"""
    argv = [sys.executable, "-I", "-c", f"import sys, time\n{code}"]
    with subprocess.Popen(
        argv, env=faults.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        faults.set_clock(offset_s)
        jumped, passed = map(float, process.communicate("\n", timeout=LIMIT_S)[0].split())
    assert jumped - passed == pytest.approx(offset_s, abs=1)


def test_every_other_read_of_a_file_that_is_replaced_fails(
    faults: shim.Shim, tmp_path: Path
) -> None:
    code = """
for _ in range(3):
    with open(sys.argv[1], "rb", buffering=0) as file:
        try:
            print(file.read(9).decode(), end=" ")
        except OSError as error:
            print(errno.errorcode[error.errno], end=" ")
"""
    path = tmp_path / "state.json"
    path.write_text("{}")
    assert told(faults, code, path) == "{} {} {}"
    faults.replace_while_read(str(path))
    assert told(faults, code, path) == "ESTALE {} ESTALE"


def test_attributes_stay_what_they_were_for_a_while(faults: shim.Shim, tmp_path: Path) -> None:
    code = """
sizes = []
for size in (1, 2):
    with open(sys.argv[1], "wb") as file:
        file.write(size * b"x")
    sizes.append(os.stat(sys.argv[1]).st_size)
time.sleep(1.1)
print(*sizes, os.stat(sys.argv[1]).st_size)
"""
    path = tmp_path / "request"
    assert told(faults, code, path) == "1 2 2"
    faults.delay_attributes(1.0, str(path))
    assert told(faults, code, path) == "1 1 2"
