"""Several ranks over gloo, each with its own worker: killed, suspended, resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import rank_processes

pytestmark = pytest.mark.slow


def start(
    part: str, folder: Path, ranks: int, port: int | None = None
) -> list[subprocess.Popen[str]]:
    script = Path(rank_processes.__file__).with_name("engine_ranks.py")
    return rank_processes.start(script, [part, str(folder)], ranks, port)


def test_three_ranks_of_which_some_hold_only_padding() -> None:
    rank_processes.finish(start("reference", Path(), 3))


def test_two_ranks_that_speculate_and_wait_for_a_late_worker(tmp_path: Path) -> None:
    rank_processes.finish(start("speculation,late_worker", tmp_path, 2))


def test_killed_ranks_leave_nothing_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """Neither workers nor shared memory: DeepSpeed's collectives would leave 69 MB a rank."""
    port = rank_processes.free_port()
    ranks = start("first", tmp_path, 2, port)
    workers = [rank_processes.worker_of(rank) for rank in ranks]
    os.kill(workers[0], signal.SIGSTOP)  # a stopped worker must end, too
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate()
    assert rank_processes.gone(workers)
    assert not list(Path("/dev/shm").glob(f"*_{port}_*"))
    rank_processes.finish(start("second", tmp_path, 2))


def test_watchdog_does_not_count_the_time_of_a_suspended_rank(tmp_path: Path) -> None:
    """A scheduler suspends a job. The rank resumes first and finds its worker without progress."""
    (rank,) = start("endless", tmp_path, 1)
    worker = rank_processes.worker_of(rank)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(0.2)  # by now the worker owes a result
    os.kill(rank.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(rank.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(worker, signal.SIGCONT)
    (tmp_path / "end").touch()
    rank_processes.finish([rank])
