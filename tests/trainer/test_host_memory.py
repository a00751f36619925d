"""The memory of a rank is measured beside training, which never waits for it."""

from __future__ import annotations

import mmap
import subprocess
import threading

import pytest

from so_tui_trainer import metrics
from so_tui_trainer.metrics import _HostMemory, _rank_memory_bytes
from tests.support.waiting import wait_until


class Reads:
    """Measurements that take as long as the test wants."""

    def __init__(self) -> None:
        self.made = 0
        self.begun = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self) -> int:
        self.begun += 1
        assert self.may_end.wait(60)
        self.made += 1
        return self.made


def test_a_step_never_waits_for_a_measurement_but_the_first() -> None:
    now, reads = [0.0], Reads()
    memory = _HostMemory(reads, lambda: now[0])
    assert memory.latest_bytes() == 1
    reads.may_end.clear()
    now[0] = 25.0
    assert [memory.latest_bytes() for _ in range(3)] == [1, 1, 1]
    wait_until(lambda: reads.begun == 2)
    reads.may_end.set()
    wait_until(lambda: memory.latest_bytes() == 2)
    assert reads.begun == 2, "one at a time"


@pytest.mark.parametrize(("age_s", "interval_s"), [(60.0, 20.0), (200.0, 500.0)])
def test_costly_measurements_become_rare_once_memory_has_been_touched(
    age_s: float, interval_s: float
) -> None:
    now, reads = [0.0], Reads()

    def slow() -> int:
        now[0] += 5.0
        return reads()

    memory = _HostMemory(slow, lambda: now[0])
    memory.latest_bytes()
    now[0] = age_s
    memory.latest_bytes()
    wait_until(lambda: memory.latest_bytes() == 2)
    now[0] = age_s + 5.0 + interval_s - 1
    memory.latest_bytes()
    assert reads.begun == 2
    now[0] += 2
    memory.latest_bytes()
    wait_until(lambda: memory.latest_bytes() == 3)


def test_it_counts_what_has_been_touched() -> None:
    before = _rank_memory_bytes()
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"\1" * len(memory))
        assert _rank_memory_bytes() - before > 60 << 20


def test_threads_that_end_meanwhile_do_not_hide_adams_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training process has threads that come and go."""
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            short = [threading.Thread(target=int) for _ in range(30)]
            for thread in short:
                thread.start()
            for thread in short:
                thread.join()

    busy = [threading.Thread(target=come_and_go) for _ in range(3)]
    with subprocess.Popen(["sleep", "1000"]) as worker:
        monkeypatch.setattr(metrics, "pss_bytes", lambda pid: int(pid == worker.pid))
        try:
            for thread in busy:
                thread.start()
            assert [_rank_memory_bytes() for _ in range(300)] == [1] * 300
        finally:
            ended.set()
            for thread in busy:
                thread.join()
            worker.kill()
