"""Machines of other kinds, read from generated trees."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.machine import Machine, inspect_machine
from so_tui.machine.host import _allowance_notes
from so_tui.machine.system_files import SystemFiles
from tests.support.problems import rejected
from tests.support.sysroots import (
    EIGHT_H100,
    GB200,
    GB200_CDMM,
    NVL2,
    ONE_GH200,
    ONE_GH200_CDMM,
    ONE_GH200_HBM_ONLY,
    ONE_GH200_MIG,
    QUAD_GH200,
    Host,
    build_sysroot,
    fake_numa,
)

MIB = 1 << 20


def kinds(machine: Machine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"cpu": [], "gpu-memory": [], "empty": []}
    for node in machine.numa_nodes:
        found[node.kind].append(node.id)
    return found


def places(machine: Machine) -> list[tuple[int | None, int | None]]:
    """(CPU node, own memory node) of each GPU."""
    return [(gpu.numa_node, gpu.memory_node) for gpu in machine.gpus]


def test_one_gh200(tmp_path: Path) -> None:
    machine = ONE_GH200.inspected(tmp_path)
    assert kinds(machine) == {"cpu": [0], "gpu-memory": [1], "empty": [2, 3, 4, 5, 6, 7, 8]}
    assert places(machine) == [(0, 1)]
    assert machine.cpu_name == "NVIDIA Grace (Neoverse V2)"
    assert machine.architecture == "aarch64"
    assert machine.host_memory_bytes == 490037 * MIB
    gpu = machine.gpus[0]
    assert (gpu.index, gpu.name, gpu.pci_bus_id, gpu.memory_total_bytes) == (
        0,
        "NVIDIA GH200",
        "0009:01:00.0",
        97280 * MIB,
    )
    assert gpu.cpus == tuple(range(72))


def test_quad_gh200(tmp_path: Path) -> None:
    machine = QUAD_GH200.inspected(tmp_path)
    assert kinds(machine)["cpu"] == [0, 1, 2, 3]
    assert kinds(machine)["gpu-memory"] == [4, 12, 20, 28]
    assert len(kinds(machine)["empty"]) == 28
    assert places(machine) == [(0, 4), (1, 12), (2, 20), (3, 28)]
    assert machine.host_memory_bytes == (119808 + 122688 + 122688 + 122624) * MIB
    assert machine.online_cpus == machine.allowed_cpus == tuple(range(288))


def test_gb200_gives_each_gpu_the_memory_near_its_own_cpu_node(tmp_path: Path) -> None:
    machine = GB200.inspected(tmp_path)
    assert kinds(machine)["cpu"] == [0, 1]
    assert kinds(machine)["gpu-memory"] == [2, 10, 18, 26]
    assert places(machine) == [(0, 2), (0, 10), (1, 18), (1, 26)]


def test_memory_nodes_follow_the_distances_and_not_the_pci_order(tmp_path: Path) -> None:
    swapped = dataclasses.replace(
        NVL2, gpus=(("0009:01:00.0", 0x2348, 1), ("0019:01:00.0", 0x2348, 0))
    )
    assert places(NVL2.inspected(tmp_path / "a")) == [(0, 2), (1, 10)]
    assert places(swapped.inspected(tmp_path / "b")) == [(1, 10), (0, 2)]


def test_memory_that_is_offline_goes_to_no_other_gpu(tmp_path: Path) -> None:
    host = dataclasses.replace(
        GB200,
        hbm={node: memory for node, memory in GB200.hbm.items() if node != 2},
        empty=(2, *GB200.empty),
    )
    assert places(host.inspected(tmp_path)) == [(0, None), (0, None), (1, 18), (1, 26)]


@pytest.mark.parametrize(
    ("host", "node"), [(ONE_GH200_CDMM, None), (ONE_GH200_HBM_ONLY, 1), (fake_numa(4), 4)]
)
def test_other_maps_of_one_gh200(tmp_path: Path, host: Host, node: int | None) -> None:
    machine = host.inspected(tmp_path / "one")
    assert places(machine) == [(0, node)]
    assert machine.gpus[0].memory_total_bytes == 97280 * MIB, (
        "the published size, if no node has it"
    )
    assert any("memory" in note for note in machine.notes) == (node is None)
    four = GB200_CDMM.inspected(tmp_path / "four")
    assert places(four) == [(0, None), (0, None), (1, None), (1, None)]


def test_memory_that_mig_cut_up_is_not_taken_for_the_whole_part(tmp_path: Path) -> None:
    assert [gpu.memory_total_bytes for gpu in ONE_GH200_MIG.inspected(tmp_path).gpus] == [None]


def test_x86_with_eight_gpus(tmp_path: Path) -> None:
    machine = EIGHT_H100.inspected(tmp_path)
    assert machine.architecture == "x86_64"
    assert machine.cpu_name == "Intel(R) Xeon(R) Platinum 8480+"
    assert places(machine) == [(0, None)] * 4 + [(1, None)] * 4
    assert machine.gpus[5].cpus == (*range(56, 112), *range(168, 224))
    assert machine.mpam.state == "off"


def test_memory_expanders_of_x86_are_nobodys_gpu_memory(tmp_path: Path) -> None:
    host = dataclasses.replace(EIGHT_H100, gpus=EIGHT_H100.gpus[:1], hbm={2: (262144, 0)})
    machine = host.inspected(tmp_path)
    assert kinds(machine)["gpu-memory"] == [2]
    assert places(machine) == [(0, None)]
    assert machine.host_memory_bytes == (1031000 + 1032000) * MIB


def test_gpu_without_a_node_is_on_the_only_cpu_node(tmp_path: Path) -> None:
    one = dataclasses.replace(
        EIGHT_H100, cpu={0: ("0-15", 131072)}, gpus=(("0000:18:00.0", 0x2335, -1),)
    )
    two = dataclasses.replace(EIGHT_H100, gpus=(("0000:18:00.0", 0x2335, -1),))
    assert places(one.inspected(tmp_path / "one")) == [(0, None)]
    assert one.inspected(tmp_path / "one").gpus[0].cpus == tuple(range(16))
    assert places(two.inspected(tmp_path / "two")) == [(None, None)]


@pytest.mark.parametrize(
    ("allowed", "said"),
    [(None, ""), ((0, 1, 2, 3, 4, 12, 20, 28), ""), ((0, 2), "0,2 of 0-3"), ((4,), "none of 0-3")],
)
def test_memory_out_of_reach(tmp_path: Path, allowed: tuple[int, ...] | None, said: str) -> None:
    machine = replace(QUAD_GH200.inspected(tmp_path), allowed_memory_nodes=allowed)
    notes = [note for note in _allowance_notes(SystemFiles(tmp_path), machine) if "Mems" in note]
    assert [said in note for note in notes] == ([True] if said else [])


def test_copied_tree_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = QUAD_GH200.inspected(tmp_path)
    assert not machine.live
    assert len(machine.gpus) == 4
    assert machine.hostname == "unknown"
    assert (
        machine.page_size_bytes,
        machine.shm_total_bytes,
        machine.shm_free_bytes,
        machine.memory_limit_bytes,
    ) == (None,) * 4
    assert all(
        getattr(machine.software, name) is None for name in machine.software.__struct_fields__
    )
    assert machine.mpam.state == "unknown"


def test_no_numa_directory_is_one_node(tmp_path: Path) -> None:
    root = build_sysroot(
        "/sys/devices/system/cpu/online\t0-3\\n\n/proc/meminfo\tMemTotal: 16777216 kB\\nMemFree: "
        "1048576 kB\\nCached: 2048 kB\\n\n"
        "/proc/sys/kernel/hostname\tsmall\\n",
        tmp_path,
    )
    machine = inspect_machine(root)
    assert machine.hostname == "small"
    assert [(node.id, node.kind, node.cpus) for node in machine.numa_nodes] == [
        (0, "cpu", (0, 1, 2, 3))
    ]
    assert machine.host_memory_bytes == 16 << 30
    assert machine.numa_nodes[0].file_cache_bytes == 2 * MIB


def test_total_that_includes_gpu_memory_is_noted(tmp_path: Path) -> None:
    host = dataclasses.replace(
        ONE_GH200, extra={"/proc/meminfo": f"MemTotal: {(490037 + 97280) * 1024} kB\n"}
    )
    machine = host.inspected(tmp_path)
    assert machine.host_memory_bytes == 490037 * MIB
    assert any("includes GPU memory" in note for note in machine.notes)


def test_lagging_node_accounting_is_corrected(
    tmp_path: Path,
) -> None:
    host = dataclasses.replace(
        EIGHT_H100,
        cpu={0: ("0-15", 9000)},
        gpus=(),
        extra={"/proc/meminfo": "MemTotal: 25165824 kB\nMemFree: 1024 kB\n"},
    )
    assert host.inspected(tmp_path).host_memory_bytes == 24 << 30


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with rejected("no-cpus", field="--sysroot"):
        inspect_machine(tmp_path)


MPAM_KERNEL = {
    "/proc/sys/kernel/osrelease": "6.11-adv\n",
    "/boot/config-6.11-adv": "CONFIG_ARM64_MPAM=y\n",
}
MPAM_TABLE = {"/sys/firmware/acpi/tables/MPAM": ""}


RESCTRL = {
    "/proc/mounts": "resctrl /sys/fs/resctrl resctrl rw 0 0\n",
    "/sys/fs/resctrl/info/MB/num_closids": "8\n",
}


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"/proc/filesystems": "nodev\tproc\n"}, "off"),
        ({**MPAM_TABLE, "/proc/filesystems": "nodev\tproc\n"}, "off"),
        (MPAM_KERNEL, "kernel"),
        ({"/proc/filesystems": "nodev\tresctrl\n"}, "kernel"),
        ({**MPAM_KERNEL, **MPAM_TABLE}, "firmware"),
        ({**MPAM_KERNEL, **MPAM_TABLE, "/proc/cmdline": "ro arm64.nompam"}, "off"),
        ({**MPAM_KERNEL, **RESCTRL}, "mounted"),
    ],
)
def test_mpam_states(tmp_path: Path, files: dict[str, str], state: str) -> None:
    machine = dataclasses.replace(ONE_GH200, extra=files).inspected(tmp_path)
    assert machine.mpam.state == state
    assert machine.mpam.evidence
