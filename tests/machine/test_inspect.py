"""Machines of other kinds, read from generated trees: their parts, what a control group allows, and
what people read of them, which stands together within 80 columns.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import RenderableType

from so_tui.doctor import Finding
from so_tui.doctor.show import render_findings
from so_tui.machine import host, inspect_machine
from so_tui.machine.host import (
    _allowance_notes,
    available_bytes,
    contiguous_runs,
    cpu_ranges,
    cpus_or_empty,
    parse_cpus,
)
from so_tui.machine.show import render
from so_tui.machine.system_files import SystemFiles, read_network
from so_tui.spec import InputError
from tests.support import planning
from tests.support import sysroots as hosts
from tests.support.problems import rejected

MIB = 1 << 20
CROSSED = replace(hosts.NVL2, gpus=(("0009:01:00.0", 0x2348, 1), ("0019:01:00.0", 0x2348, 0)))
FIRST_OFFLINE = replace(
    hosts.GB200,
    hbm={node: memory for node, memory in hosts.GB200.hbm.items() if node != 2},
    empty=(2, *hosts.GB200.empty),
)
EXPANDED = replace(hosts.EIGHT_H100, gpus=hosts.EIGHT_H100.gpus[:1], hbm={2: (262144, 0)})
NOWHERE = replace(hosts.EIGHT_H100, gpus=(("0000:18:00.0", 0x2335, -1),))


@pytest.mark.parametrize(
    ("host", "gpu_memory", "places"),
    [
        (hosts.ONE_GH200, [1], [(0, 1)]),
        (hosts.ONE_GH200_CDMM, [], [(0, None)]),
        (hosts.ONE_GH200_HBM_ONLY, [1], [(0, 1)]),
        (hosts.fake_numa(4), [4], [(0, 4)]),
        (hosts.QUAD_GH200, [4, 12, 20, 28], [(0, 4), (1, 12), (2, 20), (3, 28)]),
        (hosts.GB200, [2, 10, 18, 26], [(0, 2), (0, 10), (1, 18), (1, 26)]),
        (hosts.GB200_CDMM, [], [(0, None), (0, None), (1, None), (1, None)]),
        # Memory that is offline goes to no other GPU.
        (FIRST_OFFLINE, [10, 18, 26], [(0, None), (0, None), (1, 18), (1, 26)]),
        # Memory nodes follow the distances, and not the order of the bus.
        (hosts.NVL2, [2, 10], [(0, 2), (1, 10)]),
        (CROSSED, [2, 10], [(1, 10), (0, 2)]),
        (hosts.EIGHT_H100, [], [(0, None)] * 4 + [(1, None)] * 4),
        (EXPANDED, [2], [(0, None)]),  # memory expanders of x86 are nobody's GPU memory
        (NOWHERE, [], [(None, None)]),
        (replace(NOWHERE, cpu={0: ("0-15", 131072)}), [], [(0, None)]),  # the only CPU node
    ],
)
def test_gpus_and_their_memory_have_nodes(
    host: hosts.Host, gpu_memory: list[int], places: list[tuple[int | None, int | None]]
) -> None:
    machine = host.machine()
    kinds = {node.id: node.kind for node in machine.numa_nodes}
    assert [node for node, kind in kinds.items() if kind == "cpu"] == list(host.cpu)
    assert [node for node, kind in kinds.items() if kind == "gpu-memory"] == gpu_memory
    assert [(gpu.numa_node, gpu.memory_node) for gpu in machine.gpus] == places
    assert machine.host_memory_bytes == sum(mib for _, mib in host.cpu.values()) * MIB


def test_facts_of_a_superchip() -> None:
    for superchip in (hosts.ONE_GH200, hosts.ONE_GH200_CDMM):
        machine = superchip.machine()
        assert machine.cpu_name == "NVIDIA Grace (Neoverse V2)"
        assert machine.architecture == "aarch64"
        (gpu,) = machine.gpus
        assert (gpu.index, gpu.name, gpu.pci_bus_id) == (0, "NVIDIA GH200", "0009:01:00.0")
        # The published size, if no node has it.
        assert gpu.memory_total_bytes == 97280 * MIB
        assert gpu.cpus == machine.online_cpus == machine.allowed_cpus == tuple(range(72))
        assert any("memory" in note for note in machine.notes) == (
            superchip is hosts.ONE_GH200_CDMM
        )
    (cut_up,) = hosts.ONE_GH200_MIG.machine().gpus
    assert cut_up.memory_total_bytes is None


@pytest.mark.parametrize(
    ("allowed", "said"),
    [(None, ""), ((0, 1, 2, 3, 4, 12, 20, 28), ""), ((0, 2), "0,2 of 0-3"), ((4,), "none of 0-3")],
)
def test_memory_out_of_reach(tmp_path: Path, allowed: tuple[int, ...] | None, said: str) -> None:
    machine = msgspec.structs.replace(hosts.QUAD_GH200.machine(), allowed_memory_nodes=allowed)
    notes = [note for note in _allowance_notes(SystemFiles(tmp_path), machine) if "Mems" in note]
    assert [said in note for note in notes] == ([True] if said else [])


def test_copied_tree_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = hosts.QUAD_GH200.inspected(tmp_path)
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
    machine = inspect_machine(hosts.build_files(files, tmp_path))
    assert machine.hostname == "small"
    (node,) = machine.numa_nodes
    assert (node.id, node.kind, node.cpus) == (0, "cpu", (0, 1, 2, 3))
    assert machine.host_memory_bytes == 16 << 30
    assert node.file_cache_bytes == 2 * MIB


@pytest.mark.parametrize("digits", ["9" * 20, "9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_numbers_that_no_kernel_writes_are_left_out(tmp_path: Path, digits: str) -> None:
    node = "/sys/devices/system/node/node0"
    files = {
        "/sys/devices/system/cpu/online": "0-3\n",
        "/proc/meminfo": f"MemTotal: {digits} kB\nMemFree: 1048576 kB\n",
        "/proc/cpuinfo": f"processor : {digits}\n",
        f"{node}/meminfo": f"Node 0 MemTotal: {digits} kB\nNode 0 MemFree: 1024 kB\n",
        f"{node}/cpulist": "0-3\n",
        f"{node}/distance": f"10 {digits}\n",
        "/proc/self/cgroup": "0::/job\n",
        "/sys/fs/cgroup/job/cpu.max": f"{digits} 100000\n",
        "/sys/fs/cgroup/job/memory.max": digits,
        "/sys/fs/cgroup/job/memory.current": "4096",
        "/sys/fs/cgroup/job/memory.stat": f"active_file {digits}\n",
        "/sys/devices/system/node/node\N{SUPERSCRIPT TWO}/cpulist": "0",
    }
    machine = inspect_machine(hosts.build_files(files, tmp_path))
    assert msgspec.json.encode(machine)
    assert machine.online_cpus == (0, 1, 2, 3)


def test_totals_that_disagree_with_the_nodes() -> None:
    """One that includes GPU memory is noted; nodes whose accounting lags are corrected."""
    both = f"MemTotal: {(490037 + 97280) * 1024} kB\n"
    machine = replace(hosts.ONE_GH200, extra={"/proc/meminfo": both}).machine()
    assert machine.host_memory_bytes == 490037 * MIB
    assert any("includes GPU memory" in note for note in machine.notes)
    grown = {"/proc/meminfo": "MemTotal: 25165824 kB\nMemFree: 1024 kB\n"}
    guest = hosts.Host(cpu={0: ("0-15", 9000)}, grace=False, extra=grown)
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
    mpam = replace(hosts.ONE_GH200, extra=files).machine().mpam
    assert mpam.state == state
    assert mpam.evidence


def shown(renderable: RenderableType) -> str:
    text = planning.shown(renderable, 80)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    return text


def test_gpus_are_below_their_node_with_their_own_memory() -> None:
    lines = [line.strip("│├└─ ") for line in shown(render(hosts.GB200.machine())).splitlines()]
    order = [line.split("  ")[0] for line in lines if line.startswith(("node", "GPU"))]
    first = ["node 0", "GPU 0", "node 2", "GPU 1", "node 10"]
    assert order == [*first, "node 1", "GPU 2", "node 18", "GPU 3", "node 26"]
    assert any("28 empty nodes" in line for line in lines)


def test_facts_of_a_machine() -> None:
    text = shown(render(hosts.QUAD_GH200.machine()))
    assert all(fact in text for fact in ("288 cores", "72 cores 72-143", "0039:01:00.0"))
    less = msgspec.structs.replace(hosts.EIGHT_H100.machine(), allowed_cpus=tuple(range(8)))
    text = shown(render(less))
    assert "may use 0-7" in text
    assert "may use none" in text


def test_findings() -> None:
    texts = {"evidence": "torch 2.13+cpu", "cost": "No GPU.", "remedy": "`pip install torch`"}
    title = "Torch is built for the CPU only"
    finding = Finding(code="torch-cpu-only", severity="blocks", title=title, **texts)
    text = shown(render_findings([finding], None))
    assert f"✗ blocks a launch  {title}" in text
    assert all(part in text for part in texts.values())
    assert "✓" in shown(render_findings([], None))


FILES = tomllib.loads((hosts.DATA / "system_files.toml").read_text())


def system_files(files: dict[str, str], folder: Path) -> SystemFiles:
    return SystemFiles(hosts.build_files(files, folder))


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("\n", ()), ("7", (7,)), ("4,2-3", (2, 3, 4))]
)
def test_kernel_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(cpu_ranges(cpus)) == cpus
    assert contiguous_runs([5, 1, 2]) == ((1, 2), (5,))


@pytest.mark.parametrize("text", ["1-x", "65536", "0-70000", "3,70000-70001"])
def test_other_text_and_numbers_beyond_any_cpu_are_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|beyond any CPU"):
        parse_cpus(text)
    assert cpus_or_empty(text) == ()


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("v2", (64 << 30, 2.5)),
        ("v1", (64 << 30, 2.5)),
        ("hidden", (64 << 30, 2.5)),
        ("free", (None, None)),
        ("none", (None, None)),
    ],
)
def test_limits(tmp_path: Path, name: str, limits: tuple[object, ...]) -> None:
    found = system_files(FILES["cgroup"][name], tmp_path)
    assert (host._memory_limit_bytes(found), host.cpu_quota(found)) == limits
    if name in ("v1", "v2"):  # less what is used, and the file cache does not count
        assert available_bytes(found) == (64 << 30) - 68_000_000_000 + 23


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("infiniband", (600, "mlx5_0:1, mlx5_1:1")),
        ("slingshot", (400, "hsn0, hsn1")),
        ("none", None),
        ("ethernet", None),
        ("no-number", None),
    ],
)
def test_network_adapters_that_are_up_add_up(
    name: str, network: tuple[float, str] | None, tmp_path: Path
) -> None:
    found = read_network(system_files(FILES["network"][name], tmp_path))
    assert (found and (found.gbit_per_s, found.source)) == network


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 400, "-" + "9" * 400, "\u00b2"])
def test_no_number_in_a_foreign_tree_ends_inspection(number: str, tmp_path: Path) -> None:
    root = hosts.build_sysroot(hosts.ONE_GH200.listing(), tmp_path)
    nodes = root / "sys/devices/system/node"
    (nodes / f"node{number[:200]}").mkdir()
    names = ("meminfo", "distance", "cpulist")
    (root / "proc").mkdir(exist_ok=True)
    (whole := root / "proc/meminfo").write_text("MemTotal: 1024 kB\n")
    for path in (whole, *(nodes / "node0" / name for name in names)):
        known = path.read_text()
        for hostile in (f"{number} {number}\n", re.sub(r"\d+", number, known)):
            path.write_text(hostile)
            with suppress(InputError):  # such as one of a tree without CPUs
                render(inspect_machine(root))
        path.write_text(known)
