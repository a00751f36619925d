from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from so_tui.launch.supervisor.samples import _HighWater
from so_tui.runs.records import Process

RANKS = tuple(Process(pid=10 + rank, start_time=1, role="rank", rank=rank) for rank in (0, 1))
WORKERS = tuple(Process(pid=20 + rank, start_time=1, role="adam", rank=rank) for rank in (0, 1))


def status(
    root: Path,
    pid: int,
    resident_mb: int,
    files_mb: int = 0,
    shared_mb: int = 0,
    highest_mb: int | None = None,
) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"VmHWM": highest_mb or resident_mb, "VmRSS": resident_mb}
    sizes |= {"RssFile": files_mb, "RssShmem": shared_mb}
    lines = (f"{name}:\t{1024 * size} kB\n" for name, size in sizes.items())
    (folder / "status").write_text("Name:\tpython\n" + "".join(lines))


def test_memory_that_was_given_back_is_remembered() -> None:
    program = (
        "block = bytearray(200_000_000); block[::4096] = b'1' * len(block[::4096]); del block; "
        "print('done', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        highest = _HighWater().read([Process(pid=child.pid, start_time=1)])
        child.communicate(b"\n")
    assert highest is not None
    assert 200_000_000 < highest < 260_000_000


def test_what_processes_share_counts_once(tmp_path: Path) -> None:
    for process in RANKS:
        status(tmp_path, process.pid, 5_000 + 1_000 + 40_000, 1_000, 40_000)
    for process in WORKERS:
        status(tmp_path, process.pid, 10 + 5 + 50_000, 5, 50_000)
    highest = _HighWater().read([*RANKS, *WORKERS], tmp_path)
    # Each rank's arena once, though a rank touched less of it than its worker; the libraries once.
    assert highest == (2 * (5_000 + 10 + 50_000) + 1_000) << 20


def test_shared_memory_stays_counted_once(tmp_path: Path) -> None:
    """When a process lets go of it."""
    water, (rank, worker) = _HighWater(), (RANKS[0], WORKERS[0])
    status(tmp_path, rank.pid, 9_000, 1_000)
    assert water.read([rank], tmp_path) == 9_000 << 20
    status(tmp_path, rank.pid, 53_000, 1_000, 50_000)
    status(tmp_path, worker.pid, 50_010, 5, 50_000)
    while_training = water.read([rank, worker], tmp_path)
    status(tmp_path, rank.pid, 3_000, 1_000, highest_mb=53_000)
    status(tmp_path, worker.pid, 10, 5, highest_mb=50_010)
    assert water.read([rank, worker], tmp_path) == while_training == (53_000 + 5) << 20


def test_memory_given_back_is_not_added_to_others(tmp_path: Path) -> None:
    """The weights of a rank pass through its memory before the Adam worker touches its states."""
    water, (rank, worker) = _HighWater(), (RANKS[0], WORKERS[0])
    status(tmp_path, rank.pid, 10_000, 1_000)
    assert water.read([rank], tmp_path) == 10_000 << 20
    status(tmp_path, worker.pid, 56_000, 0, 56_000)
    for highest_mb in (10_000, 9_999, 10_000):  # as exact as the kernel's counters
        status(tmp_path, rank.pid, 2_000, 1_000, highest_mb=highest_mb)
        assert water.read([rank, worker], tmp_path) == 58_000 << 20


def test_peak_between_looks_counts(tmp_path: Path) -> None:
    """With what others have then."""
    water, (rank, other) = _HighWater(), RANKS
    for process in (rank, other):
        status(tmp_path, process.pid, 2_000)
    assert water.read(RANKS, tmp_path) == 4_000 << 20
    status(tmp_path, rank.pid, 2_000, highest_mb=9_000)
    assert water.read(RANKS, tmp_path) == 11_000 << 20


def test_a_process_that_tells_nothing_is_no_reading(tmp_path: Path) -> None:
    water = _HighWater()
    assert water.read([RANKS[0]], tmp_path) is None
    own = water.read([Process(pid=os.getpid(), start_time=1)])
    assert own is not None
    assert water.read([RANKS[0]], tmp_path) == own
