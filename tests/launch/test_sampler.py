from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest

from so_tui.launch.supervisor.processes import ProcessLoads, ProcessTree, _role_of
from so_tui.launch.supervisor.samples import (
    GpuSampler,
    Sampler,
    _busy_percent,
    _read_cpu_times,
    _read_node_memory,
    _throttling,
    oom_kills,
)
from so_tui.machine import inspect_machine
from so_tui.machine.system_files import SystemFiles
from so_tui.runs.liveness import read_stat
from so_tui.runs.records import ForeignProcess, GpuSample
from tests.support.machines import superchips
from tests.support.waiting import LIMIT_S, wait_for_environment, wait_until

STAT = (
    "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 10 0 10 70 10 0 0 0 5 0\ncpu3 50 0 0 50 0 0 0 0 0 0\nintr 1 2 "
    "3\n"
)


def cpu_ticks(pid: int) -> int:
    """Return what a living process has computed."""
    stat = read_stat(pid)
    assert stat is not None
    return stat.cpu_ticks


def test_cpu_times(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(STAT)
    assert _read_cpu_times(tmp_path) == {0: (80, 100), 3: (50, 100)}


@pytest.mark.parametrize(
    ("before", "after", "percent"),
    [
        ((80, 100), (80, 200), 100),
        ((10, 100), (60, 300), 75),
        ((0, 0), (1, 2), 0),
        ((1, 2), (1, 2), 0),
    ],
)
def test_busy_share(before: tuple[int, int], after: tuple[int, int], percent: int) -> None:
    assert _busy_percent(before, after) == percent


def test_memory_of_a_node_and_of_a_kernel_without_numa(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node/node4"
    folder.mkdir(parents=True)
    (folder / "meminfo").write_text(
        "Node 4 MemTotal:  1000 kB\nNode 4 MemFree:   400 kB\nNode 4 FilePages:  100 kB\n"
    )
    files = SystemFiles(tmp_path)
    assert _read_node_memory(files, 4, sole=False) == {
        "MemTotal": 1024000,
        "MemFree": 409600,
        "FilePages": 102400,
    }
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree:  400 kB\nBuffers: 1 kB\nCached:  50 kB\n"
    )
    assert _read_node_memory(files, 0, sole=True)["Cached"] == 51200


def test_memory_of_the_only_node_is_inspections(tmp_path: Path) -> None:
    """A node's own file is late on a virtual machine whose memory grows."""
    folder = tmp_path / "sys/devices/system/node/node0"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text("0\n")
    (folder / "meminfo").write_text(
        "Node 0 MemTotal:  1000 kB\nNode 0 MemFree:   400 kB\nNode 0 FilePages:  100 kB\n"
    )
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(STAT)
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:  3000 kB\nMemFree:  2300 kB\nCached:  50 kB\n"
    )
    node = inspect_machine(tmp_path).numa_nodes[0]
    sampler = Sampler(
        inspect_machine(tmp_path),
        ProcessTree(frozenset({"MARK=none"}), supervisor_pid=os.getpid()),
        attempt=1,
        root=tmp_path,
    )
    (sample,) = sampler.sample().nodes
    sampler.gpus.close()
    assert (
        (sample.memory_total_bytes, sample.file_cache_bytes)
        == (node.memory_total_bytes, 100 * 1024)
        == (3000 * 1024, 100 * 1024)
    )
    assert (
        sample.memory_used_bytes
        == sample.memory_total_bytes - (node.memory_free_bytes or 0)
        == 700 * 1024
    )


def test_a_real_sample_sees_the_run_work(tmp_path: Path) -> None:
    machine = inspect_machine()
    program = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "MARK": str(tmp_path)}
    ) as child:
        wait_for_environment(child.pid)
        tree = ProcessTree(frozenset({f"MARK={tmp_path}"}), supervisor_pid=-1)
        tree.scan(thorough=True)
        assert [process.pid for process in tree.alive] == [child.pid]
        sampler = Sampler(machine, tree, attempt=1)
        tree.cpu_s()
        begun = cpu_ticks(child.pid)
        time.sleep(1)
        wait_until(
            lambda: cpu_ticks(child.pid) > begun + 20
        )  # on a busy machine it may take longer to compute for 0.2 s
        tree.scan()
        sample = sampler.sample()
        child.kill()
    sampler.gpus.close()
    assert sample.interval_s >= 1
    assert [len(node.cores) for node in sample.nodes if node.cores] == [
        len(node.cpus) for node in machine.cpu_nodes
    ]
    assert max(share for node in sample.nodes for share in node.cores) > 10
    assert sample.run_cpu_s > 0.1
    assert sample.run_memory_bytes is not None
    assert sample.run_memory_bytes > 1_000_000
    assert (sample.run_memory_peak_bytes or 0) >= 1_000_000
    tree.scan()
    assert tree.alive == ()
    assert [process.pid for process in tree.gone] == [child.pid]


