"""Every map of a machine: the right binding of each rank, and what DeepSpeed's launcher would do
without our list of cores.

A rank is written ``GPU @ cores / memory nodes``. Each map is a published listing or follows its
pattern.
"""

from __future__ import annotations

import msgspec
import psutil
import pytest

from so_tui.machine import Machine, cpu_ranges, inspect_machine, parse_cpus
from so_tui.plan.binding import bind_ranks, core_list, deepspeed_text
from so_tui.plan.plan import RankBinding
from so_tui.spec import InputError
from tests.support.sysroots import (
    EIGHT_H100,
    EIGHT_H200,
    FOUR_H100_SUBNUMA,
    GB200,
    GB200_CDMM,
    NVL2,
    ONE_GH200,
    ONE_GH200_CDMM,
    ONE_GH200_HBM_ONLY,
    ONE_GH200_MIG,
    ONE_H200_GUEST,
    QUAD_GH200,
    QUAD_GH200_HBM_ONLY,
    Host,
    fake_numa,
)

SAME = "the same"
QUAD = ["0 @ 0-71 / 0", "1 @ 72-143 / 1", "2 @ 144-215 / 2", "3 @ 216-287 / 3"]
GB200_FOUR = ["0 @ 0-35 / 0", "1 @ 36-71 / 0", "2 @ 72-107 / 1", "3 @ 108-143 / 1"]

# (map, GPUs, the right binding, what DeepSpeed does by itself)
MAPS: list[tuple[str, Host, int, list[str], list[str]]] = [
    ("1x GH200", ONE_GH200, 1, ["0 @ 0-71 / 0"], [SAME]),
    ("1x GH200, CDMM", ONE_GH200_CDMM, 1, ["0 @ 0-71 / any"], [SAME]),
    # As many nodes without CPUs as with: taken for a CPU's flat high-bandwidth memory, so the
    # optimizer's memory comes from the GPU's.
    ("1x GH200, only HBM", ONE_GH200_HBM_ONLY, 1, ["0 @ 0-71 / 0"], ["numactl -p 1 -C 0-71"]),
    ("1x GH200, numa=fake=4", fake_numa(4), 1, ["0 @ 0-71 / 0,1,2,3"], [SAME]),
    (
        "1x GH200, numa=fake=8",
        fake_numa(8),
        1,
        ["0 @ 0-71 / 0,1,2,3,4,5,6,7"],
        ["numactl -p 8 -C 0-71"],
    ),
    ("NVL2, 1 of 2", NVL2, 1, ["0 @ 0-71 / 0"], ["numactl -C 0-143"]),
    ("NVL2", NVL2, 2, ["0 @ 0-71 / 0", "1 @ 72-143 / 1"], [SAME, SAME]),
    ("quad GH200, 1 of 4", QUAD_GH200, 1, QUAD[:1], ["numactl -C 0-287"]),
    ("quad GH200, 2 of 4", QUAD_GH200, 2, QUAD[:2], ["numactl -C 0-143", "numactl -C 144-287"]),
    (
        "quad GH200, 3 of 4",
        QUAD_GH200,
        3,
        QUAD[:3],
        ["numactl -C 0-95", "numactl -C 96-191", "numactl -C 192-287"],
    ),
    ("quad GH200", QUAD_GH200, 4, QUAD, [SAME] * 4),
    (
        "quad GH200, only HBM",
        QUAD_GH200_HBM_ONLY,
        4,
        QUAD,
        [
            "numactl -p 4 -C 0-71",
            "numactl -p 5 -C 72-143",
            "numactl -p 6 -C 144-215",
            "numactl -p 7 -C 216-287",
        ],
    ),
    (
        "quad GH200, only HBM, 2 of 4",
        QUAD_GH200_HBM_ONLY,
        2,
        QUAD[:2],
        ["numactl -C 0-143", "numactl -C 144-287"],
    ),
    ("GB200, 1 of 4", GB200, 1, ["0 @ 0-71 / 0"], ["numactl -C 0-143"]),
    # Both GPUs hang off node 0; the launcher spreads the ranks over both sockets.
    ("GB200, 2 of 4", GB200, 2, GB200_FOUR[:2], ["numactl -m 0 -C 0-71", "numactl -m 1 -C 72-143"]),
    (
        "GB200, 3 of 4",
        GB200,
        3,
        [*GB200_FOUR[:2], "2 @ 72-143 / 1"],
        ["numactl -m 0 -C 0-47", "numactl -C 48-95", "numactl -m 1 -C 96-143"],
    ),
    ("GB200", GB200, 4, GB200_FOUR, [SAME] * 4),
    ("GB200, CDMM", GB200_CDMM, 4, GB200_FOUR, [SAME] * 4),
    # 112 physical cores: the launcher counts those, and takes the first thread of each.
    ("two sockets, 1 of 8 H100", EIGHT_H100, 1, ["0 @ 0-55,112-167 / 0"], ["numactl -C 0-111"]),
    (
        "two sockets, 2 of 8 H100",
        EIGHT_H100,
        2,
        ["0 @ 0-27,112-139 / 0", "1 @ 28-55,140-167 / 0"],
        ["numactl -m 0 -C 0-55", "numactl -m 1 -C 56-111"],
    ),
    (
        "two sockets, 8 H200",
        EIGHT_H200,
        8,
        [
            # each core with its second thread
            f"{gpu} @ {14 * gpu}-{14 * gpu + 13},{112 + 14 * gpu}-{125 + 14 * gpu} / {gpu // 4}"
            for gpu in range(8)
        ],
        [f"numactl -m {gpu // 4} -C {14 * gpu}-{14 * gpu + 13}" for gpu in range(8)],
    ),
    ("a guest with one H200", ONE_H200_GUEST, 1, ["0 @ 0-15 / any"], [SAME]),
    (
        "sub-NUMA clusters, threads side by side",
        FOUR_H100_SUBNUMA,
        4,
        [f"{node} @ {28 * node}-{28 * node + 27} / {node}" for node in range(4)],
        [
            "numactl -m 0 -C 0-13",
            "numactl -m 0 -C 14-27",
            "numactl -m 1 -C 28-41",
            "numactl -m 1 -C 42-55",
        ],
    ),
]


