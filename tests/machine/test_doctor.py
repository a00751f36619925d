"""Doctor: each trap on the machine that has it, and silence on one that has none."""

from __future__ import annotations

import dataclasses
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from so_tui.machine import Machine, Mpam, Software, inspect_machine
from so_tui.machine.doctor import Finding, Look, findings, look_at
from so_tui.machine.tree import Tree
from so_tui.spec import find_preset, with_values
from tests.support.sysroots import EIGHT_H100, ONE_GH200, ONE_GH200_CDMM, QUAD_GH200, Host, build_sysroot

GIB = 1 << 30
INSTALLED = Software(
    python="3.12.3",
    torch="2.13.0",
    torch_cuda="13.0",
    deepspeed="0.19.8",
    transformers="5.23.0",
    datasets="5.2.0",
    numactl="2.0.19",
    numactl_works=True,
    nvidia_driver="580.95.05",
    compiler="c++ 13.3.0",
    ninja="1.13.0",
)


def healthy(folder: Path, host: Host = QUAD_GH200, **changes: Any) -> Machine:
    """A live machine with nothing wrong, changed as told."""
    machine = host.machine(folder)
    gpus = tuple(msgspec.structs.replace(gpu, uuid=f"GPU-{gpu.index}", compute_mode="Default", mig=False) for gpu in machine.gpus)
    mounted = Mpam(state="mounted", evidence="")
    base = {"live": True, "software": INSTALLED, "gpus": gpus, "mpam": mounted, "shm_total_bytes": 200 * GIB, "shm_free_bytes": 200 * GIB}
    return msgspec.structs.replace(machine, **(base | changes))


def with_gpu(machine: Machine, **changes: Any) -> Machine:
    first, *others = machine.gpus
    return msgspec.structs.replace(machine, gpus=(msgspec.structs.replace(first, **changes), *others))


def with_software(machine: Machine, **changes: Any) -> Machine:
    return msgspec.structs.replace(machine, software=msgspec.structs.replace(INSTALLED, **changes))


def found(machine: Machine, files: dict[str, str] | None = None, folder: Path | None = None, **look: Any) -> tuple[Finding, ...]:
    if folder is not None:
        listing = "\n".join(f"{name}\t{content}".replace("\n", "\\n") for name, content in (files or {}).items())
        look["tree"] = Tree(build_sysroot(listing, folder))
    return look_at(Look(machine=machine, **look))


def needs_of(mode: str = "superoffload", changes: dict[str, str] | None = None, **needs: Any) -> SimpleNamespace:
    """What a plan tells doctor: a run that needs nothing, changed as told."""
    spec = with_values(find_preset("tiny").spec, changes or {})
    base = {
        "mode": mode,
        "spec": spec,
        "fits": True,
        "reasons": (),
        "remedies": (),
        "host_bytes_per_node": {0: 0},
        "shm_bytes": 0,
        "disk_bytes": 0,
    }
    return SimpleNamespace(**(base | {"disk_peak_bytes": 0, "step_s": None} | needs))


def only(results: tuple[Finding, ...]) -> Finding:
    assert len(results) == 1, [finding.title for finding in results]
    assert all([results[0].title, results[0].evidence, results[0].cost, results[0].remedy])
    return results[0]


def test_a_healthy_machine_gives_no_alarm(tmp_path: Path) -> None:
    assert found(healthy(tmp_path / "m"), {}, tmp_path / "t") == ()
    assert found(healthy(tmp_path / "h", EIGHT_H100), {}, tmp_path / "u") == ()


def test_a_plain_machine_without_gpu_gives_a_note_and_no_blocker(tmp_path: Path) -> None:
    plain = healthy(
        tmp_path / "m", Host(cpu={0: ("0-7", 32768)}, grace=False), software=msgspec.structs.replace(INSTALLED, torch_cuda=None)
    )
    busy = {
        "/proc/swaps": "Filename Type Size Used Priority\n/swap file 8388604 0 -2\n",
        "/proc/self/limits": "Max locked memory 65536 65536 bytes\n",
    }
    finding = only(found(plain, busy, tmp_path / "t"))
    assert (finding.severity, finding.title) == ("note", "No GPU")


def test_a_snapshot_is_judged_by_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    assert findings(QUAD_GH200.machine(tmp_path)) == ()


def test_this_machine_is_diagnosed_without_raising() -> None:
    for finding in findings(inspect_machine()):
        assert all([finding.title, finding.evidence, finding.cost, finding.remedy])


