"""Doctor finds each trap on a machine that has it, and nothing on a healthy machine."""

from __future__ import annotations

import os
import pwd
import tomllib
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.doctor import findings
from so_tui.machine import Mpam, inspect_machine
from so_tui.machine.gpus import GpuHealth
from tests.support import sysroots as hosts
from tests.support.doctor import GIB, Needs, brief, examined, found, healthy, only, with_software
from tests.support.python_path import not_emulated, printed
from tests.support.waiting import wait_until

HEALTHY_GPU = GpuHealth(bus_id="0009:01:00.0", persistence=True, compute_capability=(9, 0))
SWAPS = "Filename Type Size Used Priority\n"
PLAIN = hosts.Host(cpu={0: ("0-7", 32768)}, grace=False)
DRIVER = {"/proc/driver/nvidia/version": "NVRM version: 580.95.05\n"}


def health(**changes: Any) -> dict[str, Any]:
    return {"health": (replace(HEALTHY_GPU, **changes),)}


TRAPS: list[dict[str, Any]] = tomllib.loads((hosts.DATA / "traps.toml").read_text())["trap"]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap["says"])
def test_traps_of_a_machine(trap: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"host": "QUAD_GH200", "software": {}, "without": ()}
    given |= {"environment": {}} | trap
    says, host = given.pop("says"), hosts.HOSTS[given.pop("host")]
    given["software"] = given["software"] | dict.fromkeys(given.pop("without"))
    if "health" in given:
        gpu = msgspec.to_builtins(HEALTHY_GPU) | given["health"]
        given["health"] = (msgspec.convert(gpu, GpuHealth),)
    if "needs" in given:
        given["plan"] = Needs(**given.pop("needs"))
    assert examined(tmp_path, host=host, **given) == says