def bind(machine: Machine, gpus: int | tuple[int, ...]) -> tuple[RankBinding, ...]:
    return bind_ranks(machine, gpus, mode="superoffload", cpu_adam_cores_fraction=0.9)


def written(bindings: tuple[RankBinding, ...]) -> list[str]:
    return [
        (
            f"{one.gpu} @ {cpu_ranges(one.cpus)} / "
            f"{','.join(map(str, one.memory_policy.nodes)) or 'any'}"
        )
        for one in bindings
    ]


def by_itself(bindings: tuple[RankBinding, ...]) -> list[str]:
    return [
        deepspeed_text(one.deepspeed_unlisted)
        for one in bindings
        if one.deepspeed_unlisted is not None
    ]


@pytest.mark.parametrize(
    ("host", "gpus", "right", "deepspeed"), [row[1:] for row in MAPS], ids=[row[0] for row in MAPS]
)
def test_every_map(host: Host, gpus: int, right: list[str], deepspeed: list[str]) -> None:
    machine = host.machine()
    bindings = bind(machine, gpus)
    assert written(bindings) == right
    assert by_itself(bindings) == deepspeed
    for one in bindings:
        assert set(one.main_cpus) | set(one.adam_cpus) == set(one.cpus)
        assert not set(one.main_cpus) & set(one.adam_cpus)
        gpu = next(gpu for gpu in machine.gpus if gpu.index == one.gpu)
        assert set(one.cpus) <= set(gpu.cpus), "the cores of a rank are on its GPU's node"
    cores = [cpu for one in bindings for cpu in one.cpus]
    assert len(set(cores)) == len(cores), "no two ranks share a core"


@pytest.mark.parametrize(("host", "gpus"), [row[1:3] for row in MAPS], ids=[row[0] for row in MAPS])
def test_our_core_list_binds_within_each_ranks_cores(host: Host, gpus: int) -> None:
    bindings = bind(host.machine(), gpus)
    assert all(set(one.deepspeed.cpus) <= set(one.cpus) for one in bindings)
    listed = parse_cpus(core_list(bindings))
    share = len(listed) // gpus
    assert [one.deepspeed.cpus for one in bindings] == [
        listed[share * rank : share * (rank + 1)] for rank in range(gpus)
    ]
    if not any("only HBM" in name or "fake=8" in name for name, other, *_ in MAPS if other is host):
        assert not any("-p" in one.deepspeed.numactl for one in bindings)


def job(machine: Machine, cpus: str, gpus: tuple[int, ...], **changes: object) -> Machine:
    """What a scheduler leaves of a node: its CPUs, and GPUs that the driver numbers from 0."""
    given = tuple(
        msgspec.structs.replace(machine.gpus[old], index=new) for new, old in enumerate(gpus)
    )
    return msgspec.structs.replace(machine, allowed_cpus=parse_cpus(cpus), gpus=given, **changes)