def test_other_processes_that_compute_are_named() -> None:
    program = (
        "import ctypes\nctypes.CDLL(None).prctl(15, b'a (b) c')\nprint(flush=True)\nwhile True: "
        "pass"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            loads, found = ProcessLoads(), list[ForeignProcess]()
            assert loads.read() == (), "a first reading has nothing to compare with"
            deadline = time.monotonic() + LIMIT_S
            while not found and time.monotonic() < deadline:
                found = [load for load in loads.read() if load.pid == child.pid]
            others = {load.pid for load in loads.read(without={child.pid})}
        finally:
            child.kill()
    assert [(load.name, load.own) for load in found] == [("a (b) c", True)]
    assert found[0].cores >= 0.1
    assert found[0].cpu in _read_cpu_times()
    assert child.pid not in others


@pytest.mark.parametrize(
    ("reasons", "named"),
    [
        (0, ()),
        (0x1 | 0x2 | 0x10, ()),
        (0x4, ("power",)),
        (0x8 | 0x40, ("heat",)),
        (0x8 | 0x80, ("power-brake",)),
        (0x8, ("hardware",)),
    ],
)
def test_reasons_for_throttling(reasons: int, named: tuple[str, ...]) -> None:
    assert _throttling(reasons) == named


def test_a_driver_that_fails_at_the_end_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor closes its sampler before it concludes how the run ended, perhaps because this
    GPU was lost.
    """

    def lost(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", lost)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lost)
    sampler = GpuSampler(superchips(1).gpus)
    assert sampler.sample() == ()
    sampler.close()


def imitate_nvml(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Have NVML answer these calls, and support no other."""

    def unsupported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in filter(lambda name: name.startswith("nvml"), dir(pynvml)):
        monkeypatch.setattr(pynvml, name, unsupported)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)


def test_nvml_fills_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not support stays unknown."""
    ok, mib = SimpleNamespace, 1 << 20
    imitate_nvml(
        monkeypatch,
        nvmlInit=None,
        nvmlDeviceGetHandleByPciBusId="gpu",
        nvmlDeviceGetMemoryInfo=ok(used=40 << 30, total=96 << 30),
        nvmlDeviceGetUtilizationRates=ok(gpu=97),
        nvmlDeviceGetPowerUsage=431_000,
        nvmlDeviceGetFieldValues=[
            ok(nvmlReturn=0, value=ok(uiVal=700_000)),
            ok(nvmlReturn=3, value=ok(uiVal=0)),
        ],
        nvmlDeviceGetCurrentClocksEventReasons=0x4,
        nvmlDeviceGetComputeRunningProcesses=[ok(pid=7, usedGpuMemory=None)],
        nvmlGpmQueryDeviceSupport=ok(isSupportedDevice=1),
        nvmlGpmSampleAlloc="reading",
        nvmlGpmSampleGet="reading",
        nvmlGpmSampleFree=None,
        c_nvmlGpmMetricsGet_t=ok(metrics=[ok(value=2.0, nvmlReturn=0) for _ in range(4)]),
        nvmlGpmMetricsGet="done",
        nvmlShutdown=None,
    )
    sampler = GpuSampler(superchips(1).gpus)
    known = GpuSample(
        index=0,
        busy_percent=97,
        memory_used_bytes=40 << 30,
        memory_total_bytes=96 << 30,
        power_w=431.0,
        module_power_w=700.0,
        throttling=("power",),
    )
    assert sampler.sample() == (known,), "traffic takes two readings"
    ways = ("pcie_to_gpu", "pcie_to_host", "c2c_to_gpu", "c2c_to_host")
    rates: dict[str, Any] = {f"{way}_bytes_per_s": 2 * mib for way in ways}
    assert sampler.sample() == (msgspec.structs.replace(known, **rates),)
    assert sampler.processes() == {7: {0: None}}
    sampler.close()
    assert sampler.sample() == ()


@pytest.mark.gpu
def test_gpus_are_sampled() -> None:
    gpus = inspect_machine().gpus
    sampler = GpuSampler(gpus)
    sampler.sample()
    time.sleep(1)
    samples = sampler.sample()
    sampler.close()
    assert [sample.index for sample in samples] == [gpu.index for gpu in gpus]
    for sample, gpu in zip(samples, gpus, strict=True):
        assert sample.busy_percent is not None
        assert sample.memory_used_bytes is not None
        assert sample.power_w is not None
        assert (sample.clock_mhz or 0) <= (sample.clock_max_mhz or 0)
        assert sample.power_limit_w is not None
        assert sample.pcie_to_gpu_bytes_per_s is not None
        assert (sample.module_power_w is not None) <= bool(gpu.c2c)
        assert (sample.c2c_to_gpu_bytes_per_s is not None) == bool(gpu.c2c)


def test_oom_kills_are_of_the_cgroup_or_host(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free 1\noom_kill 7\n")
    assert oom_kills(tmp_path) == 7
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    events = tmp_path / "sys/fs/cgroup/job/step"
    events.mkdir(parents=True)
    (events / "memory.events").write_text("low 0\nmax 3\noom 2\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2


RANK = ("numactl", "-m", "0", "python", "-u", "-m", "so_tui_trainer", "--local_rank=0")
LAUNCHER = ("python", "-u", "-m", "deepspeed.launcher.launch", "so_tui_trainer")
SPAWNED = "from multiprocessing.spawn import spawn_main"


@pytest.mark.parametrize(
    ("argv", "parent", "role"),
    [
        (
            ("python", "-m", "deepspeed.launcher.runner", "--module", "so_tui_trainer"),
            None,
            "runner",
        ),
        (("python", "-m", "deepspeed.launcher.runner", "so_tui_trainer"), "runner", "other"),
        (LAUNCHER, "runner", "launcher"),
        (LAUNCHER, "launcher", "other"),
        (("dpkg", "-l", "numactl"), "launcher", "other"),
        (RANK, "launcher", "rank"),
        (RANK, None, "rank"),
        (RANK, "rank", "other"),
        (("python", "-c", SPAWNED, "--multiprocessing-fork"), "rank", "adam"),
        (("python", "-I", "-S", "/lib/superoffload/worker.py"), "rank", "adam"),
        (("python", "-P", "/lib/superoffload/worker.py", "3"), "rank", "adam"),
        (("python", "-P", "/lib/superoffload/worker.py", "3"), "other", "other"),
    ],
)
def test_roles(argv: tuple[str, ...], parent: Any, role: str) -> None:
    assert _role_of(argv, parent) == role
