"""Doctor on processors, schedulers, GPUs in use, and leftovers of ended processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.machine import inspect_machine
from so_tui.machine.doctor import findings
from so_tui.machine.gpus import GpuHealth
from tests.support.doctor import GIB, INSTALLED, found, healthy, kinds, only
from tests.support.sysroots import (
    EIGHT_H200,
    NVL2,
    ONE_H200_GUEST,
    QUAD_GH200,
    QUAD_GH200_HBM_ONLY,
    Host,
    fake_numa,
)


def test_an_h200_guest_gives_no_alarm(tmp_path: Path) -> None:
    """A typical rented machine: sixteen cores, memory that grows, no swap, half of the memory in
    /dev/shm.
    """
    files = {
        "/proc/swaps": "Filename Type Size Used Priority\n",
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/proc/self/limits": "Max locked memory 8388608 8388608 bytes\n",
        "/proc/meminfo": "MemAvailable: 9000000 kB\n",
    }
    software = msgspec.structs.replace(INSTALLED, nvidia_driver="580.159", cuda_toolkit=None)
    machine = healthy(
        ONE_H200_GUEST,
        software=software,
        page_size_bytes=4096,
        shm_total_bytes=62 * GIB,
        shm_free_bytes=62 * GIB,
        memory_grows=True,
    )
    health = (
        GpuHealth(
            bus_id="0000:05:00.0",
            persistence=True,
            uncorrected_ecc_errors=0,
            compute_capability=(9, 0),
        ),
    )
    assert found(machine, files, tmp_path / "t", health=health) == ()


def test_a_task_mask_away_from_the_gpu() -> None:
    quad = healthy()
    machine = msgspec.structs.replace(quad, allowed_cpus=tuple(range(8)), gpus=quad.gpus[3:])
    finding = only(found(machine))
    assert (finding.code, "GPU 3" in finding.evidence, "216-287" in finding.evidence) == (
        "cores-far-from-gpu",
        True,
        True,
    )
    one_node = msgspec.structs.replace(
        quad, allowed_cpus=tuple(range(216, 288)), gpus=quad.gpus[3:]
    )
    assert found(one_node) == ()


def test_few_cores() -> None:
    machine = healthy(EIGHT_H200, allowed_cpus=tuple(range(16)))
    assert "few-cores" in [finding.code for finding in found(machine)]
    assert found(healthy(ONE_H200_GUEST)) == ()


HOPPER_NODES = "/proc/sys/kernel/numa_balancing"
FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq"


GROUP = {"/proc/self/cgroup": "0::/box\n"}


def governor(name: str, driver: str) -> dict[str, str]:
    return {f"{FREQUENCY}/scaling_governor": f"{name}\n", f"{FREQUENCY}/scaling_driver": driver}


@pytest.mark.parametrize(
    ("host", "files", "severity", "code"),
    [
        (QUAD_GH200, {HOPPER_NODES: "1\n"}, "warning", "numa-balancing"),
        (EIGHT_H200, {HOPPER_NODES: "1\n"}, "note", "numa-balancing"),
        (ONE_H200_GUEST, {HOPPER_NODES: "1\n"}, None, ""),
        (QUAD_GH200, governor("powersave", "cppc_cpufreq\n"), "warning", "slow-governor"),
        (EIGHT_H200, governor("powersave", "intel_pstate\n"), None, ""),
        (EIGHT_H200, {f"{FREQUENCY}/scaling_governor": "performance\n"}, None, ""),
        (NVL2, GROUP | {"/sys/fs/cgroup/box/cpu.max": "800000 100000\n"}, "warning", "cpu-quota"),
        (NVL2, GROUP | {"/sys/fs/cgroup/box/cpu.max": "max 100000\n"}, None, ""),
        (NVL2, GROUP | {"/sys/fs/cgroup/box/pids.max": "256\n"}, "warning", "process-limit"),
        (NVL2, GROUP | {"/sys/fs/cgroup/box/pids.max": "32768\n"}, None, ""),
    ],
)
def test_traps_of_kernel_settings(
    tmp_path: Path, host: Host, files: dict[str, str], severity: str | None, code: str
) -> None:
    results = found(healthy(host), files, tmp_path / "t")
    assert kinds(results) == ([(severity, code)] if severity else [])


def test_a_login_node(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "sbatch"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    machine = healthy()
    assert only(found(machine, environment={"PATH": str(command.parent)})).code == "login-node"
    assert found(machine, environment={"PATH": str(command.parent), "SLURM_JOB_ID": "12"}) == ()


def health_of(**changes: Any) -> GpuHealth:
    healthy_gpu = GpuHealth(bus_id="0009:01:00.0", persistence=True, compute_capability=(9, 0))
    return msgspec.structs.replace(healthy_gpu, **changes)


@pytest.mark.parametrize(
    ("health", "environment", "severity", "code"),
    [
        (health_of(uncorrected_ecc_errors=2), {}, "warning", "gpu-memory-errors"),
        (health_of(row_remap_pending=True), {}, "warning", "gpu-memory-errors"),
        (health_of(row_remap_failed=True), {}, "blocks", "gpu-memory-broken"),
        (health_of(persistence=False), {}, "note", "persistence-off"),
        (health_of(), {"TORCH_CUDA_ARCH_LIST": "8.0"}, "warning", "arch-list-without-gpu"),
        (health_of(compute_capability=(7, 0)), {}, "blocks", "gpu-without-bf16"),
        (health_of(compute_capability=(8, 0)), {}, None, ""),
        (health_of(), {"TORCH_CUDA_ARCH_LIST": "8.0+PTX"}, None, ""),
        (health_of(), {"TORCH_CUDA_ARCH_LIST": "8.0 9.0"}, None, ""),
        (health_of(uncorrected_ecc_errors=0, row_remap_pending=False), {}, None, ""),
        (health_of(bus_id="000a:01:00.0", row_remap_failed=True), {}, None, ""),
    ],
)
def test_traps_that_the_driver_reports(
    health: GpuHealth, environment: dict[str, str], severity: str | None, code: str
) -> None:
    results = found(healthy(), health=(health,), environment=environment)
    assert kinds(results) == ([(severity, code)] if severity else [])


def test_a_torch_too_old_for_the_gpu() -> None:
    machine = healthy(software=msgspec.structs.replace(INSTALLED, torch_cuda="12.6"))
    assert kinds(found(machine, health=(health_of(compute_capability=(10, 0)),))) == [
        ("blocks", "torch-too-old-for-gpu")
    ]
    assert found(machine, health=(health_of(),)) == ()


def test_gpus_in_use(tmp_path: Path) -> None:
    files = {
        "/proc/71/comm": "python3\n",
        "/proc/72/comm": "pt_main\n",
        "/proc/72/environ": "A=1\0SO_TUI_RUN=/runs/qwen-1\0",
    }
    machine = healthy()
    other = only(found(machine, files, tmp_path / "t", health=(health_of(pids=(71,)),)))
    assert (other.severity, other.code, "71 (python3)" in other.evidence) == (
        "warning",
        "gpu-busy",
        True,
    )
    ours = only(found(machine, files, tmp_path / "t", health=(health_of(pids=(72,)),)))
    assert (ours.severity, ours.code, "qwen-1" in ours.evidence) == ("note", "gpu-training", True)


SEGMENTS = {
    "/dev/shm/torch_4711_99_1": "x" * (40 << 20),
    "/dev/shm/sem.mp-abc": "x",
    "/dev/shm/mine.bin": "x" * (40 << 20),
}


def test_shared_memory_of_ended_processes(tmp_path: Path) -> None:
    machine = healthy()
    finding = only(found(machine, SEGMENTS, tmp_path / "t"))
    assert finding.code == "shm-left-behind"
    assert "torch_4711_99_1" in finding.evidence
    assert "rm /dev/shm/torch_4711_99_1`" in finding.remedy, (
        "only segments that no process has open"
    )
    mapped = {"/proc/5/maps": "7f00-7f01 rw-s 0 00:1 9    /dev/shm/torch_4711_99_1\n"}
    assert found(machine, {**SEGMENTS, **mapped}, tmp_path / "u") == ()
    spaced = {
        "/dev/shm/torch_4711_99_1 a b": "x" * (40 << 20),
        "/proc/5/maps": "7f00-7f01 rw-s 0 00:1 9    /dev/shm/torch_4711_99_1 a b\n",
    }
    assert found(machine, spaced, tmp_path / "v") == (), "a name may contain spaces"


def orphan(
    pid: int, environ: str = "", cmdline: str = "python\0", parent: int = 1, session: int = 49
) -> dict[str, str]:
    return {
        f"/proc/{pid}/stat": f"{pid} (a b) S {parent} 1 {session}\n",
        f"/proc/{pid}/environ": environ,
        f"/proc/{pid}/cmdline": cmdline,
    }


RANK = "LOCAL_RANK=0\0WORLD_SIZE=2\0MASTER_PORT=29500\0"
OURS = "SO_TUI_RUN=/runs/a\0"
LAUNCH = "python\0-m\0deepspeed.launcher.launch\0"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        (orphan(50, RANK), "orphaned-ranks"),
        (orphan(50, cmdline="python\0-u\0-m\0deepspeed.launcher.launch\0"), "orphaned-ranks"),
        (orphan(50, OURS + RANK), "orphaned-trainers"),
        (
            orphan(50, OURS, parent=49, session=48) | orphan(49, cmdline="adopter\0"),
            "orphaned-trainers",
        ),
        (orphan(50, OURS, parent=49) | orphan(49, cmdline="a script of one's own\0"), None),
        (
            orphan(50, OURS, parent=49)
            | orphan(49, cmdline="python\0so_tui\0supervise\0/runs/a\0"),
            None,
        ),
        (orphan(50, RANK, parent=49), None),
        (orphan(50, cmdline="sshd\0"), None),
        (orphan(50, cmdline=LAUNCH) | {"/proc/1/comm": "bash\n"}, None),
    ],
)
def test_processes_left_behind(tmp_path: Path, files: dict[str, str], code: str | None) -> None:
    results = found(healthy(), files, tmp_path / "t")
    assert kinds(results) == ([("warning", code)] if code else [])


def test_findings_agree_with_this_machine() -> None:
    """Findings about this machine, whatever it is, agree with its system files."""
    machine = inspect_machine()
    codes = {finding.code: finding for finding in findings(machine)}
    for finding in codes.values():
        assert all([finding.title, finding.evidence, finding.cost, finding.remedy])
    assert ("no-gpu" in codes) <= (machine.gpus == ())
    assert ("swap-on" in codes) <= (len(Path("/proc/swaps").read_text().splitlines()) > 1)
    assert ("few-cores" in codes) <= bool(machine.gpus)
    if left := codes.get("shm-left-behind"):
        for path in map(Path, left.remedy.split("`")[1].split()[1:]):
            assert not path.exists() or path.stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    ("host", "codes"),
    [
        (QUAD_GH200, []),
        (NVL2, []),
        (QUAD_GH200_HBM_ONLY, ["gpu-memory-taken-for-hbm"]),
        (fake_numa(4), ["fake-numa"]),
        (fake_numa(8), ["gpu-memory-taken-for-hbm", "fake-numa"]),
    ],
    ids=["quad", "nvl2", "only-hbm", "fake-4", "fake-8"],
)
def test_numa_maps_that_mislead_other_software_are_noted(host: Host, codes: list[str]) -> None:
    results = found(healthy(host))
    assert kinds(results) == [("note", code) for code in codes]
