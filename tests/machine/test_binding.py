"""Which cores and memory each rank gets on every kind of machine, and what DeepSpeed's launcher
would do there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from so_tui.machine import Machine, Software, inspect_machine, parse_cpus
from so_tui.machine.host import cpu_ranges
from so_tui.plan.binding import (
    _numactl_nodes,
    _numactl_prefix,
    _split_cores,
    bind_ranks,
    core_list,
    uses_numactl,
)
from so_tui.plan.plan import RankBinding
from so_tui.spec.errors import InputError
from tests.support.sysroots import (
    EIGHT_H100,
    GB200,
    GB200_CDMM,
    NVL2,
    ONE_GH200,
    ONE_GH200_CDMM,
    ONE_GH200_HBM_ONLY,
    QUAD_GH200,
    QUAD_GH200_HBM_ONLY,
    Host,
    fake_numa,
)


def bind(
    machine: Machine, gpus: int | tuple[int, ...], mode: str = "superoffload", fraction: float = 0.9
) -> tuple[RankBinding, ...]:
    return bind_ranks(machine, gpus, mode=mode, cpu_adam_cores_fraction=fraction)


def summary(
    bindings: tuple[RankBinding, ...],
) -> list[tuple[int | None, int | None, str, tuple[int, ...]]]:
    """(GPU, CPU node, cores, memory nodes) of each rank."""
    return [
        (one.gpu, one.numa_node, cpu_ranges(one.cpus), one.memory_policy.nodes) for one in bindings
    ]


def test_hyperthreads_stay_with_their_core() -> None:
    """Of the whole list DeepSpeed would give threads of both sockets to the first four ranks; so it
    is handed the first threads.
    """
    bindings = bind(EIGHT_H100.machine(), 8)
    assert [(one.numa_node, cpu_ranges(one.cpus)) for one in bindings][::4] == [
        (0, "0-13,112-125"),
        (1, "56-69,168-181"),
    ]
    assert cpu_ranges(bindings[0].main_cpus) == "0-1,112"
    assert cpu_ranges(bindings[0].adam_cpus) == "2-13,113-125"
    assert core_list(bindings) == "0-111"
    assert cpu_ranges(bindings[0].deepspeed.cpus) == "0-13"
    assert not any(one.deepspeed.matches for one in bindings)
    assert sorted(cpu for one in bindings for cpu in one.cpus) == list(range(224))


def test_gpus_that_are_not_in_node_order() -> None:
    """DeepSpeed cannot express it: its slices ascend with the rank."""
    crossed = dataclasses.replace(
        NVL2, gpus=(("0009:01:00.0", 0x2348, 1), ("0019:01:00.0", 0x2348, 0))
    )
    bindings = bind(crossed.machine(), 2)
    assert summary(bindings) == [(0, 1, "72-143", (1,)), (1, 0, "0-71", (0,))]
    assert not any(one.deepspeed.matches for one in bindings)


def test_unequal_cpusets() -> None:
    machine = msgspec.structs.replace(NVL2.machine(), allowed_cpus=(*range(8, 24), *range(72, 144)))
    bindings = bind(machine, 2)
    assert summary(bindings) == [(0, 0, "8-23", (0,)), (1, 1, "72-143", (1,))]
    assert core_list(bindings) == "8-23,72-87", (
        "equal slices on the right nodes; the second rank widens itself"
    )
    assert [one.deepspeed.matches for one in bindings] == [True, False]


def test_a_cpuset_without_the_gpus_node_gives_cores_elsewhere() -> None:
    machine = msgspec.structs.replace(NVL2.machine(), allowed_cpus=tuple(range(72)))
    bindings = bind(machine, (1,))
    assert summary(bindings) == [(1, 0, "0-71", (0,))]


def test_gpus_of_unknown_node_are_spread() -> None:
    unknown = dataclasses.replace(
        EIGHT_H100, gpus=tuple((address, device, -1) for address, device, _ in EIGHT_H100.gpus[:3])
    )
    bindings = bind(unknown.machine(), 3)
    assert [one.numa_node for one in bindings] == [0, 0, 1]
    assert [len(one.cpus) for one in bindings] == [56, 56, 112]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [(0, "0-55,112-167")]),
        (2, [(0, "0-55,112-167"), (1, "56-111,168-223")]),
        (
            4,
            [
                (0, "0-27,112-139"),
                (0, "28-55,140-167"),
                (1, "56-83,168-195"),
                (1, "84-111,196-223"),
            ],
        ),
    ],
)
def test_ranks_without_gpus_are_spread(ranks: int, expected: list[tuple[int, str]]) -> None:
    bindings = bind(dataclasses.replace(EIGHT_H100, gpus=()).machine(), ranks)
    assert [(one.numa_node, cpu_ranges(one.cpus)) for one in bindings] == expected
    assert all(one.gpu is None for one in bindings)


@pytest.mark.parametrize(
    ("cpus", "ranks"), [("0-1", 2), ("0-6", 2), ("0-1", 3), ("0", 4), ("0-8", 4)]
)
def test_shares_are_fair_and_everybody_gets_a_core(cpus: str, ranks: int) -> None:
    host = Host(cpu={0: (cpus, 16384)}, grace=False)
    bindings = bind(host.machine(), ranks)
    sizes = [len(one.cpus) for one in bindings]
    count = len(parse_cpus(cpus))
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert {cpu for one in bindings for cpu in one.cpus} == set(range(count))
    assert uses_numactl(bindings) is (count >= ranks)
    assert all(one.memory_policy.mode == "default" for one in bindings)


@pytest.mark.parametrize(
    ("count", "fraction", "main", "adam"),
    [
        (72, 0.9, 8, 64),
        (72, 0.99, 3, 69),
        (36, 0.9, 4, 32),
        (16, 0.95, 3, 13),
        (10, 0.7, 3, 7),
        (8, 0.9, 3, 5),
        (7, 0.9, 1, 6),
        (4, 0.5, 2, 2),
        (2, 0.1, 1, 1),
    ],
)
def test_main_process_keeps_its_cores(count: int, fraction: float, main: int, adam: int) -> None:
    cpus = tuple(range(100, 100 + count))
    assert _split_cores(cpus, fraction) == (cpus[:main], cpus[count - adam :])
    assert main + adam == count


def test_one_core_is_shared() -> None:
    assert _split_cores((5,), 0.9) == ((5,), (5,))


@pytest.mark.parametrize("mode", ["zerooffload", "gpu"])
def test_other_modes_have_no_adam_worker(mode: str) -> None:
    (binding,) = bind(ONE_GH200.machine(), 1, mode=mode)
    assert binding.main_cpus == binding.cpus == tuple(range(72))
    assert binding.adam_cpus == ()


def test_without_numactl_the_launcher_binds_nothing() -> None:
    whole = bind(QUAD_GH200.machine(), 2)
    assert uses_numactl(whole)
    assert [one.deepspeed.numactl for one in whole] == [
        ("numactl", "-m", "0", "-C", "0-71"),
        ("numactl", "-m", "1", "-C", "72-143"),
    ]
    machine = msgspec.structs.replace(QUAD_GH200.machine(), software=Software(numactl_works=False))
    bindings = bind(machine, 2)
    assert not uses_numactl(bindings)
    assert all(one.deepspeed.numactl == () and not one.deepspeed.matches for one in bindings)
    assert summary(bindings) == summary(whole)


def test_a_cpu_node_without_memory_is_not_bound_to() -> None:
    host = Host(cpu={0: ("0-3", 16384), 1: ("4-7", 0)}, grace=False)
    bindings = bind(host.machine(), 2)
    assert [cpu_ranges(one.cpus) for one in bindings] == ["0-3", "4-7"]
    assert bindings[1].memory_policy.mode == "default"
    assert not uses_numactl(bindings)


@pytest.mark.parametrize("gpus", [5, (0, 4), (1, 1)])
def test_gpus_that_do_not_exist(gpus: int | tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="gpus"):
        bind(QUAD_GH200.machine(), gpus)


def test_no_cpu_may_be_used() -> None:
    machine = msgspec.structs.replace(ONE_GH200.machine(), allowed_cpus=())
    with pytest.raises(InputError, match="allowed_cpus"):
        bind(machine, 1)


def test_this_machine() -> None:
    machine = inspect_machine()
    bindings = bind(machine, min(2, len(machine.gpus)) or 2)
    assert {cpu for one in bindings for cpu in one.cpus} <= set(machine.allowed_cpus)


# What DeepSpeed 0.19.8 is asked for: (map, core list, ranks).
DEEPSPEED_ALONE: list[tuple[Host, str, int]] = [
    (ONE_GH200, "0-71", 1),
    (ONE_GH200_HBM_ONLY, "0-71", 1),
    (ONE_GH200_CDMM, "0-71", 1),
    (QUAD_GH200, "0-287", 4),
    (QUAD_GH200_HBM_ONLY, "0-287", 4),
    (QUAD_GH200, "0-287", 1),
    (QUAD_GH200, "0-287", 2),
    (QUAD_GH200, "0-143", 2),
    (QUAD_GH200, "0-287", 3),
    (NVL2, "0-143", 2),
    (GB200, "0-143", 4),
    (GB200_CDMM, "0-143", 4),
    (fake_numa(4), "0-71", 1),
    (fake_numa(8), "0-71", 1),
    (EIGHT_H100, "0-223", 2),
    (EIGHT_H100, "0-3,8-9,20", 2),
]


def deepspeed_numa() -> ModuleType:
    """Load DeepSpeed's module without its package, whose import takes seconds."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        pytest.skip("deepspeed is not installed")
    spec = importlib.util.spec_from_file_location(
        "deepspeed_numa", Path(package.origin).parent / "utils" / "numa.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("host", "cores", "ranks"), DEEPSPEED_ALONE)
def test_the_emulation_is_what_deepspeed_really_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host, cores: str, ranks: int
) -> None:
    """Of most maps, ``test_binding_maps.py`` has what that is."""
    nodes = host.machine().numa_nodes
    hardware = [f"available: {len(nodes)} nodes (0-{len(nodes) - 1})"]
    hardware += [" ".join([f"node {node.id} cpus:", *map(str, node.cpus)]) for node in nodes]
    program = tmp_path / "numactl"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(hardware) + "\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    module = deepspeed_numa()
    # It asks the package manager, prints, and decides nothing.
    monkeypatch.setattr(module, "check_for_numactl_pkg", lambda: True)
    for rank in range(ranks):
        share, found = module.get_numactl_cmd(cores, ranks, rank)
        _, ours = _numactl_prefix(_numactl_nodes(nodes), parse_cpus(cores), ranks, rank)
        assert list(ours) == list(found)
        assert share == len(parse_cpus(cores)) // ranks
