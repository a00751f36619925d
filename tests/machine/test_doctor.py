"""Doctor finds each trap on a machine that has it, and nothing on a healthy machine."""

from __future__ import annotations

import dataclasses
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.machine import Mpam, inspect_machine
from so_tui.machine.doctor import findings
from tests.support.doctor import (
    GIB,
    INSTALLED,
    Needs,
    found,
    healthy,
    kinds,
    only,
    with_gpu,
    with_software,
)
from tests.support.sysroots import (
    EIGHT_H100,
    ONE_GH200,
    ONE_GH200_CDMM,
    QUAD_GH200,
    Host,
    build_sysroot,
)
from tests.support.waiting import LIMIT_S


def test_a_healthy_machine_gives_no_alarm(tmp_path: Path) -> None:
    assert found(healthy(), {}, tmp_path / "t") == ()
    assert found(healthy(EIGHT_H100), {}, tmp_path / "u") == ()


def test_a_plain_machine_without_gpu_gives_a_note_and_no_blocker(tmp_path: Path) -> None:
    plain = healthy(
        Host(cpu={0: ("0-7", 32768)}, grace=False),
        software=msgspec.structs.replace(INSTALLED, torch_cuda=None),
    )
    busy = {
        "/proc/swaps": "Filename Type Size Used Priority\n/swap file 8388604 0 -2\n",
        "/proc/self/limits": "Max locked memory 65536 65536 bytes\n",
    }
    finding = only(found(plain, busy, tmp_path / "t"))
    assert (finding.severity, finding.code) == ("note", "no-gpu")


def test_a_snapshot_is_checked_without_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    assert findings(QUAD_GH200.machine()) == ()


CHANGES: list[tuple[str, dict[str, Any], str, str]] = [
    ("gpu", {"compute_mode": "Exclusive_Process"}, "warning", "compute-exclusive"),
    ("gpu", {"compute_mode": "Prohibited"}, "blocks", "compute-prohibited"),
    ("gpu", {"mig": True}, "warning", "mig-enabled"),
    ("gpu", {"vendor": "amd"}, "blocks", "amd-gpus"),
    ("software", {"torch_cuda": None, "torch": "2.13.0+cpu"}, "blocks", "torch-cpu-only"),
    ("software", {"deepspeed": None}, "blocks", "missing-packages"),
    ("software", {"deepspeed": "0.18.0"}, "blocks", "untested-deepspeed"),
    ("software", {"transformers": "4.56.1"}, "warning", "version-too-old"),
    ("software", {"torch": "9.0.0"}, "warning", "version-too-new"),
    ("software", {"transformers": "5.22.0"}, "note", "untested-set"),
    ("software", {"numactl": None, "numactl_works": False}, "note", "no-numactl"),
    ("software", {"numactl_works": False}, "warning", "binding-forbidden"),
    (
        "software",
        {"numactl": None, "numactl_works": False, "mempolicy_works": False},
        "warning",
        "binding-forbidden",
    ),
    ("software", {"ninja": None}, "note", "no-ninja"),
    ("software", {"compiler": None}, "blocks", "no-compiler"),
    ("software", {"nvidia_driver": "570.12"}, "blocks", "driver-too-old"),
    (
        "machine",
        {"mpam": Mpam(state="off", evidence="this kernel has no MPAM support")},
        "note",
        "mpam-unused",
    ),
    ("machine", {"memory_limit_bytes": 64 * GIB}, "note", "memory-limit"),
    ("machine", {"shm_total_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "warning", "shm-small"),
]


@pytest.mark.parametrize(("part", "change", "severity", "code"), CHANGES)
def test_traps_of_the_machine(part: str, change: dict[str, Any], severity: str, code: str) -> None:
    machine = healthy()
    changed = {
        "gpu": lambda: with_gpu(machine, **change),
        "software": lambda: with_software(machine, **change),
        "machine": lambda: msgspec.structs.replace(machine, **change),
    }[part]()
    finding = only(found(changed))
    assert (finding.severity, finding.code) == (severity, code)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        ({"torch_cuda": None, "torch_rocm": "7.1"}, [("warning", "never-run")]),
        ({"torch_cuda": "13.0"}, [("warning", "never-run"), ("blocks", "torch-no-rocm")]),
        (
            {"torch": None, "torch_cuda": None},
            [("warning", "never-run"), ("blocks", "missing-packages")],
        ),
    ],
)
def test_apu_needs_torch_with_rocm(build: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    machine = with_software(with_gpu(healthy(ONE_GH200), vendor="amd", memory_node=0), **build)
    assert sorted(kinds(found(machine))) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("OMP_NUM_THREADS", "1", "omp-single-thread"),
        ("KMP_AFFINITY", "granularity=fine", "kmp-affinity"),
        ("TORCH_CUDA_ARCH_LIST", "8.0;9.0a", "arch-list-suffix"),
        ("OMP_NUM_THREADS", "16", None),
        ("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX", None),
    ],
)
def test_environment(name: str, value: str, code: str | None) -> None:
    assert kinds(found(healthy(), environment={name: value})) == ([("note", code)] if code else [])


