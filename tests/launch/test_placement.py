"""Where the processes of a run and their memory are, and how much they had at most, as the kernel
says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.supervisor import samples as sampling
from so_tui.plan.binding import bind_ranks
from so_tui.runs.liveness import identify
from so_tui.runs.records import Process, RankPlacement
from tests.support.machines import superchips
from tests.support.sysroots import build_files

BINDING = bind_ranks(superchips(2), 2, mode="superoffload", cpu_adam_cores_fraction=0.9)[1]
MAIN, ADAM = BINDING.main_cpus, BINDING.adam_cpus
RIGHT = RankPlacement(rank=1, cpus=MAIN, adam_cpus=ADAM, node_bytes={1: 99 << 30, 0: 1 << 30})
NUMA_MAPS = b"""\
7f0000000000 bind:1 anon=3 dirty=3 active=0 N0=1 N1=2 kernelpagesize_kB=64
7f0000100000 bind:1 file=/dev/shm/so_tui_12_states mapped=4 N1=4 kernelpagesize_kB=2048
7f0000200000 default file=/usr/lib/libtorch.so mapped=9 mapmax=4 N0=9 kernelpagesize_kB=64
7f0000300000 default file=/srv/data\\040N7=7/tokens.bin mapped=9 N0=9 kernelpagesize_kB=64
7f0000400000 default
7f0000500000 default heap anon=1 dirty=1 N1=1 kernelpagesize_kB=64
"""


def test_memory_by_node_leaves_out_files() -> None:
    assert sampling._node_bytes(NUMA_MAPS) == {0: 64 << 10, 1: 3 * (64 << 10) + 4 * (2 << 20)}
    assert sampling._node_bytes(b"") == {}


@pytest.mark.parametrize(
    ("cpus", "adam_cpus", "main_cpus", "wrong"),
    [
        (MAIN, ADAM, MAIN, False),
        (BINDING.cpus, (), MAIN, False),  # while it loads, before there is a worker
        (MAIN, (), MAIN, False),  # the worker of a run that stopped
        (MAIN, (), BINDING.cpus, True),  # without a worker, all cores are the rank's
        (MAIN, MAIN, MAIN, True),
        ((*MAIN, 0), ADAM, MAIN, True),
    ],
)
def test_cores_other_than_planned_or_fewer_are_misplaced(
    cpus: tuple[int, ...], adam_cpus: tuple[int, ...], main_cpus: tuple[int, ...], *, wrong: bool
) -> None:
    placement = replace(RIGHT, cpus=cpus, adam_cpus=adam_cpus)
    assert sampling.misplaced(placement, BINDING.cpus, main_cpus) == wrong


def test_the_share_of_memory_on_the_right_node() -> None:
    assert BINDING.memory_policy.nodes == (1,)
    assert sampling.share_on_nodes(RIGHT, (1,)) == 0.99
    assert sampling.share_on_nodes(replace(RIGHT, node_bytes={0: 5}), (1,)) == 0.0
    assert sampling.share_on_nodes(replace(RIGHT, node_bytes={}), (1,)) is None
    assert sampling.share_on_nodes(RIGHT, ()) is None  # any node will do
    assert (
        sampling.share_on_nodes(replace(RIGHT, node_bytes={0: 5}), ()) == 1.0
    )  # a host with one node


@contextmanager
def waiting(program: str = "") -> Iterator[Process]:
    """Have a process run a program, and wait then."""
    argv = [sys.executable, "-c", f"{program}\nprint(flush=True); input()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = identify(child.pid, "rank")
        assert process is not None
        yield replace(process, rank=3)
        child.kill()


def test_a_real_process_is_found_where_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a thread of it has just ended: a training process has threads that come and go."""
    with waiting() as sleeper:
        (cpu, *_) = os.sched_getaffinity(0)
        os.sched_setaffinity(sleeper.pid, {cpu})
        os.setpriority(os.PRIO_PROCESS, sleeper.pid, 19)
        other, listed = identify(os.getpid()), os.listdir
        assert other is not None
        monkeypatch.setattr(os, "listdir", lambda path: [str(1 << 30), *listed(path)])
        (placement,) = sampling._read_placements([other, sleeper])
    assert (placement.rank, placement.cpus, placement.adam_cpus) == (3, (cpu,), ())
    assert placement.nice in (
        19,
        sampling.IDLE_NICE,
    )  # the tests themselves may run with idle priority
    assert sum(placement.node_bytes.values()) > 1 << 20


