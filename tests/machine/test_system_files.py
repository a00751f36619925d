"""Lists of CPUs, what a control group allows in both versions of the interface, and adapters of a
cluster's network.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.machine import host
from so_tui.machine.host import (
    available_bytes,
    contiguous_runs,
    cpu_ranges,
    cpus_or_empty,
    parse_cpus,
)
from so_tui.machine.system_files import SystemFiles, read_network
from tests.support.sysroots import build_files


def system_files(files: dict[str, str], folder: Path) -> SystemFiles:
    return SystemFiles(build_files(files, folder))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", (0, 1, 2, 3, 8)), ("\n", ()), ("7", (7,)), ("4,2-3", (2, 3, 4))],
)
def test_kernel_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(cpu_ranges(cpus)) == cpus


def test_ranges() -> None:
    assert cpu_ranges([3, 1, 2, 9]) == "1-3,9"
    assert contiguous_runs([5, 1, 2]) == ((1, 2), (5,))


@pytest.mark.parametrize("text", ["1-x", "65536", "0-70000", "3,70000-70001"])
def test_other_text_and_numbers_beyond_any_cpu_are_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|beyond any CPU"):
        parse_cpus(text)
    assert cpus_or_empty(text) == ()


V2 = {
    "/proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    "/sys/fs/cgroup/slurm/job_7/cpuset.cpus.effective": "0-15\n",
    "/sys/fs/cgroup/slurm/job_7/step_0/cpuset.cpus.effective": "8-11\n",
    "/sys/fs/cgroup/slurm/job_7/memory.max": "68719476736\n",
    "/sys/fs/cgroup/slurm/job_7/memory.current": "68000000000\n",
    "/sys/fs/cgroup/slurm/job_7/memory.stat": "anon 1\nactive_file 20\ninactive_file 3\n",
    "/sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
    "/sys/fs/cgroup/slurm/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/slurm/job_7/cpu.max": "250000 100000\n",
}
STAT = "active_file 9\ntotal_active_file 20\ntotal_inactive_file 3\n"
V1 = {
    "/proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n3:cpuset:/docker/a\n",
    "/sys/fs/cgroup/cpuset/docker/a/cpuset.cpus": "8-11\n",
    "/sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": "68719476736\n",
    "/sys/fs/cgroup/memory/docker/a/memory.usage_in_bytes": "68000000000\n",
    "/sys/fs/cgroup/memory/docker/a/memory.stat": STAT,
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "99000000000\n",
    "/sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "250000\n",
    "/sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
}
HIDDEN = {
    # Inside a container the group's own path does not exist below the mount; its root is the
    # container's group.
    "/proc/self/cgroup": "0::/../../elsewhere\n",
    "/sys/fs/cgroup/cpuset.cpus.effective": "8-11\n",
    "/sys/fs/cgroup/memory.max": "68719476736\n",
    "/sys/fs/cgroup/cpu.max": "250000 100000\n",
}
FREE = {
    "/proc/self/cgroup": "4:cpu:/\n0::/user\n",
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "/sys/fs/cgroup/user/memory.max": "max\n",
}


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        (V2, ({8, 9, 10, 11}, 64 << 30, 2.5)),
        (V1, ({8, 9, 10, 11}, 64 << 30, 2.5)),
        (HIDDEN, ({8, 9, 10, 11}, 64 << 30, 2.5)),
        (FREE, (None, None, None)),
        ({}, (None, None, None)),
    ],
)
def test_limits(tmp_path: Path, files: dict[str, str], limits: tuple[object, ...]) -> None:
    found = system_files(files, tmp_path)
    assert (host._cpuset(found), host._memory_limit_bytes(found), host.cpu_quota(found)) == limits


@pytest.mark.parametrize("files", [V2, V1])
def test_memory_left_counts_the_file_cache(tmp_path: Path, files: dict[str, str]) -> None:
    found = system_files(files, tmp_path)
    assert available_bytes(found) == (64 << 30) - 68_000_000_000 + 23


def port(
    adapter: str, rate: str, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> dict[str, str]:
    folder = f"/sys/class/infiniband/{adapter}/ports/1"
    return {f"{folder}/rate": rate, f"{folder}/state": state, f"{folder}/link_layer": layer}


def adapter(name: str, speed: str) -> dict[str, str]:
    return {f"/sys/class/net/{name}/speed": speed}


PORTS = port("mlx5_0", "200 Gb/sec (4X HDR)") | port("mlx5_1", "400 Gb/sec (4X NDR)")
PORTS |= port("mlx5_2", "400 Gb/sec (4X NDR)", "1: DOWN")
PORTS |= port("mlx5_3", "100 Gb/sec (4X EDR)", layer="Ethernet")
SLINGSHOT = adapter("hsn0", "200000") | adapter("hsn1", "200000")
SLINGSHOT |= adapter("eth0", "25000") | adapter("hsn4", "-1")


@pytest.mark.parametrize(
    ("files", "network"),
    [
        (PORTS, (600, "mlx5_0:1, mlx5_1:1")),
        (SLINGSHOT, (400, "hsn0, hsn1")),
        ({}, None),
        (adapter("eth0", "100000"), None),
        (adapter("hsn0", "fast"), None),
        (port("mlx5_0", "much"), None),
    ],
)
def test_network_adapters_that_are_up_add_up(
    files: dict[str, str], network: tuple[float, str] | None, tmp_path: Path
) -> None:
    found = read_network(system_files(files, tmp_path))
    assert (found and (found.gbit_per_s, found.source)) == network