@pytest.mark.parametrize(
    ("needs", "severity"),
    [
        (250 * GIB, ("blocks", "shm-too-small")),
        (190 * GIB, ("warning", "shm-tight")),
        (100 * GIB, None),
    ],
)
def test_shared_memory_for_the_run(needs: int, severity: tuple[str, str] | None) -> None:
    results = found(healthy(), plan=Needs(shm_bytes=needs))
    assert kinds(results) == ([severity] if severity else [])


def test_a_compiled_kernel_needs_no_compiler(tmp_path: Path) -> None:
    machine, home = with_software(healthy(), compiler=None), {"HOME": "/home/me"}
    files = {"/home/me/.cache/so-tui/kernels/adam-1-2.so": ""}
    finding = only(found(machine, files, tmp_path / "t", environment=home))
    assert (finding.severity, finding.code) == ("note", "no-compiler")
    assert "/home/me/.cache/so-tui/kernels" in finding.evidence
    assert only(found(machine, {}, tmp_path / "u", environment=home)).severity == "blocks"
    neither = with_software(healthy(), compiler=None, ninja=None)
    assert found(neither, plan=Needs(mode="gpu")) == (), "build tools do not matter there"


@pytest.mark.parametrize(("flash_attn", "used"), [(None, "torch-flash"), ("2.8.3", "flash-attn-2")])
def test_a_faster_attention_for_this_gpu_is_named(flash_attn: str | None, used: str) -> None:
    finding = only(found(with_software(healthy(), flash_attn=flash_attn, flash_attn_4=None)))
    assert (finding.severity, finding.code) == ("note", "slower-attention")
    assert used in finding.title


LIMITS = "Max locked memory         8388608              8388608              bytes\n"
SWAPS = "Filename Type Size Used Priority\n/dev/nvme0n1p3 partition 16777212 0 -2\n"
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"/proc/swaps": SWAPS}, "swap-on"),
        (
            {"/proc/self/limits": LIMITS, "/sys/class/infiniband/mlx5_0/node_type": "1: CA\n"},
            "locked-memory-limit",
        ),
        ({HUGE_PAGES: "always madvise [never]\n"}, "huge-pages-off"),
    ],
)
def test_traps_in_system_files(tmp_path: Path, files: dict[str, str], code: str) -> None:
    finding = only(found(healthy(EIGHT_H100, page_size_bytes=4096), files, tmp_path / "t"))
    assert (finding.severity, finding.code) == ("note", code)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("[always] madvise never\n", 1),
        ("always [madvise] never\n", 0),
        ("always madvise [never]\n", 0),
    ],
)
def test_huge_pages_beside_large_pages(tmp_path: Path, setting: str, expected: int) -> None:
    machine = healthy(page_size_bytes=65536)
    assert len(found(machine, {HUGE_PAGES: setting}, tmp_path / "t")) == expected


def test_gpu_memory_full_of_file_cache() -> None:
    machine = healthy()
    nodes = tuple(
        msgspec.structs.replace(node, file_cache_bytes=30 * GIB) if node.id in (0, 12) else node
        for node in machine.numa_nodes
    )
    finding = only(found(msgspec.structs.replace(machine, numa_nodes=nodes)))
    assert finding.severity == "warning"
    assert (finding.code, "GPU 1" in finding.title) == ("file-cache-in-gpu-memory", True)
    assert "FilePages 30.0 GiB" in finding.evidence