CHANGES: list[tuple[str, dict[str, Any], str, str]] = [
    ("gpu", {"compute_mode": "Exclusive_Process"}, "warning", "one process per GPU"),
    ("gpu", {"compute_mode": "Prohibited"}, "blocks", "Prohibited"),
    ("gpu", {"mig": True}, "warning", "MIG"),
    ("gpu", {"vendor": "amd"}, "blocks", "AMD"),
    ("software", {"torch_cuda": None, "torch": "2.10.0+cpu"}, "blocks", "CPU only"),
    ("software", {"deepspeed": None}, "blocks", "deepspeed not installed"),
    ("software", {"deepspeed": "0.18.0"}, "blocks", "not the tested one"),
    ("software", {"numactl": None, "numactl_works": False}, "note", "numactl is not installed"),
    ("software", {"numactl_works": False}, "warning", "Memory cannot be bound"),
    ("software", {"numactl": None, "numactl_works": False, "mempolicy_works": False}, "warning", "Memory cannot be bound"),
    ("software", {"ninja": None}, "note", "ninja is missing"),
    ("software", {"compiler": None}, "blocks", "No C++ compiler"),
    ("software", {"nvidia_driver": "570.12"}, "blocks", "driver is too old"),
    ("machine", {"mpam": Mpam(state="off", evidence="this kernel has no MPAM support")}, "note", "MPAM"),
    ("machine", {"memory_limit_bytes": 64 * GIB}, "note", "limits memory"),
    ("machine", {"shm_total_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "warning", "/dev/shm is very small"),
]


@pytest.mark.parametrize(("part", "change", "severity", "title"), CHANGES)
def test_what_the_machine_itself_tells(tmp_path: Path, part: str, change: dict[str, Any], severity: str, title: str) -> None:
    machine = healthy(tmp_path)
    changed = {
        "gpu": lambda: with_gpu(machine, **change),
        "software": lambda: with_software(machine, **change),
        "machine": lambda: msgspec.structs.replace(machine, **change),
    }[part]()
    finding = only(found(changed))
    assert finding.severity == severity
    assert title in finding.title


@pytest.mark.parametrize(
    ("name", "value", "title"),
    [
        ("OMP_NUM_THREADS", "1", "OMP_NUM_THREADS is 1"),
        ("KMP_AFFINITY", "granularity=fine", "KMP_AFFINITY"),
        ("TORCH_CUDA_ARCH_LIST", "8.0;9.0a", "suffix letter"),
    ],
)
def test_environment(tmp_path: Path, name: str, value: str, title: str) -> None:
    finding = only(found(healthy(tmp_path), environment={name: value}))
    assert finding.severity == "note"
    assert title in finding.title


@pytest.mark.parametrize(("name", "value"), [("OMP_NUM_THREADS", "16"), ("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")])
def test_environment_that_does_no_harm(tmp_path: Path, name: str, value: str) -> None:
    assert found(healthy(tmp_path), environment={name: value}) == ()


@pytest.mark.parametrize(("needs", "severity"), [(250 * GIB, "blocks"), (190 * GIB, "warning"), (100 * GIB, None)])
def test_shared_memory_against_what_the_run_needs(tmp_path: Path, needs: int, severity: str | None) -> None:
    results = found(healthy(tmp_path), plan=needs_of(shm_bytes=needs))
    assert [finding.severity for finding in results] == ([severity] if severity else [])


def test_a_kernel_that_is_kept_needs_no_compiler(tmp_path: Path) -> None:
    machine = with_software(healthy(tmp_path / "m"), compiler=None)
    files = {"/home/me/.cache/so-tui/kernels/adam-1-2.so": ""}
    finding = only(found(machine, files, tmp_path / "t", environment={"HOME": "/home/me"}))
    assert finding.severity == "note"
    assert "/home/me/.cache/so-tui/kernels keeps" in finding.evidence
    assert only(found(machine, {}, tmp_path / "u", environment={"HOME": "/home/me"})).severity == "blocks"


def test_build_tools_do_not_matter_in_gpu_mode(tmp_path: Path) -> None:
    machine = with_software(healthy(tmp_path), compiler=None, ninja=None)
    assert found(machine, plan=needs_of(mode="gpu")) == ()


@pytest.mark.parametrize(
    ("files", "severity", "title"),
    [
        ({"/proc/swaps": "Filename Type Size Used Priority\n/dev/nvme0n1p3 partition 16777212 0 -2\n"}, "note", "Swap"),
        (
            {
                "/proc/self/limits": "Max locked memory         8388608              8388608              bytes\n",
                "/sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
            },
            "note",
            "locked memory",
        ),
        ({"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}, "note", "huge pages are off"),
    ],
)
def test_what_live_files_tell(tmp_path: Path, files: dict[str, str], severity: str, title: str) -> None:
    finding = only(found(healthy(tmp_path / "m", EIGHT_H100, page_size_bytes=4096), files, tmp_path / "t"))
    assert finding.severity == severity
    assert title in finding.title


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("[always] madvise never\n", 1), ("always [madvise] never\n", 0), ("always madvise [never]\n", 0)],
)
def test_huge_pages_on_a_kernel_with_large_pages(tmp_path: Path, setting: str, expected: int) -> None:
    files = {"/sys/kernel/mm/transparent_hugepage/enabled": setting}
    assert len(found(healthy(tmp_path / "m", page_size_bytes=65536), files, tmp_path / "t")) == expected


def test_gpu_memory_full_of_file_cache(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    nodes = tuple(msgspec.structs.replace(node, file_cache_bytes=30 * GIB) if node.id in (0, 12) else node for node in machine.numa_nodes)
    finding = only(found(msgspec.structs.replace(machine, numa_nodes=nodes)))
    assert finding.severity == "warning"
    assert "GPU 1" in finding.title
    assert "30.0 GiB" in finding.evidence


def test_gpu_memory_kept_by_the_driver(tmp_path: Path) -> None:
    files = {"/proc/driver/nvidia/params": 'EnableMSI: 1\nCoherentGPUMemoryMode: "driver"\n'}
    finding = only(found(healthy(tmp_path / "m", ONE_GH200_CDMM), files, tmp_path / "t"))
    assert (finding.severity, "CDMM" in finding.title) == ("note", True)
    assert '"driver"' in finding.evidence


def test_gpu_memory_that_was_not_brought_online(tmp_path: Path) -> None:
    host = dataclasses.replace(ONE_GH200, hbm={}, empty=tuple(range(1, 9)))
    assert "no NUMA node with memory" in only(found(healthy(tmp_path, host))).title


LOGIN_SESSION = {"/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n"}
KILLING_VENDOR = {"/usr/lib/systemd/logind.conf": "KillUserProcesses=yes\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({**LOGIN_SESSION, "/etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=no\n"}, 0),
        ({**LOGIN_SESSION, "/etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n"}, 1),
        ({"/etc/systemd/logind.conf": "KillUserProcesses=yes\n", "/proc/self/cgroup": "0::/user.slice/user@1000.service/app.scope\n"}, 0),
        (
            {
                **LOGIN_SESSION,
                "/usr/lib/systemd/logind.conf": "KillUserProcesses=yes\n",
                "/etc/systemd/logind.conf.d/a.conf": "KillUserProcesses=no\n",
            },
            0,
        ),
        ({**LOGIN_SESSION, "/etc/systemd/logind.conf.d/kill.conf": "[Login]\nKillUserProcesses = yes\n"}, 1),
    ],
)
def test_sessions_that_are_killed_at_logout(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    excluding_nobody = {"/usr/lib/systemd/logind.conf.d/0.conf": "KillExcludeUsers=\n"}
    results = found(healthy(tmp_path / "m"), {**excluding_nobody, **files}, tmp_path / "t")
    assert [finding.title for finding in results] == ["Runs end when you log out"] * expected


def test_users_that_logind_spares(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    files = {**LOGIN_SESSION, "/etc/systemd/logind.conf": f"KillUserProcesses=yes\nKillExcludeUsers=root {user}\n"}
    assert found(healthy(tmp_path / "m"), files, tmp_path / "t") == ()


def test_a_training_process_that_was_left_behind() -> None:
    """A real orphan: its parent ends at once, and whatever inherits it is no supervisor."""
    code = """
import os, subprocess, sys
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
os.setsid()  # as a supervisor does
sleep = [sys.executable, "-c", "import time; time.sleep(60)", "so_tui_trainer"]
print(subprocess.Popen(sleep, env={**os.environ, "SO_TUI_RUN": "/runs/left-behind"}, **quiet).pid)
"""
    pid = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    try:
        deadline = time.monotonic() + 10
        while "so_tui_trainer" not in Path(f"/proc/{pid}/cmdline").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        (finding,) = (one for one in findings(inspect_machine()) if "supervisor" in one.title and str(pid) in one.evidence)
        assert "/runs/left-behind" in finding.evidence
    finally:
        os.kill(pid, 9)


def test_the_worst_comes_first(tmp_path: Path) -> None:
    machine = with_software(with_gpu(healthy(tmp_path), mig=True), compiler=None)
    results = found(machine, environment={"OMP_NUM_THREADS": "1"})
    assert [finding.severity for finding in results] == ["blocks", "warning", "note"]


@pytest.mark.parametrize(
    ("files", "title"),
    [({}, "no driver for them here"), ({"/proc/driver/nvidia/version": "NVRM version: 580.95.05\n"}, "may not use")],
)
def test_gpus_on_the_bus_that_cannot_be_used(tmp_path: Path, files: dict[str, str], title: str) -> None:
    machine = msgspec.structs.replace(healthy(tmp_path, EIGHT_H100), gpus=())
    finding = only(found(machine, files, tmp_path))
    assert finding.severity == "warning"
    assert title in finding.title
    assert "H100" in finding.evidence


def test_gpus_hidden_by_the_environment(tmp_path: Path) -> None:
    machine = msgspec.structs.replace(healthy(tmp_path, EIGHT_H100), gpus=(), notes=("CUDA_VISIBLE_DEVICES hides GPU 0.",))
    assert only(found(machine, environment={"CUDA_VISIBLE_DEVICES": ""})).title == "All GPUs are hidden"