def test_one_superchip_of_a_shared_quad_node() -> None:
    """The GPU of the third superchip is number 0 in the job, with cores 144-215. DeepSpeed asks for
    cores of other jobs.
    """
    bindings = bind(job(QUAD_GH200.machine(), "144-215", (2,)), 1)
    assert written(bindings) == ["0 @ 144-215 / 2"]
    assert bindings[0].numa_node == 2
    assert by_itself(bindings) == ["fails: cores 0-143,216-287 may not be used"]
    assert deepspeed_text(bindings[0].deepspeed) == SAME
    assert core_list(bindings) == "144-215"


def test_two_superchips_with_a_part_of_the_cores() -> None:
    """``--cpus-per-task`` smaller than a superchip: 16 cores of the second one, 32 of the
    fourth.
    """
    bindings = bind(job(QUAD_GH200.machine(), "72-87,216-247", (1, 3)), 2)
    assert written(bindings) == ["0 @ 72-87 / 1", "1 @ 216-247 / 3"]
    assert [deepspeed_text(one.deepspeed) for one in bindings] == [
        SAME,
        "numactl -m 3 -C 216-231",
    ], "16 each, on the right node"
    assert all(text.startswith("fails: cores") for text in by_itself(bindings))


def test_a_task_mask_that_misses_the_gpus_node() -> None:
    """Without ``-c 72`` every task of some sites gets cores 0-7, whichever GPU it has: memory goes
    with the cores.
    """
    bindings = bind(job(QUAD_GH200.machine(), "0-7", (3,)), 1)
    assert written(bindings) == ["0 @ 0-7 / 0"]


def test_half_a_socket_of_two_with_hyperthreads() -> None:
    bindings = bind(job(EIGHT_H200.machine(), "28-55,140-167", (2, 3)), 2)
    assert written(bindings) == ["0 @ 28-41,140-153 / 0", "1 @ 42-55,154-167 / 0"]
    assert [cpu_ranges(one.deepspeed.cpus) for one in bindings] == ["28-41", "42-55"]


def test_memory_nodes_that_the_cpuset_forbids() -> None:
    """set_mempolicy fails for a node outside ``Mems_allowed``: better no policy than a rank that
    does not start.
    """
    machine = job(QUAD_GH200.machine(), "0-143", (0, 1), allowed_memory_nodes=(0,))
    bindings = bind(machine, 2)
    assert [one.memory_policy.mode for one in bindings] == ["bind", "default"]
    assert not any(one.deepspeed.numactl for one in bindings), (
        "the launcher would end on node 1, so it is started without the flag"
    )


def test_gpus_split_by_mig_take_no_rank() -> None:
    machine = ONE_GH200_MIG.machine()
    assert [node.id for node in machine.numa_nodes if node.kind == "gpu-memory"] == [1, 2, 3]
    split = msgspec.structs.replace(
        machine, gpus=tuple(msgspec.structs.replace(gpu, mig=True) for gpu in machine.gpus)
    )
    with pytest.raises(InputError, match="no whole GPU; GPU 0 is split by MIG"):
        bind(split, 1)
    assert written(bind(machine, 1)) == ["0 @ 0-71 / 0"], "a slice's memory is never the host's"
    four = NVL2.machine()
    half = msgspec.structs.replace(
        four, gpus=(msgspec.structs.replace(four.gpus[0], mig=True), four.gpus[1])
    )
    assert written(bind(half, 1)) == ["1 @ 72-143 / 1"], "a count takes whole GPUs"
    with pytest.raises(InputError, match="split by MIG"):
        bind(half, (0,))


def test_threads_side_by_side_stay_together() -> None:
    """A guest whose kernel numbers the threads of a core 0 and 1: two ranks on one node never share
    a core.
    """
    host = Host(
        cpu={0: ("0-11", 65536)},
        grace=False,
        smt=tuple((first, first + 1) for first in range(0, 12, 2)),
    )
    machine = host.machine()
    assert machine.smt_siblings == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    bindings = bind(machine, 4)
    assert [cpu_ranges(one.cpus) for one in bindings] == ["0-1", "2-5", "6-7", "8-11"]
    assert cpu_ranges(bindings[1].main_cpus) == "2"


def test_physical_cores_are_counted_as_deepspeed_counts_them() -> None:
    machine = inspect_machine()
    (binding,) = bind(
        msgspec.structs.replace(machine, allowed_cpus=machine.online_cpus, gpus=()), 1
    )
    assert binding.deepspeed_unlisted is not None
    physical = psutil.cpu_count(logical=False)
    assert binding.deepspeed_unlisted.error or len(binding.deepspeed_unlisted.cpus) == physical
