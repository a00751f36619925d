"""Which cores and memory each rank gets on every kind of machine, and what DeepSpeed's launcher
would do there.

The maps are in ``tests/data/bindings.toml``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.machine import Machine, Software, parse_cpus
from so_tui.machine.host import cpu_ranges
from so_tui.plan.binding import (
    _numactl_nodes,
    _numactl_prefix,
    _split_cores,
    bind_ranks,
    core_list,
    deepspeed_text,
    uses_numactl,
)
from so_tui.plan.plan import RankBinding
from so_tui.spec.errors import InputError
from tests.support import sysroots as hosts

Bindings = tuple[RankBinding, ...]


def bind(machine: Machine, gpus: int | tuple[int, ...], fraction: float = 0.9) -> Bindings:
    return bind_ranks(machine, gpus, cpu_adam_cores_fraction=fraction)


def written(bindings: Bindings) -> list[str]:
    nodes = [",".join(map(str, one.memory_policy.nodes)) or "any" for one in bindings]
    places = [f"{one.gpu} @ {cpu_ranges(one.cpus)}" for one in bindings]
    return list(map(" / ".join, zip(places, nodes, strict=True)))


def cores(bindings: Bindings) -> list[str]:
    return [cpu_ranges(one.cpus) for one in bindings]


def by_itself(bindings: Bindings) -> list[str]:
    """Return what DeepSpeed's launcher does without our list of cores."""
    alone = [one.deepspeed_unlisted for one in bindings]
    return [deepspeed_text(binding) for binding in alone if binding is not None]


TABLES = tomllib.loads((hosts.DATA / "bindings.toml").read_text())


@pytest.mark.parametrize("case", TABLES["map"], ids=lambda case: f"{case['host']}-{case['gpus']}")
def test_every_map(case: dict[str, Any]) -> None:
    machine, gpus = hosts.HOSTS[case["host"]].machine(), case["gpus"]
    bindings = bind(machine, gpus)
    assert written(bindings) == case["right"]
    assert by_itself(bindings) == case["alone"]
    listed = parse_cpus(core_list(bindings))
    share = len(listed) // gpus
    for rank, one in enumerate(bindings):
        assert sorted(one.main_cpus + one.adam_cpus) == sorted(one.cpus)
        gpu = next(gpu for gpu in machine.gpus if gpu.index == one.gpu)
        assert set(one.cpus) <= set(gpu.cpus), "the cores of a rank are on its GPU's node"
        assert one.deepspeed.cpus == listed[share * rank : share * (rank + 1)]
        assert set(one.deepspeed.cpus) <= set(one.cpus)
        if case["host"] not in ("ONE_GH200_HBM_ONLY", "QUAD_GH200_HBM_ONLY", "FAKE_NUMA_8"):
            assert "-p" not in one.deepspeed.numactl
    all_cores = [cpu for one in bindings for cpu in one.cpus]
    assert len(set(all_cores)) == len(all_cores), "no two ranks share a core"


def job(machine: Machine, cpus: str, gpus: tuple[int, ...], **changes: object) -> Machine:
    """What a scheduler leaves of a node: its CPUs, and GPUs that the driver numbers from 0."""
    given = tuple(replace(machine.gpus[old], index=new) for new, old in enumerate(gpus))
    return replace(machine, allowed_cpus=parse_cpus(cpus), gpus=given, **changes)


@pytest.mark.parametrize("case", TABLES["job"], ids=lambda case: f"{case['host']}-{case['cpus']}")
def test_parts_of_a_node_that_jobs_have(case: dict[str, Any]) -> None:
    machine = job(hosts.HOSTS[case["host"]].machine(), case["cpus"], tuple(case["gpus"]))
    bindings = bind(machine, len(case["gpus"]))
    assert written(bindings) == case["right"]
    assert [deepspeed_text(one.deepspeed) for one in bindings] == case["listed"]
    assert any(text.startswith("fails: cores") for text in by_itself(bindings))


def test_each_rank_is_bound_to_its_apu() -> None:
    bindings = bind(hosts.QUAD_MI300A.machine(), 4, fraction=0.8)
    assert written(bindings) == [
        f"{n} @ {24 * n}-{24 * n + 23},{96 + 24 * n}-{119 + 24 * n} / {n}" for n in range(4)
    ]
    for one in bindings:  # both threads of a core stay together
        assert {cpu % 96 for cpu in one.main_cpus}.isdisjoint(cpu % 96 for cpu in one.adam_cpus)


def test_gpus_that_are_not_in_node_order() -> None:
    """DeepSpeed cannot express it: its slices ascend with the rank."""
    gpus = (("0009:01:00.0", 0x2348, 1), ("0019:01:00.0", 0x2348, 0))
    bindings = bind(dataclasses.replace(hosts.NVL2, gpus=gpus).machine(), 2)
    assert written(bindings) == ["0 @ 72-143 / 1", "1 @ 0-71 / 0"]
    assert not any(one.deepspeed.matches for one in bindings)