def test_a_process_that_has_ended_is_nowhere() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        gone = Process(pid=child.pid, start_time=1, role="rank", rank=0)
    assert sampling._read_placements([gone]) == (RankPlacement(rank=0, cpus=()),)


RANKS = tuple(Process(pid=10 + rank, start_time=1, role="rank", rank=rank) for rank in (0, 1))
WORKERS = tuple(Process(pid=20 + rank, start_time=1, role="adam", rank=rank) for rank in (0, 1))


def status(
    root: Path, process: Process, resident: int, files: int = 0, shared: int = 0, highest: int = 0
) -> None:
    """Write what the kernel says of the memory of a process, in MiB."""
    sizes = {"VmHWM": highest or resident, "VmRSS": resident, "RssFile": files, "RssShmem": shared}
    lines = "".join(f"{name}:\t{1024 * size} kB\n" for name, size in sizes.items())
    build_files({f"/proc/{process.pid}/status": f"Name:\tpython\n{lines}"}, root)


def test_memory_that_was_given_back_is_remembered() -> None:
    with waiting("b = bytearray(200_000_000); b[::4096] = b'1' * len(b[::4096]); del b") as process:
        highest = sampling._HighWater().read([process])
    assert highest is not None
    assert 200_000_000 < highest < 260_000_000


def test_what_processes_share_counts_once(tmp_path: Path) -> None:
    """Each rank's arena once, though a rank touched less of it than its worker; the libraries
    once.
    """
    for rank, worker in zip(RANKS, WORKERS, strict=True):
        status(tmp_path, rank, 5_000 + 1_000 + 40_000, 1_000, 40_000)
        status(tmp_path, worker, 10 + 5 + 50_000, 5, 50_000)
    highest = sampling._HighWater().read([*RANKS, *WORKERS], tmp_path)
    assert highest == (2 * (5_000 + 10 + 50_000) + 1_000) << 20


def test_memory_that_moves_between_processes_is_not_added(tmp_path: Path) -> None:
    """The weights of a rank pass through its memory before the Adam worker touches its states;
    shared memory stays counted once when a process lets go of it.
    """
    water, (rank, worker) = sampling._HighWater(), (RANKS[0], WORKERS[0])
    status(tmp_path, rank, 10_000, 1_000)
    assert water.read([rank], tmp_path) == 10_000 << 20
    status(tmp_path, worker, 56_000, 0, 56_000)
    for highest in (10_000, 9_999, 10_000):  # as exact as the kernel's counters
        status(tmp_path, rank, 2_000, 1_000, highest=highest)
        assert water.read([rank, worker], tmp_path) == 58_000 << 20
    status(tmp_path, rank, 60_000, 1_000, 50_000)
    assert water.read([rank, worker], tmp_path) == 66_000 << 20
    status(tmp_path, rank, 3_000, 1_000, highest=60_000)
    status(tmp_path, worker, 10, 5, highest=56_000)
    assert water.read([rank, worker], tmp_path) == 66_000 << 20


def test_peak_between_looks_counts_with_what_others_have(tmp_path: Path) -> None:
    water = sampling._HighWater()
    assert water.read(RANKS, tmp_path) is None, "processes that tell nothing are no reading"
    for process in RANKS:
        status(tmp_path, process, 2_000)
    assert water.read(RANKS, tmp_path) == 4_000 << 20
    status(tmp_path, RANKS[0], 2_000, highest=9_000)
    assert water.read(RANKS, tmp_path) == 11_000 << 20
    assert water.read([WORKERS[0]], tmp_path) == 11_000 << 20
