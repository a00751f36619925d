"""AMD's APUs, read from generated trees: four MI300A, whole and partitioned, and topologies that
nobody should trust.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from so_tui.doctor import findings
from so_tui.machine import inspect_machine
from so_tui.machine.gpus import hiding_variable, visible_gpus
from so_tui.plan.resources import resources_of
from tests.support import sysroots as hosts

MIB = 1 << 20
SIZES = [mib for _, mib in hosts.QUAD_MI300A.cpu.values()]


def test_four_apus() -> None:
    machine = hosts.QUAD_MI300A.machine()
    assert machine.cpu_name == "AMD Instinct MI300A Accelerator"
    assert [node.kind for node in machine.numa_nodes] == ["cpu"] * 4
    for index, gpu in enumerate(machine.gpus):
        assert (gpu.index, gpu.name, gpu.vendor) == (index, "AMD Instinct MI300A", "amd")
        assert (gpu.numa_node, gpu.memory_node) == (index, index)
        assert (gpu.shares_memory, gpu.mig) == (True, False)
        assert gpu.memory_total_bytes == SIZES[index] * MIB
    assert machine.gpus[0].uuid == "GPU-6cdb410c2f219ac0"
    assert machine.host_memory_bytes == sum(SIZES) * MIB  # once, not once more for the GPUs
    assert not any(gpu.shares_memory for gpu in hosts.QUAD_GH200.machine().gpus)


def test_partitions_are_seen_and_not_used(tmp_path: Path) -> None:
    root = hosts.build_sysroot(hosts.QUAD_MI300A.listing(), tmp_path)
    machine = inspect_machine(hosts.build_files(hosts.apu_files(4, partitions=6), root))
    assert [gpu.pci_bus_id for gpu in machine.gpus] == [f"000{n}:02:00.0" for n in range(4)]
    assert all(gpu.mig for gpu in machine.gpus)
    assert "partitioned" in {finding.code for finding in findings(machine)}
    problem = resources_of(machine, 1, 0.8).problem
    assert problem
    assert "0 GPUs; GPU 0-3 is split by MIG or into compute partitions" in problem.message


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    return hosts.build_sysroot(hosts.QUAD_MI300A.listing(), tmp_path) / hosts.NODES.lstrip("/")


def test_a_gpu_whose_properties_may_not_be_read_is_left_out(tmp_path: Path, nodes: Path) -> None:
    """As for a job that was given three of four: the kernel refuses to say anything of the other,
    and ROCm counts without it.
    """
    (nodes / "5" / "properties").write_text("")
    found = [(gpu.index, gpu.pci_bus_id) for gpu in inspect_machine(tmp_path).gpus]
    assert found == [(0, "0000:02:00.0"), (1, "0002:02:00.0"), (2, "0003:02:00.0")]


@pytest.mark.parametrize(
    "content",
    [
        "node_to 0\nweight 99999999999999999999999999\n",
        "node_to 4\nweight 13\n",  # a link to itself is none to a CPU
    ],
)
def test_gpu_without_a_link_shares_no_memory(tmp_path: Path, nodes: Path, content: str) -> None:
    (nodes / "4/io_links/0/properties").write_text(content)
    machine = inspect_machine(tmp_path)
    assert [gpu.shares_memory for gpu in machine.gpus] == [False, True, True, True]
    assert machine.gpus[0].memory_total_bytes is None
    assert machine.gpus[0].numa_node == 0  # from the PCI bus


def test_pipes_and_odd_names_are_passed_by(tmp_path: Path, nodes: Path) -> None:
    for odd in ("x", "٤", "999999999999", "-1", "08", "9"):
        (nodes / odd).mkdir()
    (nodes / "5" / "properties").unlink()
    for name in ("x", "9", "5"):
        os.mkfifo(nodes / name / "properties")
    assert [gpu.numa_node for gpu in inspect_machine(tmp_path).gpus] == [0, 2, 3]


@pytest.mark.parametrize(
    ("environment", "variable", "shown"),
    [
        ({}, None, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES", [1]),
        ({"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}, "ROCR_VISIBLE_DEVICES", [2]),
        ({"HIP_VISIBLE_DEVICES": "0"}, "HIP_VISIBLE_DEVICES", [0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-6cdb410c2f219ac0"}, "ROCR_VISIBLE_DEVICES", [0]),
    ],
)
def test_what_schedulers_hide(
    environment: dict[str, str], variable: str | None, shown: list[int] | None
) -> None:
    apus = hosts.QUAD_MI300A.machine().gpus
    assert hiding_variable(apus, environment) == variable
    if variable is not None:
        assert [gpu.index for gpu in visible_gpus(apus, environment[variable])] == shown
    assert hiding_variable(hosts.QUAD_GH200.machine().gpus, {"ROCR_VISIBLE_DEVICES": "0"}) is None
