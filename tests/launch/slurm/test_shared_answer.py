"""One answer of Slurm for all screens, on file systems that are full, have no locks, or are shared
by hosts whose clocks differ.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import Job, _Queue, queue


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Return when Slurm was asked; it knows one job."""
    times: list[float] = []

    def own_jobs() -> tuple[Job, ...]:
        times.append(time.time())
        return (Job(id="7", state="PENDING"),)

    monkeypatch.setattr(client, "own_jobs", own_jobs)
    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "cache")
    return times


def numbers(answer: _Queue | None) -> list[str]:
    return [] if answer is None else [job.id for job in answer.jobs]


@pytest.mark.parametrize(("ahead_s", "asks"), [(5, 0), (-5, 0), (3600, 1), (-3600, 1)])
def test_answer_of_another_clock_counts(
    ahead_s: float, asks: int, asked: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue("here", 30)
    (file,) = shutil.copytree(tmp_path / "cache", tmp_path / "other").glob("slurm/queue.*.json")
    os.utime(file, (time.time() + ahead_s,) * 2)
    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "other")
    asked.clear()
    for _ in range(3):
        queue("here", 30)
    assert len(asked) == asks


def test_asked_as_rarely_without_a_cache(asked: list[float], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert [numbers(queue("here", 30)) for _ in range(5)] == [["7"]] * 5
    assert len(asked) == 1


def test_waiting_threads_share_one_slow_answer(
    asked: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick = client.own_jobs

    def slow() -> tuple[Job, ...]:
        time.sleep(0.3)
        return quick()

    monkeypatch.setattr(client, "own_jobs", slow)
    threads = [threading.Thread(target=queue, args=("here", 30)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.5)
    assert len(asked) == 1
