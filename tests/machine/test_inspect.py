"""Machines of other kinds, read from generated trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from so_tui.machine import inspect_machine
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
    build_files,
    fake_numa,
)

MIB = 1 << 20
CROSSED = replace(NVL2, gpus=(("0009:01:00.0", 0x2348, 1), ("0019:01:00.0", 0x2348, 0)))
FIRST_OFFLINE = replace(
    GB200,
    hbm={node: memory for node, memory in GB200.hbm.items() if node != 2},
    empty=(2, *GB200.empty),
)
EXPANDED = replace(EIGHT_H100, gpus=EIGHT_H100.gpus[:1], hbm={2: (262144, 0)})
NOWHERE = replace(EIGHT_H100, gpus=(("0000:18:00.0", 0x2335, -1),))


@pytest.mark.parametrize(
    ("host", "gpu_memory", "places"),
    [
        (ONE_GH200, [1], [(0, 1)]),
        (ONE_GH200_CDMM, [], [(0, None)]),
        (ONE_GH200_HBM_ONLY, [1], [(0, 1)]),
        (fake_numa(4), [4], [(0, 4)]),
        (QUAD_GH200, [4, 12, 20, 28], [(0, 4), (1, 12), (2, 20), (3, 28)]),
        (GB200, [2, 10, 18, 26], [(0, 2), (0, 10), (1, 18), (1, 26)]),
        (GB200_CDMM, [], [(0, None), (0, None), (1, None), (1, None)]),
        # Memory that is offline goes to no other GPU.
        (FIRST_OFFLINE, [10, 18, 26], [(0, None), (0, None), (1, 18), (1, 26)]),
        # Memory nodes follow the distances, and not the order of the bus.
        (NVL2, [2, 10], [(0, 2), (1, 10)]),
        (CROSSED, [2, 10], [(1, 10), (0, 2)]),
        (EIGHT_H100, [], [(0, None)] * 4 + [(1, None)] * 4),
        (EXPANDED, [2], [(0, None)]),  # memory expanders of x86 are nobody's GPU memory
        (NOWHERE, [], [(None, None)]),
        (replace(NOWHERE, cpu={0: ("0-15", 131072)}), [], [(0, None)]),  # the only CPU node
    ],
)
def test_gpus_and_their_memory_have_nodes(
    host: Host, gpu_memory: list[int], places: list[tuple[int | None, int | None]]
) -> None:
    machine = host.machine()
    kinds = {node.id: node.kind for node in machine.numa_nodes}
    assert [node for node, kind in kinds.items() if kind == "cpu"] == list(host.cpu)
    assert [node for node, kind in kinds.items() if kind == "gpu-memory"] == gpu_memory
    assert [(gpu.numa_node, gpu.memory_node) for gpu in machine.gpus] == places
    assert machine.host_memory_bytes == sum(mib for _, mib in host.cpu.values()) * MIB


def test_facts_of_a_superchip() -> None:
    for host in (ONE_GH200, ONE_GH200_CDMM):
        machine = host.machine()
        assert machine.cpu_name == "NVIDIA Grace (Neoverse V2)"
        assert machine.architecture == "aarch64"
        (gpu,) = machine.gpus
        assert (gpu.index, gpu.name, gpu.pci_bus_id) == (0, "NVIDIA GH200", "0009:01:00.0")
        # The published size, if no node has it.
        assert gpu.memory_total_bytes == 97280 * MIB
        assert gpu.cpus == machine.online_cpus == machine.allowed_cpus == tuple(range(72))
        assert any("memory" in note for note in machine.notes) == (host is ONE_GH200_CDMM)
    (cut_up,) = ONE_GH200_MIG.machine().gpus
    assert cut_up.memory_total_bytes is None


def test_facts_of_x86() -> None:
    machine = EIGHT_H100.machine()
    assert machine.architecture == "x86_64"
    assert machine.cpu_name == "Intel(R) Xeon(R) Platinum 8480+"
    assert machine.gpus[5].cpus == (*range(56, 112), *range(168, 224))
    assert machine.mpam.state == "off"


@pytest.mark.parametrize(
    ("allowed", "said"),
    [(None, ""), ((0, 1, 2, 3, 4, 12, 20, 28), ""), ((0, 2), "0,2 of 0-3"), ((4,), "none of 0-3")],
)
def test_memory_out_of_reach(tmp_path: Path, allowed: tuple[int, ...] | None, said: str) -> None:
    machine = msgspec.structs.replace(QUAD_GH200.machine(), allowed_memory_nodes=allowed)
    notes = [note for note in _allowance_notes(SystemFiles(tmp_path), machine) if "Mems" in note]
    assert [said in note for note in notes] == ([True] if said else [])


def test_copied_tree_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = QUAD_GH200.inspected(tmp_path)
    assert not machine.live
    assert len(machine.gpus) == 4
    assert machine.hostname == "unknown"
    assert {machine.page_size_bytes, machine.shm_total_bytes, machine.shm_free_bytes} == {None}
    assert machine.memory_limit_bytes is None
    assert set(msgspec.structs.astuple(machine.software)) == {None}
    assert machine.mpam.state == "unknown"


def test_no_numa_directory_is_one_node(tmp_path: Path) -> None:
    files = {
        "/sys/devices/system/cpu/online": "0-3\n",
        "/proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nCached: 2048 kB\n",
        "/proc/sys/kernel/hostname": "small\n",
    }
    machine = inspect_machine(build_files(files, tmp_path))
    assert machine.hostname == "small"
    (node,) = machine.numa_nodes
    assert (node.id, node.kind, node.cpus) == (0, "cpu", (0, 1, 2, 3))
    assert machine.host_memory_bytes == 16 << 30
    assert node.file_cache_bytes == 2 * MIB


def test_totals_that_disagree_with_the_nodes() -> None:
    """One that includes GPU memory is noted; nodes whose accounting lags are corrected."""
    both = f"MemTotal: {(490037 + 97280) * 1024} kB\n"
    machine = replace(ONE_GH200, extra={"/proc/meminfo": both}).machine()
    assert machine.host_memory_bytes == 490037 * MIB
    assert any("includes GPU memory" in note for note in machine.notes)
    grown = {"/proc/meminfo": "MemTotal: 25165824 kB\nMemFree: 1024 kB\n"}
    guest = Host(cpu={0: ("0-15", 9000)}, grace=False, extra=grown)
    assert guest.machine().host_memory_bytes == 24 << 30


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with rejected("no-cpus", field="--sysroot"):
        inspect_machine(tmp_path)


KERNEL = {
    "/proc/sys/kernel/osrelease": "6.11-adv\n",
    "/boot/config-6.11-adv": "CONFIG_ARM64_MPAM=y\n",
}
TABLE = {"/sys/firmware/acpi/tables/MPAM": ""}
RESCTRL = {
    "/proc/mounts": "resctrl /sys/fs/resctrl resctrl rw 0 0\n",
    "/sys/fs/resctrl/info/MB/num_closids": "8\n",
}


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"/proc/filesystems": "nodev\tproc\n"}, "off"),
        ({**TABLE, "/proc/filesystems": "nodev\tproc\n"}, "off"),
        (KERNEL, "kernel"),
        ({"/proc/filesystems": "nodev\tresctrl\n"}, "kernel"),
        ({**KERNEL, **TABLE}, "firmware"),
        ({**KERNEL, **TABLE, "/proc/cmdline": "ro arm64.nompam"}, "off"),
        ({**KERNEL, **RESCTRL}, "mounted"),
    ],
)
def test_mpam_states(files: dict[str, str], state: str) -> None:
    mpam = replace(ONE_GH200, extra=files).machine().mpam
    assert mpam.state == state
    assert mpam.evidence
