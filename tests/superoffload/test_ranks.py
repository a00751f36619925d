"""Several ranks over gloo, each with its own worker: killed, suspended, resumed, resharded."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import superoffload
from tests.support import engine as support
from tests.support import engine_ranks, rank_processes

pytestmark = pytest.mark.slow
start = partial(rank_processes.start, engine_ranks.SCRIPT)


def test_three_ranks_of_which_some_hold_only_padding() -> None:
    rank_processes.finish(start(["reference", "."], 3))


def test_two_ranks_that_speculate(tmp_path: Path) -> None:
    rank_processes.finish(start(["speculation", str(tmp_path)], 2))


def test_killed_ranks_leave_nothing_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """Neither workers nor shared memory: DeepSpeed's collectives would leave 69 MB a rank."""
    port = rank_processes.free_port()
    ranks = start(["first", str(tmp_path)], 2, port)
    workers = [rank_processes.worker_of(rank) for rank in ranks]
    os.kill(workers[0], signal.SIGSTOP)  # a stopped worker must end, too
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate()
    assert rank_processes.gone(workers)
    assert not list(Path("/dev/shm").glob(f"*_{port}_*"))
    rank_processes.finish(start(["second", str(tmp_path)], 2))


def test_watchdog_does_not_count_the_time_of_a_suspended_rank(tmp_path: Path) -> None:
    """A scheduler suspends a job. The rank resumes first and finds its worker without progress."""
    (rank,) = start(["endless", str(tmp_path)], 1)
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


def test_from_one_rank_to_two_and_back_every_bit_is_kept(tmp_path: Path) -> None:
    data, losses = support.batches(6), {}
    for name, run, states in engine_ranks.formats():
        with support.engine(run, states=states) as made:
            support.train(made, data[:4])
            superoffload.save_state(made, tmp_path / f"one {name}")
            losses[name] = support.train(made, data[4:])
    torch.save(losses, tmp_path / "losses")
    rank_processes.finish(start(["reshard", str(tmp_path)], 2))
    for name, run, states in engine_ranks.formats():
        one, two = tmp_path / f"one {name}", tmp_path / f"two {name}"
        assert support.by_name(two) == support.by_name(one)
        with support.engine(run, states=states) as made:
            superoffload.load_state(made, two)
            assert support.states(made) == support.saved_bytes(one)
            assert support.train(made, data[4:]) == losses[name]