KILLED = "warning killed-at-logout"
SWAP = {"/proc/swaps": f"{SWAPS}/swap file 8388604 0 -2\n"}
HIDDEN = {"gpus": (), "hidden_gpus": (0,)}
NO_MPAM = Mpam(state="off", evidence="this kernel has no MPAM support")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host": PLAIN, "software": {"torch_cuda": None}, "files": SWAP}, "note no-gpu"),
        ({"machine": {"mpam": NO_MPAM}}, "note mpam-unused"),
        ({"machine": HIDDEN, "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "note gpus-hidden"),
    ],
)
def test_hosts_that_lack_a_part(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert examined(tmp_path, **changes) == says


def test_an_h200_guest_gives_no_alarm(tmp_path: Path) -> None:
    """A typical rented machine: sixteen cores, memory that grows, no swap, half of the memory in
    /dev/shm.
    """
    files = {
        "/proc/swaps": SWAPS,
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/proc/self/limits": "Max locked memory 8388608 8388608 bytes\n",
        "/proc/meminfo": "MemAvailable: 9000000 kB\n",
    }
    software = {"nvidia_driver": "580.159", "cuda_toolkit": None}
    machine = {"page_size_bytes": 4096, "shm_total_bytes": 62 * GIB, "shm_free_bytes": 62 * GIB}
    guest: dict[str, Any] = {
        "host": hosts.ONE_H200_GUEST,
        "machine": machine | {"memory_grows": True},
    }
    own = health(bus_id="0000:05:00.0", uncorrected_ecc_errors=0)
    assert examined(tmp_path, **guest, software=software, files=files, **own) == ""


def test_a_snapshot_is_checked_without_this_host() -> None:
    assert findings(hosts.QUAD_GH200.machine()) == ()


def test_a_compiled_kernel_needs_no_compiler(tmp_path: Path) -> None:
    machine, home = with_software(healthy(), compiler=None), {"HOME": "/home/me"}
    files = {"/home/me/.cache/so-tui/kernels/adam-1-2.so": ""}
    finding = only(found(machine, files, tmp_path, environment=home))
    assert (finding.severity, finding.code) == ("note", "no-compiler")
    assert "/home/me/.cache/so-tui/kernels" in finding.evidence


@pytest.mark.parametrize(("flash_attn", "used"), [(None, "torch-flash"), ("2.8.3", "flash-attn-2")])
def test_a_faster_attention_for_this_gpu_is_named(flash_attn: str | None, used: str) -> None:
    machine = with_software(healthy(), flash_attn=flash_attn, flash_attn_4=None)
    assert used in only(found(machine)).title


def test_gpu_memory_full_of_file_cache() -> None:
    machine = healthy()
    nodes = tuple(
        replace(node, file_cache_bytes=30 * GIB) if node.id in (0, 12) else node
        for node in machine.numa_nodes
    )
    finding = only(found(replace(machine, numa_nodes=nodes)))
    assert brief((finding,)) == "warning file-cache-in-gpu-memory"
    assert "GPU 1" in finding.title
    assert "FilePages 30.0 GiB" in finding.evidence


@pytest.mark.parametrize(
    ("files", "code"), [({}, "no-nvidia-driver"), (DRIVER, "gpus-not-granted")]
)
def test_gpus_that_cannot_be_used(tmp_path: Path, files: dict[str, str], code: str) -> None:
    machine = healthy(hosts.EIGHT_H100, gpus=())
    finding = only(found(machine, files, hosts.build_sysroot(hosts.EIGHT_H100.listing(), tmp_path)))
    assert brief((finding,)) == f"warning {code}"
    assert "H100" in finding.evidence


def test_a_task_mask_away_from_the_gpu() -> None:
    gpus = healthy().gpus[3:]
    finding = only(found(healthy(allowed_cpus=tuple(range(8)), gpus=gpus)))
    assert finding.code == "cores-far-from-gpu"
    assert "GPU 3" in finding.evidence
    assert "216-287" in finding.evidence
    assert found(healthy(allowed_cpus=tuple(range(216, 288)), gpus=gpus)) == ()


def test_few_cores() -> None:
    machine = healthy(hosts.EIGHT_H200, allowed_cpus=tuple(range(16)))
    assert "few-cores" in [finding.code for finding in found(machine)]


def test_a_login_node(tmp_path: Path) -> None:
    command = tmp_path / "sbatch"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    assert only(found(healthy(), environment=environment)).code == "login-node"
    assert found(healthy(), environment={**environment, "SLURM_JOB_ID": "12"}) == ()


def test_a_user_whose_sessions_are_not_killed(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
        "/etc/systemd/logind.conf": "KillUserProcesses=yes\nKillExcludeUsers=nobody-here {}\n",
    }
    for excluded, says in ((pwd.getpwuid(os.getuid()).pw_name, ""), ("x", KILLED)):
        named = {name: text.format(excluded) for name, text in files.items()}
        assert examined(tmp_path, files=named) == says


def test_gpus_in_use(tmp_path: Path) -> None:
    files = {"/proc/71/comm": "python3\n", "/proc/72/environ": "A=1\0SO_TUI_RUN=/runs/qwen-1\0"}
    other = only(found(healthy(), files, tmp_path, **health(pids=(71,))))
    assert brief((other,)) == "warning gpu-busy"
    assert "71 (python3)" in other.evidence
    ours = only(found(healthy(), files, tmp_path, **health(pids=(72,))))
    assert brief((ours,)) == "note gpu-training"
    assert "qwen-1" in ours.evidence


def test_shared_memory_of_ended_processes(tmp_path: Path) -> None:
    large = "x" * (40 << 20)
    left, small = "/dev/shm/torch_4711_99_1", {"/dev/shm/sem.mp-abc": "x"}
    segments = {left: large, "/dev/shm/mine.bin": large, **small}
    finding = only(found(healthy(), segments, tmp_path / "t"))
    assert finding.code == "shm-left-behind"
    assert "torch_4711_99_1" in finding.evidence
    assert f"rm {left}`" in finding.remedy, "only segments that no process has open"
    for name in (left, f"{left} a b"):  # a name may contain spaces
        maps = {"/proc/5/maps": f"7f00-7f01 rw-s 0 00:1 9    {name}\n"}
        assert examined(tmp_path / name[1:], files={name: large, **maps}) == ""


def test_a_training_process_that_was_left_behind() -> None:
    """A real orphan: its parent ends at once, and whatever inherits it is no supervisor."""
    code = f"""
import os, subprocess, sys
os.setsid()  # as a supervisor does
sleep = [sys.executable, "-c", "import time; time.sleep(60)", "so_tui_trainer"]
environment = {{**os.environ, "SO_TUI_RUN": "/runs/left-behind"}}
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), {DEVNULL})
print(subprocess.Popen(sleep, env=environment, **quiet).pid)
"""
    pid = int(printed("-c", code))
    try:
        wait_until(lambda: "so_tui_trainer" in Path(f"/proc/{pid}/cmdline").read_text())
        (finding,) = (
            one
            for one in findings(inspect_machine())
            if one.code == "orphaned-trainers" and str(pid) in one.evidence
        )
        assert "/runs/left-behind" in finding.evidence
    finally:
        os.kill(pid, 9)


@not_emulated
def test_a_folder_in_which_others_can_rename_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named once, and must be sticky only where runs are shared."""
    project = tmp_path / "project"
    (project / "runs").mkdir(parents=True)
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(project / "runs"))

    def said() -> list[tuple[str, bool]]:
        return [
            (one.severity, f"`chmod +t {project}`" in one.remedy)
            for one in findings(inspect_machine())
            if one.code == "runs-exchangeable"
        ]

    assert said() == []
    project.chmod(0o777)
    assert said() == [("note", True)]
    monkeypatch.setenv("SO_TUI_SHARE", "group")
    assert said() == [("warning", True)]
    project.chmod(0o1777)
    assert said() == []


def test_only_own_files_are_to_be_removed_on_this_machine() -> None:
    here = findings(inspect_machine())
    assert brief(here) or not here
    for one in (one for one in here if one.code == "shm-left-behind"):
        for path in map(Path, one.remedy.split("`")[1].split()[1:]):
            assert not path.exists() or path.stat().st_uid == os.getuid()