def test_gpus_of_unknown_node_are_spread() -> None:
    gpus = tuple((address, device, -1) for address, device, _ in hosts.EIGHT_H100.gpus[:3])
    bindings = bind(dataclasses.replace(hosts.EIGHT_H100, gpus=gpus).machine(), 3)
    assert [(one.numa_node, len(one.cpus)) for one in bindings] == [(0, 56), (0, 56), (1, 112)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (2, ["0-55,112-167", "56-111,168-223"]),
        (4, ["0-27,112-139", "28-55,140-167", "56-83,168-195", "84-111,196-223"]),
    ],
)
def test_ranks_without_gpus_are_spread(ranks: int, expected: list[str]) -> None:
    bindings = bind(dataclasses.replace(hosts.EIGHT_H100, gpus=()).machine(), ranks)
    assert cores(bindings) == expected
    assert all(one.gpu is None for one in bindings)


@pytest.mark.parametrize(
    ("cpus", "ranks"), [("0-1", 2), ("0-6", 2), ("0-1", 3), ("0", 4), ("0-8", 4)]
)
def test_shares_are_fair_and_everybody_gets_a_core(cpus: str, ranks: int) -> None:
    bindings = bind(hosts.Host(cpu={0: (cpus, 16384)}, grace=False).machine(), ranks)
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
        (16, 0.95, 3, 13),
        (7, 0.9, 1, 6),
        (4, 0.5, 2, 2),
        (1, 0.9, 1, 1),  # shared
    ],
)
def test_main_process_keeps_its_cores(count: int, fraction: float, main: int, adam: int) -> None:
    cpus = tuple(range(100, 100 + count))
    assert _split_cores(cpus, fraction) == (cpus[:main], cpus[count - adam :])


def test_other_modes_have_no_adam_worker() -> None:
    binding = bind(hosts.ONE_GH200.machine(), 1)[0].without_worker()
    assert binding.main_cpus == binding.cpus == tuple(range(72))
    assert binding.adam_cpus == ()


def test_without_numactl_the_launcher_binds_nothing() -> None:
    whole = bind(hosts.QUAD_GH200.machine(), 2)
    assert uses_numactl(whole)
    assert [" ".join(one.deepspeed.numactl) for one in whole] == [
        "numactl -m 0 -C 0-71",
        "numactl -m 1 -C 72-143",
    ]
    machine = replace(hosts.QUAD_GH200.machine(), software=Software(numactl_works=False))
    bindings = bind(machine, 2)
    assert not uses_numactl(bindings)
    assert all(one.deepspeed.numactl == () and not one.deepspeed.matches for one in bindings)
    assert written(bindings) == written(whole)


def test_memory_nodes_that_cannot_be_bound_to_are_left() -> None:
    """set_mempolicy fails for a node outside ``Mems_allowed`` and for one without memory: better no
    policy than a rank that does not start.
    """
    forbidden = job(hosts.QUAD_GH200.machine(), "0-143", (0, 1), allowed_memory_nodes=(0,))
    without = hosts.Host(cpu={0: ("0-71", 16384), 1: ("72-143", 0)}, grace=False).machine()
    for machine, first in ((forbidden, "bind"), (without, "default")):
        bindings = bind(machine, 2)
        assert cores(bindings) == ["0-71", "72-143"]
        assert [one.memory_policy.mode for one in bindings] == [first, "default"]
        assert not uses_numactl(bindings), "the launcher would end on node 1"


def test_gpus_split_by_mig_take_no_rank() -> None:
    two = hosts.NVL2.machine()
    half = replace(two, gpus=(replace(two.gpus[0], mig=True), two.gpus[1]))
    assert written(bind(half, 1)) == ["1 @ 72-143 / 1"], "a count takes whole GPUs"


def test_cpus_that_do_not_exist() -> None:
    with pytest.raises(InputError, match="allowed_cpus"):
        bind(replace(hosts.ONE_GH200.machine(), allowed_cpus=()), 1)


@pytest.fixture(scope="module")
def deepspeed_numa() -> ModuleType:
    """DeepSpeed's module without its package, whose import takes seconds."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        pytest.skip("deepspeed is not installed")
    path = Path(package.origin).parent / "utils" / "numa.py"
    spec = importlib.util.spec_from_file_location("deepspeed_numa", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # It asks the package manager, prints, and decides nothing.
    module.check_for_numactl_pkg = lambda: True  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(("host", "listed", "ranks"), TABLES["deepspeed"]["asked"])
def test_the_emulation_is_what_deepspeed_really_does(
    deepspeed_numa: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    listed: str,
    ranks: int,
) -> None:
    """Of most maps, the tables have what that is."""
    nodes = hosts.HOSTS[host].machine().numa_nodes
    hardware = [f"available: {len(nodes)} nodes (0-{len(nodes) - 1})"]
    hardware += [" ".join([f"node {node.id} cpus:", *map(str, node.cpus)]) for node in nodes]
    program = tmp_path / "numactl"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(hardware) + "\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    for rank in range(ranks):
        share, found = deepspeed_numa.get_numactl_cmd(listed, ranks, rank)
        _, ours = _numactl_prefix(_numactl_nodes(nodes), parse_cpus(listed), ranks, rank)
        assert list(ours) == list(found)
        assert share == len(parse_cpus(listed)) // ranks