def test_gpu_memory_managed_by_the_driver(tmp_path: Path) -> None:
    files = {"/proc/driver/nvidia/params": 'EnableMSI: 1\nCoherentGPUMemoryMode: "driver"\n'}
    finding = only(found(healthy(ONE_GH200_CDMM), files, tmp_path / "t"))
    assert (finding.severity, finding.code) == ("note", "gpu-memory-driver-managed")
    assert '"driver"' in finding.evidence


def test_gpu_memory_that_was_not_brought_online() -> None:
    host = dataclasses.replace(ONE_GH200, hbm={}, empty=tuple(range(1, 9)))
    assert only(found(healthy(host))).code == "gpu-memory-offline"


LOGIN_SESSION = {"/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n"}


LOGIND, KILLS = "/etc/systemd/logind.conf", "[Login]\nKillUserProcesses=yes\n"
USER = pwd.getpwuid(os.getuid()).pw_name


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({LOGIND: "[Login]\n#KillUserProcesses=no\n"}, 0),
        ({LOGIND: KILLS}, 1),
        ({LOGIND: KILLS, "/proc/self/cgroup": "0::/user.slice/user@1000.service/app.scope\n"}, 0),
        (
            {"/usr/lib/systemd/logind.conf": KILLS, f"{LOGIND}.d/a.conf": "KillUserProcesses=no\n"},
            0,
        ),
        ({f"{LOGIND}.d/kill.conf": "[Login]\nKillUserProcesses = yes\n"}, 1),
        ({f"{LOGIND}.d/kill.conf": f"{KILLS}KillExcludeUsers=root {USER}\n"}, 0),
    ],
)
def test_sessions_killed_at_logout(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    excluding_nobody = {"/usr/lib/systemd/logind.conf.d/0.conf": "KillExcludeUsers=\n"}
    results = found(healthy(), {**excluding_nobody, **LOGIN_SESSION, **files}, tmp_path / "t")
    assert kinds(results) == [("warning", "killed-at-logout")] * expected


def test_a_training_process_that_was_left_behind() -> None:
    """A real orphan: its parent ends at once, and whatever inherits it is no supervisor."""
    code = """
import os, subprocess, sys
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
os.setsid()  # as a supervisor does
sleep = [sys.executable, "-c", "import time; time.sleep(60)", "so_tui_trainer"]
print(subprocess.Popen(sleep, env={**os.environ, "SO_TUI_RUN": "/runs/left-behind"}, **quiet).pid)
"""
    pid = int(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while (
            "so_tui_trainer" not in Path(f"/proc/{pid}/cmdline").read_text()
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        (finding,) = (
            one
            for one in findings(inspect_machine())
            if one.code == "orphaned-trainers" and str(pid) in one.evidence
        )
        assert "/runs/left-behind" in finding.evidence
    finally:
        os.kill(pid, 9)


def test_the_worst_comes_first() -> None:
    machine = with_software(with_gpu(healthy(), mig=True), compiler=None)
    results = found(machine, environment={"OMP_NUM_THREADS": "1"})
    assert [finding.severity for finding in results] == ["blocks", "warning", "note"]


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "no-nvidia-driver"),
        ({"/proc/driver/nvidia/version": "NVRM version: 580.95.05\n"}, "gpus-not-granted"),
    ],
)
def test_gpus_that_cannot_be_used(tmp_path: Path, files: dict[str, str], code: str) -> None:
    machine = msgspec.structs.replace(healthy(EIGHT_H100), gpus=())
    finding = only(found(machine, files, build_sysroot(EIGHT_H100.listing(), tmp_path)))
    assert (finding.severity, finding.code) == ("warning", code)
    assert "H100" in finding.evidence


def test_gpus_hidden_by_the_environment() -> None:
    machine = msgspec.structs.replace(healthy(EIGHT_H100), gpus=(), hidden_gpus=(0,))
    assert only(found(machine, environment={"CUDA_VISIBLE_DEVICES": ""})).code == "gpus-hidden"
