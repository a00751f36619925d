"""Where the processes of a rank are is read from the kernel, and compared with the plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from so_tui.launch.supervisor.samples import (
    IDLE_NICE,
    _node_bytes,
    _read_placements,
    misplaced,
    share_on_nodes,
)
from so_tui.plan.binding import bind_ranks
from so_tui.runs.liveness import identify
from so_tui.runs.records import Process, RankPlacement
from tests.support.machines import superchips

BINDING = bind_ranks(superchips(2), 2, mode="superoffload", cpu_adam_cores_fraction=0.9)[1]
RIGHT = RankPlacement(
    rank=1,
    cpus=BINDING.main_cpus,
    adam_cpus=BINDING.adam_cpus,
    node_bytes={1: 99 << 30, 0: 1 << 30},
)
NUMA_MAPS = b"""\
7f0000000000 bind:1 anon=3 dirty=3 active=0 N0=1 N1=2 kernelpagesize_kB=64
7f0000100000 bind:1 file=/dev/shm/so_tui_12_states mapped=4 N1=4 kernelpagesize_kB=2048
7f0000200000 default file=/usr/lib/libtorch.so mapped=9 mapmax=4 N0=9 kernelpagesize_kB=64
7f0000300000 default file=/srv/data\\040N7=7/tokens.bin mapped=9 N0=9 kernelpagesize_kB=64
7f0000400000 default
7f0000500000 default heap anon=1 dirty=1 N1=1 kernelpagesize_kB=64
"""


def test_memory_by_node_leaves_out_files() -> None:
    assert _node_bytes(NUMA_MAPS) == {0: 64 << 10, 1: 3 * (64 << 10) + 4 * (2 << 20)}
    assert _node_bytes(b"") == {}


def test_cores_other_than_planned_or_fewer_are_misplaced() -> None:
    assert not misplaced(RIGHT, BINDING.cpus, BINDING.main_cpus)
    assert not misplaced(
        replace(RIGHT, cpus=BINDING.cpus, adam_cpus=()), BINDING.cpus, BINDING.main_cpus
    )  # while it loads, before there is a worker
    ended = replace(RIGHT, adam_cpus=())
    assert not misplaced(ended, BINDING.cpus, BINDING.main_cpus)  # the worker of a run that stopped
    assert misplaced(
        ended, BINDING.cpus, BINDING.cpus
    )  # without a worker, all cores are the rank's
    assert misplaced(replace(RIGHT, adam_cpus=BINDING.main_cpus), BINDING.cpus, BINDING.main_cpus)
    assert misplaced(replace(RIGHT, cpus=(*BINDING.main_cpus, 0)), BINDING.cpus, BINDING.main_cpus)


def test_the_share_of_memory_on_the_right_node() -> None:
    assert BINDING.memory_policy.nodes == (1,)
    assert share_on_nodes(RIGHT, (1,)) == 0.99
    assert share_on_nodes(replace(RIGHT, node_bytes={0: 5}), (1,)) == 0.0
    assert share_on_nodes(replace(RIGHT, node_bytes={}), (1,)) is None
    assert share_on_nodes(RIGHT, ()) is None  # any node will do
    assert share_on_nodes(replace(RIGHT, node_bytes={0: 5}), ()) == 1.0  # a host with one node


@pytest.fixture
def sleeper() -> Iterator[Process]:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = identify(child.pid, "rank")
        assert process is not None
        yield replace(process, rank=3)
        child.kill()


def test_a_real_process_is_found_where_it_was_put(sleeper: Process) -> None:
    (cpu, *_) = os.sched_getaffinity(0)
    os.sched_setaffinity(sleeper.pid, {cpu})
    os.setpriority(os.PRIO_PROCESS, sleeper.pid, 19)
    other = identify(os.getpid())
    assert other is not None
    (placement,) = _read_placements([other, sleeper])
    assert (placement.rank, placement.cpus, placement.adam_cpus) == (3, (cpu,), ())
    assert placement.nice in (19, IDLE_NICE)  # the tests themselves may run with idle priority
    assert sum(placement.node_bytes.values()) > 1 << 20


def test_ended_thread_hides_no_others(sleeper: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training process has threads that come and go."""
    cpus = tuple(sorted(os.sched_getaffinity(sleeper.pid)))
    ended, listed = 1 << 30, os.listdir
    monkeypatch.setattr(
        os,
        "listdir",
        lambda path: [str(ended), *listed(path)] if str(path).endswith("/task") else listed(path),
    )
    (placement,) = _read_placements([sleeper])
    assert placement.cpus == cpus


def test_a_process_that_has_ended_is_nowhere() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        gone = Process(pid=child.pid, start_time=1, role="rank", rank=0)
    assert _read_placements([gone]) == (RankPlacement(rank=0, cpus=()),)
