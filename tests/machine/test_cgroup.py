"""What a control group allows, in both versions of the interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.machine import host
from so_tui.machine.host import available_bytes
from so_tui.machine.system_files import SystemFiles
from tests.support.sysroots import build_files

V2 = {
    "/proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    "/sys/fs/cgroup/slurm/job_7/cpuset.cpus.effective": "0-15\n",
    "/sys/fs/cgroup/slurm/job_7/step_0/cpuset.cpus.effective": "8-11\n",
    "/sys/fs/cgroup/slurm/job_7/memory.max": "68719476736\n",
    "/sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
    "/sys/fs/cgroup/slurm/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/slurm/job_7/cpu.max": "250000 100000\n",
}
V1 = {
    "/proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n3:cpuset:/docker/a\n",
    "/sys/fs/cgroup/cpuset/docker/a/cpuset.cpus": "8-11\n",
    "/sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": "68719476736\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
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


def system_files(files: dict[str, str], folder: Path) -> SystemFiles:
    return SystemFiles(build_files(files, folder))


@pytest.mark.parametrize("files", [V2, V1, HIDDEN])
def test_limits(tmp_path: Path, files: dict[str, str]) -> None:
    found = system_files(files, tmp_path)
    assert host._cpuset(found) == {8, 9, 10, 11}
    assert host._memory_limit_bytes(found) == 64 << 30
    assert host.cpu_quota(found) == 2.5


@pytest.mark.parametrize(
    "files",
    [
        V2
        | {
            "/sys/fs/cgroup/slurm/job_7/memory.current": "68000000000\n",
            "/sys/fs/cgroup/slurm/job_7/memory.stat": "anon 1\nactive_file 20\ninactive_file 3\n",
        },
        V1
        | {
            "/sys/fs/cgroup/memory/docker/a/memory.usage_in_bytes": "68000000000\n",
            "/sys/fs/cgroup/memory/docker/a/memory.stat": (
                "active_file 9\ntotal_active_file 20\ntotal_inactive_file 3\n"
            ),
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": "99000000000\n",
        },
    ],
)
def test_memory_left_counts_the_file_cache(tmp_path: Path, files: dict[str, str]) -> None:
    found = system_files(files, tmp_path)
    assert available_bytes(found) == (64 << 30) - 68_000_000_000 + 23


def test_no_limits(tmp_path: Path) -> None:
    free = {
        "/proc/self/cgroup": "4:cpu:/\n0::/user\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/user/memory.max": "max\n",
    }
    for files in (free, {}):
        found = system_files(files, tmp_path / str(len(files)))
        assert (
            host._cpuset(found),
            host._memory_limit_bytes(found),
            host.cpu_quota(found),
        ) == (None, None, None)
